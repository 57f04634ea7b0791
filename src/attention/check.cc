#include "attention/check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/int_math.h"
#include "core/shape_check.h"
#include "kv_cache/page_layout.h"
#include "kv_cache/pages.h"

namespace opst::attention {

namespace {

constexpr int64_t kMaxHeadDim = 768;
constexpr int64_t kMaxBlock = 4096;

int64_t integer_at(const ConstTensor& t, int64_t offset) {
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[offset]
                               : static_cast<const int32_t*>(t.data)[offset];
}

std::string str(int64_t x) { return std::to_string(x); }

void check_dtypes(ShapeCheck& check, const AttentionInputs& in, const AttentionOutputs& out) {
  const bool f64 = in.query.dtype == DType::f64;
  check.require((in.key.dtype == DType::f64) == f64 && (out.out.dtype == DType::f64) == f64, [&] {
    return std::string("f64 does not mix with other types: query is ") + to_string(in.query.dtype) + ", key " +
           to_string(in.key.dtype) + ", out " + to_string(out.out.dtype);
  });
  check.require(in.value.dtype == in.key.dtype, [&] {
    return std::string("value is ") + to_string(in.value.dtype) + ", but key is " + to_string(in.key.dtype);
  });
}

void check_options(ShapeCheck& check, const AttentionOptions& options) {
  if (options.softmax_scale) {
    check.require(std::isfinite(*options.softmax_scale),
                  [&] { return "softmax_scale is " + std::to_string(*options.softmax_scale) + ", must be finite"; });
  }
  check.require(options.block_q >= 0 && options.block_q <= kMaxBlock,
                [&] { return "block_q is " + str(options.block_q) + ", must be 0 to " + str(kMaxBlock); });
  check.require(options.block_kv >= 0 && options.block_kv <= kMaxBlock,
                [&] { return "block_kv is " + str(options.block_kv) + ", must be 0 to " + str(kMaxBlock); });
}

// Lengths within `capacity`, which `what()` explains. Returns the longest.
template <class What>
int64_t check_lengths(ShapeCheck& check, const ConstTensor& lengths, int64_t capacity, const What& what) {
  int64_t longest = 0;
  for (int64_t b = 0; check.ok() && b < lengths.shape[0]; ++b) {
    const int64_t length = integer_at(lengths, b * lengths.strides[0]);
    check.require(length >= 0 && length <= capacity, [&] {
      return "kv_lengths[" + str(b) + "] is " + str(length) + ", must be 0 to " + str(capacity) + " (" + what() + ")";
    });
    longest = std::max(longest, length);
  }
  return longest;
}

void check_block_table(ShapeCheck& check, const AttentionInputs& in, int64_t num_blocks, int64_t block_size) {
  const ConstTensor& table = in.block_table;
  for (int64_t b = 0; check.ok() && b < table.shape[0]; ++b) {
    const int64_t used = ceil_div(kv_length(in.kv_lengths, b, 0), block_size);
    for (int64_t i = 0; check.ok() && i < used; ++i) {
      const int64_t block = integer_at(table, b * table.strides[0] + i * table.strides[1]);
      if (block >= 0 && block < num_blocks) continue;
      check.require(false, "block_table[" + str(b) + "][" + str(i) + "] is " + str(block) + ", but the cache has " +
                               str(num_blocks) + " blocks");
    }
  }
}

}  // namespace

int64_t kv_length(const ConstTensor& lengths, int64_t b, int64_t kv_len) {
  return lengths.data == nullptr ? kv_len : integer_at(lengths, b * lengths.strides[0]);
}

Result<AttentionProblem> check_forward(const AttentionInputs& in, const AttentionOutputs& out,
                                       const AttentionOptions& options) {
  ShapeCheck check("flash_attention_forward");
  const bool paged = in.block_table.data != nullptr;
  const bool has_lengths = in.kv_lengths.data != nullptr;
  const bool panels = paged && in.page_layout == PageLayout::panel32;
  const std::initializer_list<DType> floats = {DType::f32, DType::bf16, DType::f16, DType::f64};

  check.tensor("query", in.query).dtype(floats).dims({"batch", "num_heads", "query_len", "head_dim"});
  PageSizes pages;
  if (panels) {
    Status dtype = kv_cache::check_layout_dtype("flash_attention_forward", in.page_layout, in.key.dtype);
    if (!dtype.ok()) return dtype;
    pages = kv_cache::check_pages(check, in.page_layout, "key", in.key, "value", in.value);
    kv_cache::require_size(check, "key", "head_dim", pages.head_dim, "query", check["head_dim"]);
  } else if (paged) {
    check.tensor("key", in.key).dtype(floats).dims({"num_blocks", "block_size", "num_kv_heads", "head_dim"});
    check.tensor("value", in.value).dtype(floats).dims({"num_blocks", "block_size", "num_kv_heads", "value_head_dim"});
  } else {
    check.tensor("key", in.key).dtype(floats).dims({"batch", "num_kv_heads", "kv_len", "head_dim"});
    check.tensor("value", in.value).dtype(floats).dims({"batch", "num_kv_heads", "kv_len", "value_head_dim"});
  }
  if (paged) {
    check.tensor("block_table", in.block_table).dtype({DType::i32, DType::i64}).dims({"batch", "max_blocks"});
    check.require(has_lengths, [] { return std::string("block_table is given, but kv_lengths is not"); });
  }
  if (has_lengths) check.tensor("kv_lengths", in.kv_lengths).dtype({DType::i32, DType::i64}).dims({"batch"});
  check.output("out", out.out).dtype(floats).dims({"batch", "num_heads", "query_len", "value_head_dim"});
  const DType statistics = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto statistic = [&](const char* name, const Tensor& t) {
    if (t.data != nullptr) check.output(name, t).dtype({statistics}).dims({"batch", "num_heads", "query_len"});
  };
  statistic("softmax_lse", out.softmax_lse);
  statistic("softmax_max", out.softmax_max);
  statistic("softmax_sum", out.softmax_sum);
  if (panels) {
    kv_cache::require_size(check, "value", "value_head_dim", pages.value_head_dim, "out", check["value_head_dim"]);
    check.require(options.path != AttentionPath::standard,
                  [] { return std::string("path = standard does not read panel32 pages"); });
    check.require(options.block_kv % kPanelRows == 0, [&] {
      return "block_kv is " + str(options.block_kv) + ", must be a multiple of 32 for panel32 pages";
    });
  }
  check_dtypes(check, in, out);
  check_options(check, options);

  for (const char* name : {"head_dim", "value_head_dim"}) {
    const int64_t d = check[name];
    check.require(d >= 1 && d <= kMaxHeadDim,
                  [&] { return std::string(name) + " is " + str(d) + ", must be 1 to " + str(kMaxHeadDim); });
  }
  const int64_t heads = check["num_heads"], kv_heads = check["num_kv_heads"];
  check.require(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0,
                [&] { return "num_heads is " + str(heads) + ", not a multiple of num_kv_heads = " + str(kv_heads); });
  if (!check.ok()) return check.status();

  int64_t kv_len = check["kv_len"];
  if (paged) {
    const int64_t block_size = panels ? pages.block_size : check["block_size"], max_blocks = check["max_blocks"];
    check.require(block_size >= 1, [&] { return "block_size is " + str(block_size) + ", must be at least 1"; });
    if (!check.ok()) return check.status();
    int64_t capacity = 0;
    if (__builtin_mul_overflow(max_blocks, block_size, &capacity)) capacity = std::numeric_limits<int64_t>::max();
    kv_len = check_lengths(check, in.kv_lengths, capacity,
                           [&] { return str(max_blocks) + " blocks of " + str(block_size) + " keys in block_table"; });
    if (check.ok()) check_block_table(check, in, check["num_blocks"], block_size);
  } else if (has_lengths) {
    kv_len = check_lengths(check, in.kv_lengths, kv_len, [] { return std::string("kv_len of key"); });
  }
  if (!check.ok()) return check.status();

  AttentionProblem p;
  p.query_dtype = in.query.dtype;
  p.kv_dtype = in.key.dtype;
  p.batch = check["batch"];
  p.num_heads = heads;
  p.num_kv_heads = kv_heads;
  p.query_len = check["query_len"];
  p.kv_len = kv_len;
  p.head_dim = check["head_dim"];
  p.value_head_dim = check["value_head_dim"];
  p.paged = paged;
  p.page_layout = in.page_layout;
  p.block_size = panels ? pages.block_size : paged ? check["block_size"] : 0;
  p.unit_stride_kv = in.key.strides[3] == 1 && in.value.strides[3] == 1;
  p.options = options;
  return p;
}

}  // namespace opst::attention
