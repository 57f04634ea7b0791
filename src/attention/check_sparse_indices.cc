// The contract of a call's sparse indices and of a rope that lies apart: shapes, then every entry of the lists, before
// anything is written.
//
// The entries are looked at by all threads, O(entries): a thread has a bit for each key block, sets those of a list, and
// takes them back. A list that is refused is looked at once more, for the message.
#include <array>
#include <atomic>
#include <span>

#include "attention/call_heads.h"
#include "attention/check.h"
#include "core/int_math.h"

namespace opst::attention {

namespace {

constexpr const char* kIndices = "sparse_indices.indices";
constexpr int64_t kMostBlockSize = int64_t{1} << 30;

// A tensor of the shape of `like` but for its last dimension.
void bind_rope(ShapeCheck& check, const char* name, const ConstTensor& t, const ConstTensor& like,
               std::span<const char* const> dims) {
  std::array<const char*, 4> names = {};
  std::copy(dims.begin(), dims.end(), names.begin());
  names[dims.size() - 1] = "rope_dim";
  check.tensor(name, t).dtype({like.dtype}).dims(std::span<const char* const>(names.data(), dims.size()));
}

// One list, as far as entries may differ.
template <class Visit>
bool all_entries(const IndexList& list, const Visit& visit) {
  const int64_t different = list.stride == 0 ? std::min<int64_t>(list.count, 2) : list.count;
  for (int64_t i = 0; i < different; ++i) {
    if (!visit(i, int64_t{list[i]})) return false;
  }
  return true;
}
// Whether a list of blocks 0 to blocks - 1 holds. `seen` has a bit for each, all of them 0 before and after.
bool holds(const IndexList& list, int64_t blocks, uint64_t* seen) {
  bool ended = false;
  const auto bit = [](int64_t x) { return uint64_t{1} << (x % 64); };
  int64_t set = 0;
  const bool good = all_entries(list, [&](int64_t i, int64_t x) {
    if (x == -1) return ended = true;
    if (ended || x < 0 || x >= blocks || (seen[x / 64] & bit(x)) != 0) return false;
    seen[x / 64] |= bit(x);
    set = i + 1;
    return true;
  });
  for (int64_t i = 0; i < set; ++i) seen[list[i] / 64] &= ~bit(list[i]);
  return good;
}

Status describe(const char* operator_name, const CallHeads& call, int64_t head, int64_t query, int64_t blocks) {
  ShapeCheck check(operator_name);
  const int64_t b = call.batch(head), kv_head = call.kv_head(head), row = call.sequences.query_start(b) + query;
  const auto name = [&](int64_t i) {
    return call.p.varlen_q ? text(kIndices, "[", row, "][", kv_head, "][", i, "]")
                           : text(kIndices, "[", b, "][", row, "][", kv_head, "][", i, "]");
  };
  const IndexList list = call.index_list(head, query);
  const int64_t kv_len = call.sequences.kv_len(b);
  all_entries(list, [&](int64_t i, int64_t x) {
    check.require(
        x >= -1 && x < blocks, [&] { return name(i); }, " is ", x, ", but sequence ", b, " has ", blocks, " blocks of ",
        list.block_size, " keys (kv_len = ", kv_len, "); only -1 may stand for none");
    check.require(
        x == -1 || i == 0 || list[i - 1] != -1, [&] { return name(i); }, " is ", x, ", but ",
        [&] { return name(i - 1); }, " = -1 ended the list");
    for (int64_t k = 0; k < i && x >= 0 && check.ok(); ++k) {
      check.require(
          list[k] != x, [&] { return name(i); }, " is ", x, ", as is ", [&] { return name(k); }, " of the same list");
    }
    return check.ok();
  });
  return check.status();
}

int64_t seen_words(const AttentionProblem& p) {
  return p.sparse_indices ? ceil_div(ceil_div(p.kv_len, p.sparse_indices.block_size), 64) : 0;
}

}  // namespace

void bind_sparse_indices(ShapeCheck& check, const AttentionInputs& in) {
  static constexpr const char* kDims[] = {"batch", "query_len", "num_kv_heads", "count"};
  static constexpr const char* kVarlenDims[] = {"total_q", "num_kv_heads", "count"};
  const std::span<const char* const> dims = in.cu_seqlens_q ? std::span<const char* const>(kVarlenDims) : kDims;
  if (in.sparse_indices) check.tensor(kIndices, in.sparse_indices.indices).dtype({DType::i32}).dims(dims);
  if (!is_given(in.query_rope) && !is_given(in.key_rope)) return;
  check.require(is_given(in.query_rope) && is_given(in.key_rope), "query_rope and key_rope go together, but ",
                is_given(in.query_rope) ? "key_rope" : "query_rope", " is not given");
  if (!check.ok()) return;
  bind_rope(check, "query_rope", in.query_rope, in.query, call_dims(in).query);
  bind_rope(check, "key_rope", in.key_rope, in.key, call_dims(in).key);
}

void describe_sparse_indices(const ShapeCheck& check, const AttentionInputs& in, AttentionProblem& p) {
  if (in.sparse_indices) p.sparse_indices = {in.sparse_indices.block_size, check["count"]};
  p.rope_dim = check["rope_dim"];
  if (p.rope_dim == 0) return;
  // Whether the ropes are columns behind those of the keys, in one tensor.
  const ConstTensor key = normal_strides(in.key), rope = normal_strides(in.key_rope);
  const int last = key.rank - 1;
  const auto address = [](const ConstTensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
  const auto behind = address(key) + static_cast<uintptr_t>(p.head_dim * key.strides[last] * size_bytes(key.dtype));
  p.copies_keys =
      address(rope) != behind || !same_rows(key, rope) || (p.rope_dim > 1 && rope.strides[last] != key.strides[last]);
  p.head_dim += p.rope_dim;
}

void check_sparse_sizes(ShapeCheck& check, const AttentionInputs& in, const AttentionProblem& p) {
  const AttentionOptions& options = p.options;
  const bool panels = p.paged && options.page_layout == PageLayout::panel32;
  if (p.rope_dim > 0) {
    check.require(p.head_dim > p.rope_dim, "head_dim is 0, must be at least 1 beside rope_dim = ", p.rope_dim);
    check.require(!panels, "query_rope and key_rope are given, but pages are panel32, which hold no other columns");
    check.require(size_bytes(p.kv_dtype) > 1, "query_rope and key_rope are given, but key is ", to_string(p.kv_dtype),
                  ", must be f32, bf16, f16 or f64");
  }
  if (!in.sparse_indices) return;
  const int64_t size = in.sparse_indices.block_size;
  check.require(size >= 1 && size <= kMostBlockSize && (size & (size - 1)) == 0, "sparse_indices.block_size is ", size,
                ", must be 1 or a power of two, at most 2^30");
  check.require(!panels || size % kPanelRows == 0, "sparse_indices.block_size is ", size,
                ", must be a multiple of 32 for panel32 pages");
  check.require(!in.block_mask, "sparse_indices and block_mask are given, but only one may be");
  check.require(options.path != AttentionPath::standard, "path = standard does not take sparse_indices");
}

int64_t index_check_bytes(const AttentionProblem& p, int num_threads) {
  return (Size(seen_words(p)) * static_cast<int64_t>(sizeof(uint64_t)) * num_threads).value();
}

Status check_indices(const char* operator_name, const AttentionInputs& in, const AttentionProblem& p, ThreadPool& pool,
                     void* scratch) {
  const CallHeads call{in, p};
  const int64_t words = seen_words(p), tasks = (Size(call.heads) * p.query_len).value();
  auto* const seen = static_cast<uint64_t*>(scratch);
  std::fill_n(seen, words * pool.num_threads(), 0);
  std::atomic<int64_t> first_bad = tasks;
  const auto blocks_of = [&](int64_t head) {
    return ceil_div(call.sequences.kv_len(call.batch(head)), in.sparse_indices.block_size);
  };
  pool.parallel_for(tasks, [&](int64_t task, int worker) {
    const int64_t head = task / p.query_len, query = task % p.query_len;
    if (query >= call.sequences.query_len(call.batch(head))) return;
    if (holds(call.index_list(head, query), blocks_of(head), seen + worker * words)) return;
    for (int64_t bad = first_bad.load(); task < bad && !first_bad.compare_exchange_weak(bad, task);) {
    }
  });
  const int64_t bad = first_bad.load();
  if (bad == tasks) return {};
  const int64_t head = bad / p.query_len;
  return describe(operator_name, call, head, bad % p.query_len, blocks_of(head));
}

}  // namespace opst::attention
