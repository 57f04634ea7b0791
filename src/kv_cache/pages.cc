#include "kv_cache/pages.h"

#include <algorithm>
#include <string>

#include "core/guarded.h"
#include "core/int_math.h"
#include "kv_cache/page_layout.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, kv_cache, Kernels, kKernels, kernels)

namespace kv_cache {
namespace {

// panel32 is contiguous in the dimensions from `first` on.
void require_contiguous(ShapeCheck& check, const char* name, const ConstTensor& tensor, int first) {
  int64_t expected = 1;
  for (int i = tensor.rank - 1; i >= first; --i) {
    check.require(tensor.shape[i] <= 1 || tensor.strides[i] == expected || tensor.num_elements() == 0, [&] {
      return std::string(name) + " stride " + std::to_string(i) + " is " + std::to_string(tensor.strides[i]) +
             ", but must be " + std::to_string(expected) + ": page layout panel32 is contiguous after num_kv_heads";
    });
    expected *= tensor.shape[i];
  }
}

PageSizes panel_sizes(ShapeCheck& check, ShapeCheck::TensorCheck key_check, const char* key_name,
                      const ConstTensor& key, ShapeCheck::TensorCheck value_check, const char* value_name,
                      const ConstTensor& value) {
  if (key.dtype == DType::bf16) {
    key_check.dims({"num_blocks", "num_kv_heads", "block_size / 32", "head_dim / 2", "64"});
    value_check.dims({"num_blocks", "num_kv_heads", "block_size / 2", "2 * value_head_dim"});
  } else {
    key_check.dims({"num_blocks", "num_kv_heads", "block_size / 32", "head_dim", "32"});
    value_check.dims({"num_blocks", "num_kv_heads", "block_size", "value_head_dim"});
  }
  if (!check.ok()) return {};
  require_contiguous(check, key_name, key, 2);
  require_contiguous(check, value_name, value, 2);
  const int64_t step = panel_step(key.dtype);
  const PageSizes sizes = {.num_blocks = key.shape[0],
                           .block_size = key.shape[2] * kPanelRows,
                           .num_kv_heads = key.shape[1],
                           .head_dim = key.shape[3] * step,
                           .value_head_dim = value.shape[3] / step};
  check.require(value.shape[2] * step == sizes.block_size, [&] {
    return std::string(value_name) + " dim 2 is " + std::to_string(value.shape[2]) +
           ", of block_size = " + std::to_string(value.shape[2] * step) + ", but " + key_name +
           " set block_size = " + std::to_string(sizes.block_size);
  });
  check.require(value.shape[3] % step == 0, [&] {
    return std::string(value_name) + " dim 3 (2 * value_head_dim) is " + std::to_string(value.shape[3]) +
           ", but must be even";
  });
  return sizes;
}

PageSizes sizes_of(ShapeCheck& check, PageLayout layout, ShapeCheck::TensorCheck key_check, const char* key_name,
                   const ConstTensor& key, ShapeCheck::TensorCheck value_check, const char* value_name,
                   const ConstTensor& value) {
  key_check.dtype({DType::f32, DType::bf16, DType::f16});
  value_check.dtype({key.dtype});
  if (layout == PageLayout::panel32) {
    return panel_sizes(check, key_check, key_name, key, value_check, value_name, value);
  }
  key_check.dims({"num_blocks", "block_size", "num_kv_heads", "head_dim"});
  value_check.dims({"num_blocks", "block_size", "num_kv_heads", "value_head_dim"});
  return {.num_blocks = key.shape[0],
          .block_size = key.shape[1],
          .num_kv_heads = key.shape[2],
          .head_dim = key.shape[3],
          .value_head_dim = value.shape[3]};
}

}  // namespace

PageSizes check_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const ConstTensor& key,
                      const char* value_name, const ConstTensor& value) {
  const ShapeCheck::TensorCheck key_check = check.tensor(key_name, key);
  return sizes_of(check, layout, key_check, key_name, key, check.tensor(value_name, value), value_name, value);
}

PageSizes check_output_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const Tensor& key,
                             const char* value_name, const Tensor& value) {
  const ShapeCheck::TensorCheck key_check = check.output(key_name, key);
  return sizes_of(check, layout, key_check, key_name, key, check.output(value_name, value), value_name, value);
}

void require_size(ShapeCheck& check, const char* tensor, const char* name, int64_t size, const char* setter,
                  int64_t expected) {
  check.require(size == expected, [&] {
    return std::string(tensor) + " holds " + name + " = " + std::to_string(size) + ", but " + setter + " set " + name +
           " = " + std::to_string(expected);
  });
}

Status check_layout(const char* operator_name, PageLayout layout, DType dtype, int64_t block_size, int64_t head_dim) {
  const Status status = supports(layout, dtype, block_size, head_dim);
  if (status.ok()) return status;
  return {status.code(), std::string(operator_name) + ": " + status.message()};
}

Status check_layout_dtype(const char* operator_name, PageLayout layout, DType dtype) {
  return layout == PageLayout::norm ? Status() : check_layout(operator_name, layout, dtype, kPanelRows, 0);
}

int64_t panel_step(DType dtype) { return dtype == DType::bf16 ? PanelStep<bf16>::kValue : PanelStep<float>::kValue; }

Pages::Pages(PageLayout layout, PageSide side, const ConstTensor& tensor)
    : data_(static_cast<const char*>(tensor.data)),
      dtype_(tensor.dtype),
      element_bytes_(opst::size_bytes(tensor.dtype)) {
  const ConstTensor t = normal_strides(tensor);
  block_stride_ = t.strides[0];
  if (layout == PageLayout::norm) {
    dim_ = t.shape[3];
    group_ = 1;
    group_stride_ = t.strides[1];
    row_stride_ = 0;
    view_ = {.row_stride = t.strides[2], .word_stride = t.strides[3], .step = 1};
    return;
  }
  const int64_t step = panel_step(t.dtype);
  if (side == PageSide::key) {
    dim_ = t.shape[3] * step;
    group_ = kPanelRows;
    row_stride_ = step;
    view_ = {.row_stride = t.strides[1], .word_stride = kPanelRows * step, .step = step};
  } else {
    dim_ = t.shape[3] / step;
    group_ = step;
    row_stride_ = 1;
    view_ = {.row_stride = t.strides[1], .word_stride = step, .step = 1};
  }
  group_stride_ = group_ * dim_;
}

CopyRowsKernel copy_rows_kernel(Isa isa, DType from, DType to) {
  return kernels(isa).copy_rows[float_index(from)][float_index(to)];
}

}  // namespace kv_cache

const char* to_string(PageLayout layout) {
  switch (layout) {
    case PageLayout::norm:
      return "norm";
    case PageLayout::panel32:
      return "panel32";
  }
  return "unknown";
}

Status supports(PageLayout layout, DType dtype, int64_t block_size, int64_t head_dim) {
  return guarded([&]() -> Status {
    const auto refused = [&](const char* what, const std::string& is, const char* must) {
      return Status::unsupported(std::string("page layout ") + to_string(layout) + ": " + what + " is " + is +
                                 ", but must be " + must);
    };
    if (layout != PageLayout::norm && layout != PageLayout::panel32) {
      return Status::unsupported("page layout " + std::to_string(static_cast<int>(layout)) + " is none");
    }
    if (block_size < 1) return refused("block_size", std::to_string(block_size), ">= 1");
    if (layout == PageLayout::norm) {
      if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return {};
      return refused("dtype", to_string(dtype), "f32, bf16 or f16");
    }
    if (dtype != DType::f32 && dtype != DType::bf16) return refused("dtype", to_string(dtype), "f32 or bf16");
    if (block_size % kPanelRows != 0) return refused("block_size", std::to_string(block_size), "a multiple of 32");
    if (dtype == DType::bf16 && head_dim % 2 != 0) {
      return refused("head_dim", std::to_string(head_dim), "even for bf16");
    }
    return {};
  });
}

namespace {

// Whether a cache with rows of `dim` elements can be held and counted.
bool holds(PageLayout layout, DType dtype, const PageSizes& s, int64_t dim) {
  Size bytes = size_bytes(dtype);
  for (const int64_t size : {s.num_blocks, s.block_size, s.num_kv_heads, dim}) {
    if (size < 0) return false;
    bytes *= std::max<int64_t>(size, 1);
  }
  return bytes.within_limit() && supports(layout, dtype, s.block_size, s.head_dim).ok();
}

}  // namespace

Tensor key_pages(PageLayout layout, DType dtype, const PageSizes& s, void* data) {
  if (!holds(layout, dtype, s, s.head_dim)) return {};
  if (layout == PageLayout::norm) {
    return Tensor::contiguous(dtype, {s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim}, data);
  }
  const int64_t step = kv_cache::panel_step(dtype);
  return Tensor::contiguous(
      dtype, {s.num_blocks, s.num_kv_heads, s.block_size / kPanelRows, s.head_dim / step, kPanelRows * step}, data);
}

Tensor value_pages(PageLayout layout, DType dtype, const PageSizes& s, void* data) {
  if (!holds(layout, dtype, s, s.value_head_dim)) return {};
  if (layout == PageLayout::norm) {
    return Tensor::contiguous(dtype, {s.num_blocks, s.block_size, s.num_kv_heads, s.value_head_dim}, data);
  }
  const int64_t step = kv_cache::panel_step(dtype);
  return Tensor::contiguous(dtype, {s.num_blocks, s.num_kv_heads, s.block_size / step, step * s.value_head_dim}, data);
}

}  // namespace opst
