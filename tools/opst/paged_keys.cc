#include "paged_keys.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "command.h"

namespace opst::tools {

namespace {

constexpr int64_t kBlockSize = 64;

PageSizes sizes_of(const AttentionProblem& p, const BlockTable& table) {
  return {table.num_blocks, p.block_size, p.num_kv_heads, p.head_dim, p.value_head_dim};
}

void expect(const Status& status) {
  if (!status.ok()) run_error(status.message());
}

}  // namespace

bool is_byte_format(const std::string& name) {
  return std::find(std::begin(kByteFormats), std::end(kByteFormats), name) != std::end(kByteFormats);
}

void set_pages(const std::string& layout, const std::string& kv_format_name, AttentionProblem& p) {
  const KvFormat format = value_or_fail(kv_format(kv_format_name, p.head_dim, p.value_head_dim));
  p.paged = true;
  p.block_size = kBlockSize;
  p.kv_dtype = format.dtype;
  p.key_groups = format.key_groups;
  p.value_groups = format.value_groups;
  p.has_offsets = format.has_offsets;
  p.options.page_layout = layout == "panel32" ? PageLayout::panel32 : PageLayout::norm;
  p.heads_side_by_side_kv = p.options.page_layout == PageLayout::norm;
  for (const int64_t dim : {p.head_dim, p.value_head_dim}) {
    const Status status = supports(p.options.page_layout, p.kv_dtype, p.block_size, dim);
    if (!status.ok()) usage_error("--pages, --kv-dtype: " + status.message());
  }
}

BlockTable::BlockTable(const AttentionProblem& p, std::vector<int64_t> of_sequences)
    : lengths(std::move(of_sequences)) {
  const auto blocks_of = [&](int64_t keys) { return (keys + p.block_size - 1) / p.block_size; };
  columns = std::max<int64_t>(blocks_of(p.kv_len), 1);  // without an entry a table would be none
  const int64_t same = blocks_of(std::max<int64_t>(p.options.shared_prefix, 0)), own = columns - same;
  num_blocks = same + p.batch * own;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < columns; ++i) blocks.push_back(num_blocks - 1 - (i < same ? i : i + b * own));
  }
  if (lengths.empty()) lengths.assign(static_cast<size_t>(p.batch), p.kv_len);
}

void BlockTable::enter(AttentionInputs& inputs) const {
  const auto batch = static_cast<int64_t>(lengths.size());
  inputs.block_table = ConstTensor::contiguous(DType::i64, {batch, columns}, blocks.data());
  inputs.kv_lengths = ConstTensor::contiguous(DType::i64, {batch}, lengths.data());
}

void share_prefix(int64_t keys, AttentionProblem& p) {
  if (p.batch < 2) usage_error("--shared-prefix takes --batch 2 or more");
  if (keys > p.kv_len) {
    usage_error("--shared-prefix: " + std::to_string(keys) + " is more than the " + std::to_string(p.kv_len) +
                " keys of --seq");
  }
  p.options.shared_prefix = keys;
  // What a call finds in the table: lengths and blocks decide, keys and values need no memory for that.
  const BlockTable table(p);
  const PageSizes sizes = sizes_of(p, table);
  alignas(64) static char nothing[64] = {};
  AttentionInputs in;
  in.query = ConstTensor::contiguous(p.query_dtype, {p.batch, p.num_heads, p.query_len, p.head_dim}, nothing);
  const DType dtype = p.key_groups > 0 ? DType::f32 : p.kv_dtype;  // which takes no scales
  in.key = key_pages(p.options.page_layout, dtype, sizes, nothing);
  in.value = value_pages(p.options.page_layout, dtype, sizes, nothing);
  table.enter(in);
  p.shared_prefix = value_or_fail(attention_problem(in, p.options)).shared_prefix;
}

PagedKeys::PagedKeys(const AttentionProblem& problem, const std::string& kv_format_name,
                     const std::vector<int64_t>& lengths)
    : problem_(problem), table_(problem, lengths) {
  const PageLayout layout = problem.options.page_layout;
  const PageSizes sizes = sizes_of(problem, table_);
  const KvFormat format = value_or_fail(kv_format(kv_format_name, problem.head_dim, problem.value_head_dim));
  key_ = make(key_pages(layout, format.dtype, sizes, nullptr));
  value_ = make(value_pages(layout, format.dtype, sizes, nullptr));
  if (format.key_groups > 0) {
    scales_.key = make(key_scale_pages(layout, sizes, format.key_groups, nullptr));
    scales_.value = make(value_scale_pages(layout, sizes, format.value_groups, nullptr));
  }
  if (format.has_offsets) {
    scales_.key_offsets = make(key_scale_pages(layout, sizes, format.key_groups, nullptr));
    scales_.value_offsets = make(value_scale_pages(layout, sizes, format.value_groups, nullptr));
  }
}

Tensor PagedKeys::make(Tensor shape) {
  const int64_t bytes = shape.num_elements() * size_bytes(shape.dtype);
  buffers_.push_back(value_or_fail(Buffer::allocate(bytes)));
  shape.data = buffers_.back().data();
  std::memset(shape.data, 0, static_cast<size_t>(bytes));
  return shape;
}

std::vector<int64_t> PagedKeys::slots(int64_t batch) const {
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < table_.lengths[static_cast<size_t>(batch)]; ++t) {
    const int64_t block = table_.blocks[static_cast<size_t>(batch * table_.columns + t / problem_.block_size)];
    slots.push_back(block * problem_.block_size + t % problem_.block_size);
  }
  return slots;
}

template <class TensorType>
TensorType PagedKeys::tokens(const TensorType& t, int64_t b) const {
  if (t.rank == 4) return t.selected(0, b).transposed(0, 1);
  const auto first = table_.lengths.begin();
  return t.narrowed(0, std::accumulate(first, first + b, int64_t{0}), first[b]);
}

void PagedKeys::store(const ConstTensor& key, const ConstTensor& value) {
  Context context = value_or_fail(Context::create({.num_threads = 1}));
  for (int64_t b = 0; b < problem_.batch; ++b) {
    const std::vector<int64_t> to = slots(b);
    const ConstTensor slot_mapping = ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(to.size())}, to.data());
    expect(scatter_pa_kv_cache(context, tokens(key, b), tokens(value, b), slot_mapping, key_, value_,
                               {.layout = problem_.options.page_layout, .scales = scales_}));
  }
}

void PagedKeys::read(const ConstTensor& key_pages, const ConstTensor& value_pages, const Tensor& key,
                     const Tensor& value) const {
  Context context = value_or_fail(Context::create({.num_threads = 1}));
  const GatherOptions options = {.layout = problem_.options.page_layout, .scales = scales_};
  AttentionInputs in;
  table_.enter(in);
  for (int64_t b = 0; b < problem_.batch; ++b) {
    expect(gather_pa_kv_cache(context, key_pages, value_pages, in.block_table.narrowed(0, b, 1),
                              in.kv_lengths.narrowed(0, b, 1), tokens(key, b), tokens(value, b), options));
  }
}

void PagedKeys::enter(AttentionInputs& inputs) const {
  inputs.key = key_;
  inputs.value = value_;
  inputs.key_scales = scales_.key, inputs.value_scales = scales_.value;
  inputs.key_offsets = scales_.key_offsets, inputs.value_offsets = scales_.value_offsets;
  table_.enter(inputs);
  inputs.cu_seqlens_k = {};
}

}  // namespace opst::tools
