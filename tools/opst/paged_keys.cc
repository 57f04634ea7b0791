#include "paged_keys.h"

#include <algorithm>
#include <cstring>

#include "command.h"

namespace opst::tools {

namespace {

constexpr int64_t kBlockSize = 128;

PageSizes sizes_of(const AttentionProblem& p) {
  const int64_t blocks = (p.kv_len + p.block_size - 1) / p.block_size;
  return {p.batch * blocks, p.block_size, p.num_kv_heads, p.head_dim, p.value_head_dim};
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
  p.options.page_layout = layout == "panel32" ? PageLayout::panel32 : PageLayout::norm;
  for (const int64_t dim : {p.head_dim, p.value_head_dim}) {
    const Status status = supports(p.options.page_layout, p.kv_dtype, p.block_size, dim);
    if (!status.ok()) usage_error("--pages, --kv-dtype: " + status.message());
  }
}

PagedKeys::PagedKeys(const AttentionProblem& problem, const std::string& kv_format_name) : problem_(problem) {
  const PageLayout layout = problem.options.page_layout;
  const PageSizes sizes = sizes_of(problem);
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
  for (int64_t i = 0; i < sizes.num_blocks; ++i) table_.push_back(sizes.num_blocks - 1 - i);
  lengths_.assign(static_cast<size_t>(problem.batch), problem.kv_len);
  block_table_ = ConstTensor::contiguous(DType::i64, {problem.batch, sizes.num_blocks / problem.batch}, table_.data());
  kv_lengths_ = ConstTensor::contiguous(DType::i64, {problem.batch}, lengths_.data());
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
  const int64_t blocks = block_table_.shape[1];
  for (int64_t t = 0; t < problem_.kv_len; ++t) {
    const int64_t block = table_[static_cast<size_t>(batch * blocks + t / problem_.block_size)];
    slots.push_back(block * problem_.block_size + t % problem_.block_size);
  }
  return slots;
}

void PagedKeys::store(const ConstTensor& key, const ConstTensor& value) {
  Context context = value_or_fail(Context::create({.num_threads = 1}));
  for (int64_t b = 0; b < problem_.batch; ++b) {
    const std::vector<int64_t> to = slots(b);
    const ConstTensor slot_mapping = ConstTensor::contiguous(DType::i64, {problem_.kv_len}, to.data());
    expect(scatter_pa_kv_cache(context, key.selected(0, b).transposed(0, 1), value.selected(0, b).transposed(0, 1),
                               slot_mapping, key_, value_,
                               {.layout = problem_.options.page_layout, .scales = scales_}));
  }
}

void PagedKeys::read(const Tensor& key, const Tensor& value) const {
  Context context = value_or_fail(Context::create({.num_threads = 1}));
  const GatherOptions options = {.layout = problem_.options.page_layout,
                                 .scales = {scales_.key, scales_.value, scales_.key_offsets, scales_.value_offsets}};
  for (int64_t b = 0; b < problem_.batch; ++b) {
    expect(gather_pa_kv_cache(context, key_, value_, block_table_.narrowed(0, b, 1), kv_lengths_.narrowed(0, b, 1),
                              key.selected(0, b).transposed(0, 1), value.selected(0, b).transposed(0, 1), options));
  }
}

void PagedKeys::enter(AttentionInputs& inputs) const {
  inputs.key = key_;
  inputs.value = value_;
  inputs.key_scales = scales_.key, inputs.value_scales = scales_.value;
  inputs.key_offsets = scales_.key_offsets, inputs.value_offsets = scales_.value_offsets;
  inputs.block_table = block_table_;
  inputs.kv_lengths = kv_lengths_;
}

}  // namespace opst::tools
