#include "attention_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing/elements.h"
#include "testing/random.h"

namespace opst::tools {

AttentionCase::AttentionCase(const AttentionSetup& setup) : setup_(setup) {
  const AttentionProblem& p = setup_.problem;
  const DType statistics = p.query_dtype == DType::f64 ? DType::f64 : DType::f32;
  if (setup.sequences.empty()) {
    inputs_.query = make(p.query_dtype, {p.batch, p.num_heads, p.query_len, p.head_dim});
    make_keys();
    outputs_.out = make(p.query_dtype, {p.batch, p.num_heads, p.query_len, p.value_head_dim});
    outputs_.softmax_lse = make(statistics, {p.batch, p.num_heads, p.query_len});
  } else {
    std::vector<int64_t> key_starts = {0};
    query_starts_ = {0};
    for (const AttentionSetup::Sequence& s : setup.sequences) {
      query_starts_.push_back(query_starts_.back() + s.query_len);
      key_starts.push_back(key_starts.back() + s.kv_len);
    }
    inputs_.query = make(p.query_dtype, {query_starts_.back(), p.num_heads, p.head_dim});
    make_keys();
    outputs_.out = make(p.query_dtype, {query_starts_.back(), p.num_heads, p.value_head_dim});
    outputs_.softmax_lse = make(statistics, {p.num_heads, query_starts_.back()});
    inputs_.cu_seqlens_q = make_integers(query_starts_);
    inputs_.cu_seqlens_k = make_integers(key_starts);
  }
  if (setup_.block_mask != nullptr) inputs_.block_mask = setup_.block_mask->mask;
  if (setup_.selected != nullptr) {
    const SparseIndicesSizes& sizes = p.sparse_indices;
    inputs_.sparse_indices = {ConstTensor::contiguous(DType::i32, {p.batch, p.query_len, p.num_kv_heads, sizes.count},
                                                      setup_.selected->data()),
                              sizes.block_size};
  }
  if (setup_.tree != nullptr) {
    inputs_.tree_mask = ConstTensor::contiguous(DType::i64, {p.batch, p.query_len}, setup_.tree->data());
  }
  if (p.has_prefix) {
    std::vector<int64_t> prefixes(static_cast<size_t>(p.batch), setup.prefix);
    inputs_.prefix = make_integers(prefixes);
  }
  if (p.has_bias) inputs_.bias = make(statistics, {1, 1, p.query_len, p.kv_len});
  if (p.has_mask) {
    const Tensor mask = make(DType::boolean, {1, 1, p.query_len, p.kv_len});
    auto* bytes = static_cast<uint8_t*>(mask.data);
    test::Random random(1);
    for (int64_t i = 0; i < mask.num_elements(); ++i) bytes[i] = random.bits() % 8 != 0;
    inputs_.mask = mask;
  }
  if (p.has_alibi) {
    const Tensor slopes = make(statistics, {p.num_heads});
    for (int64_t h = 0; h < p.num_heads; ++h) {
      test::set(slopes, h, std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(p.num_heads)));
    }
    inputs_.alibi_slopes = slopes;
  }
}

Tensor AttentionCase::make(DType dtype, std::initializer_list<int64_t> shape) {
  double bytes = static_cast<double>(opst::size_bytes(dtype));
  for (const int64_t size : shape) bytes *= static_cast<double>(size);
  if (bytes > 0x1p60) run_error("out of memory");  // more than any address
  Tensor t = Tensor::contiguous(dtype, shape, nullptr);
  buffers_.push_back(value_or_fail(Buffer::allocate(t.num_elements() * opst::size_bytes(dtype))));
  t.data = buffers_.back().data();
  test::Random random(buffers_.size());
  if (dtype != DType::boolean) test::fill(t, test::Fill::normal, random);
  return t;
}

void AttentionCase::make_keys() {
  const AttentionProblem& p = setup_.problem;
  const DType dtype = opst::size_bytes(p.kv_dtype) == 1 ? DType::f32 : p.kv_dtype;
  std::vector<int64_t> lengths;
  for (const AttentionSetup::Sequence& s : setup_.sequences) lengths.push_back(s.kv_len);
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const auto make_side = [&](int64_t dim) {
    return lengths.empty() ? make(dtype, {p.batch, p.num_kv_heads, p.kv_len, dim})
                           : make(dtype, {tokens, p.num_kv_heads, dim});
  };
  const Tensor key = make_side(p.head_dim), value = make_side(p.value_head_dim);
  inputs_.key = key, inputs_.value = value;
  if (!p.paged) return;
  pages_ = std::make_unique<PagedKeys>(p, setup_.kv_format, lengths);
  pages_->store(key, value);
  pages_->read(key, value);
}

ConstTensor AttentionCase::make_integers(const std::vector<int64_t>& values) {
  const Tensor t = make(DType::i64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(t.data));
  return t;
}

int64_t AttentionCase::size_bytes() const {
  int64_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.size_bytes();
  return total;
}

void AttentionCase::spoil_values(bool spoiled) {
  const ConstTensor& value = inputs_.value;
  Tensor t = Tensor::contiguous(value.dtype, {value.num_elements()}, const_cast<void*>(value.data));
  const bool tokens_first = value.rank == 3;  // [tokens, heads, dim], else [batch, heads, tokens, dim]
  const int64_t dim = value.shape[value.rank - 1], row = tokens_first ? value.shape[1] * dim : dim;
  const int64_t keys = tokens_first ? value.shape[0] : value.shape[2];
  size_t next = 0;
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    const int64_t key = i / row % keys;
    if (key % 256 != std::min<int64_t>(keys, 256) / 2) continue;
    if (spoiled) lost_.push_back(test::get(t, i));
    test::set(t, i, spoiled ? 0 : lost_[next++]);
  }
  if (!spoiled) lost_.clear();
  if (spoiled && pages_ != nullptr) pages_->store(inputs_.key, inputs_.value);
}

AttentionInputs AttentionCase::call_inputs() const {
  AttentionInputs inputs = inputs_;
  if (pages_ != nullptr) pages_->enter(inputs);
  return inputs;
}

Status AttentionCase::try_run(Context& context, AttentionPath path) const {
  AttentionOptions options = setup_.problem.options;
  options.path = path;
  return flash_attention_forward(context, call_inputs(), outputs_, options);
}

void AttentionCase::run(Context& context, AttentionPath path) const {
  const Status status = try_run(context, path);
  if (!status.ok()) throw CommandError(1, status.message());
}

std::vector<AttentionCase::RowIndex> AttentionCase::sampled_rows(int64_t most) const {
  const AttentionProblem& p = setup_.problem;
  const int64_t queries = query_starts_.empty() ? p.batch * p.query_len : query_starts_.back();
  const int64_t total = p.num_heads * queries, count = std::min(total, most);
  std::vector<RowIndex> rows;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t at = count == 1 ? total - 1 : n * (total - 1) / (count - 1);
    if (query_starts_.empty()) {
      rows.push_back({at / p.query_len / p.num_heads, at / p.query_len % p.num_heads, at % p.query_len});
      continue;
    }
    const int64_t token = at % queries;
    const auto next = std::upper_bound(query_starts_.begin(), query_starts_.end(), token);
    rows.push_back({next - query_starts_.begin() - 1, at / queries, token - *(next - 1)});
  }
  return rows;
}

ConstTensor AttentionCase::row_of(const Tensor& output, const RowIndex& row) const {
  const ConstTensor t = output;
  if (query_starts_.empty()) return t.selected(0, row.batch).selected(0, row.head).selected(0, row.query);
  const int64_t token = query_starts_[static_cast<size_t>(row.batch)] + row.query;
  return t.rank == 3 ? t.selected(0, token).selected(0, row.head) : t.selected(0, row.head).selected(0, token);
}

}  // namespace opst::tools
