#include "kv_cache/pages.h"

#include <string>

#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, kv_cache, Kernels, kKernels, kernels)

namespace kv_cache {
namespace {

struct Side {
  PageSide side;
  const char* name;
  ConstTensor tensor;
};

// The dimensions from contiguous_from on lie as the shape says, and hold whole rows.
void check_panels(ShapeCheck& check, const Side& s, const PageFormat& format) {
  const ConstTensor& t = s.tensor;
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= format.contiguous_from; --i) {
    check.require(t.shape[i] <= 1 || t.strides[i] == expected || t.num_elements() == 0, [&] {
      return std::string(s.name) + " stride " + std::to_string(i) + " is " + std::to_string(t.strides[i]) +
             ", but must be " + std::to_string(expected) + ": page layout panel32 is contiguous after num_kv_heads";
    });
    expected *= t.shape[i];
  }
  check.require(format.rank == 5 || t.shape[3] % format.panel_rows == 0, [&] {
    return std::string(s.name) + " dim 3 (" + format.dims[3] + ") is " + std::to_string(t.shape[3]) +
           ", but must be a multiple of " + std::to_string(format.panel_rows);
  });
}

PageSizes check_cache(ShapeCheck& check, PageLayout layout, const Side& key, const Side& value, bool outputs) {
  const DType dtype = key.tensor.dtype;
  // Before the shapes, which depend on the dtype.
  if (layout != PageLayout::norm) check.require(supports(layout, dtype, kPanelRows));
  PageSizes sizes;
  for (const Side* const side : {&key, &value}) {
    const auto& [which, name, tensor] = *side;
    const PageFormat& format = page_format(layout, dtype, which);
    ShapeCheck::TensorCheck of_tensor = outputs ? check.output(name, tensor) : check.tensor(name, tensor);
    if (which == PageSide::key) of_tensor.dtype({DType::f32, DType::bf16, DType::f16});
    of_tensor.dtype({dtype}).dims(dims_of(format));
    if (!check.ok()) return {};
    check_panels(check, *side, format);
    const int64_t block_size = format.block_size(tensor.shape), elements = format.row_elements(tensor.shape);
    check.holds(name, "block_size", block_size);
    check.holds(name, which == PageSide::key ? "head_dim" : "value_head_dim", elements);
    if (which == PageSide::key) {
      sizes = {tensor.shape[0], block_size, tensor.shape[format.heads_dim], elements, 0};
    } else {
      sizes.value_head_dim = elements;
    }
  }
  // Anything else that the layout cannot hold has no such shape.
  if (check.ok() && sizes.block_size == 0) check.require(supports(layout, dtype, sizes.block_size));
  return sizes;
}

}  // namespace

PageSizes check_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const ConstTensor& key,
                      const char* value_name, const ConstTensor& value) {
  return check_cache(check, layout, {PageSide::key, key_name, key}, {PageSide::value, value_name, value}, false);
}

PageSizes check_output_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const Tensor& key,
                             const char* value_name, const Tensor& value) {
  return check_cache(check, layout, {PageSide::key, key_name, key}, {PageSide::value, value_name, value}, true);
}

Pages::Pages(PageLayout layout, PageSide side, const ConstTensor& tensor)
    : data_(static_cast<const char*>(tensor.data)),
      dtype_(tensor.dtype),
      element_bytes_(opst::size_bytes(tensor.dtype)) {
  const PageFormat& format = page_format(layout, tensor.dtype, side);
  const ConstTensor t = normal_strides(tensor);
  dim_ = format.row_elements(t.shape);
  block_stride_ = t.strides[0];
  group_ = format.panel_rows;
  group_stride_ = t.strides[format.rows_dim];
  row_stride_ = format.step;
  view_ = {.row_stride = t.strides[format.heads_dim],
           .word_stride = format.panel_rows * format.step * t.strides[format.rank - 1],
           .step = format.step};
}

CopyRowsKernel copy_rows_kernel(Isa isa, DType from, DType to) {
  return kernels(isa).copy_rows[float_index(from)][float_index(to)];
}

}  // namespace kv_cache
}  // namespace opst
