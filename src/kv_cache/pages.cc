// Page layouts: the table of their formats; the check of a cache and addresses in it, computed from that table.
#include "kv_cache/pages.h"

#include "core/guarded.h"
#include "core/int_math.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, kv_cache, Kernels, kKernels, kernels)

namespace {

// In the order of PageFormat: rank, dims, heads_dim, rows_dim, contiguous_from, panel_rows, step. Keys, then values.
constexpr PageFormat kNorm[] = {
    {4, {"num_blocks", "block_size", "num_kv_heads", "head_dim"}, 2, 1, 4, 1, 1},
    {4, {"num_blocks", "block_size", "num_kv_heads", "value_head_dim"}, 2, 1, 4, 1, 1},
};
constexpr PageFormat kPanels[] = {
    {5, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim", "32"}, 1, 2, 2, kPanelRows, 1},
    {4, {"num_blocks", "num_kv_heads", "block_size", "value_head_dim"}, 1, 2, 2, 1, 1},
};
constexpr PageFormat kPanelsOfPairs[] = {
    {5, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim / 2", "64"}, 1, 2, 2, kPanelRows, 2},
    {4, {"num_blocks", "num_kv_heads", "block_size / 2", "2 * value_head_dim"}, 1, 2, 2, 2, 1},
};

// A cache with rows of `elements` elements, if it can be held and counted.
Tensor pages(PageLayout layout, DType dtype, PageSide side, const PageSizes& s, int64_t elements, void* data) {
  Size bytes = size_bytes(dtype);
  for (const int64_t size : {s.num_blocks, s.block_size, s.num_kv_heads, elements}) {
    if (size < 0) return {};
    bytes *= std::max<int64_t>(size, 1);
  }
  if (!bytes.within_limit() || !supports(layout, dtype, s.block_size, s.head_dim).ok()) return {};
  const PageFormat& f = page_format(layout, dtype, side);
  int64_t shape[5];
  shape[0] = s.num_blocks;
  shape[f.heads_dim] = s.num_kv_heads;
  shape[f.rows_dim] = s.block_size / f.panel_rows;
  shape[4] = f.rank == 5 ? f.panel_rows * f.step : 1;
  shape[3] = f.panel_rows * elements / shape[4];
  const Tensor tensor = Tensor::contiguous(dtype, {shape[0], shape[1], shape[2], shape[3], shape[4]}, data);
  return f.rank == 5 ? tensor : tensor.selected(4, 0);
}

}  // namespace

const char* to_string(PageLayout layout) { return name_of(layout, {"norm", "panel32"}); }

const PageFormat& page_format(PageLayout layout, DType dtype, PageSide side) {
  const auto& sides = layout != PageLayout::panel32 ? kNorm : dtype == DType::bf16 ? kPanelsOfPairs : kPanels;
  return sides[side == PageSide::key ? 0 : 1];
}

int64_t PageFormat::block_size(const int64_t* shape) const { return shape[rows_dim] * panel_rows; }

int64_t PageFormat::row_elements(const int64_t* shape) const {
  return shape[3] * (rank == 5 ? shape[4] : 1) / panel_rows;
}

int64_t PageFormat::offset(int64_t row, int64_t d, int64_t row_elements) const {
  return row / panel_rows * panel_rows * row_elements + d / step * panel_rows * step + row % panel_rows * step +
         d % step;
}

Status supports(PageLayout layout, DType dtype, int64_t block_size, int64_t head_dim) {
  return guarded([&]() -> Status {
    const auto refused = [&](const char* what, const auto& is, const char* must) {
      return Status::unsupported(
          text("page layout ", to_string(layout), ": ", what, " is ", is, ", but must be ", must));
    };
    const bool panels = layout == PageLayout::panel32;
    if (!panels && layout != PageLayout::norm) {
      return Status::unsupported(text("page layout ", static_cast<int>(layout), " is none"));
    }
    if (block_size < 1) return refused("block_size", block_size, ">= 1");
    if (dtype != DType::f32 && dtype != DType::bf16 && (panels || dtype != DType::f16)) {
      return refused("dtype", to_string(dtype), panels ? "f32 or bf16" : "f32, bf16 or f16");
    }
    if (panels && block_size % kPanelRows != 0) return refused("block_size", block_size, "a multiple of 32");
    if (panels && dtype == DType::bf16 && head_dim % 2 != 0) return refused("head_dim", head_dim, "even for bf16");
    return {};
  });
}

Tensor key_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data) {
  return pages(layout, dtype, PageSide::key, sizes, sizes.head_dim, data);
}

Tensor value_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data) {
  return pages(layout, dtype, PageSide::value, sizes, sizes.value_head_dim, data);
}

namespace kv_cache {
namespace {

// The dimensions from contiguous_from on lie as the shape says, and hold whole rows.
void check_panels(ShapeCheck& check, const char* name, const ConstTensor& t, const PageFormat& format) {
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= format.contiguous_from; --i) {
    check.require(t.shape[i] <= 1 || t.strides[i] == expected || t.num_elements() == 0, name, " stride ", i, " is ",
                  t.strides[i], ", but must be ", expected, ": page layout panel32 is contiguous after num_kv_heads");
    expected *= t.shape[i];
  }
  check.require(format.rank == 5 || t.shape[3] % format.panel_rows == 0, name, " dim 3 (", format.dims[3], ") is ",
                t.shape[3], ", but must be a multiple of ", format.panel_rows);
}

}  // namespace

PageSizes check_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const ConstTensor& key,
                      const char* value_name, const ConstTensor& value, bool are_outputs) {
  // Before the shapes, which depend on the dtype.
  if (layout != PageLayout::norm) check.require(supports(layout, key.dtype, kPanelRows));
  PageSizes sizes;
  for (const PageSide side : {PageSide::key, PageSide::value}) {
    const bool keys = side == PageSide::key;
    const char* const name = keys ? key_name : value_name;
    const ConstTensor& tensor = keys ? key : value;
    const PageFormat& format = page_format(layout, key.dtype, side);
    ShapeCheck::TensorCheck of_tensor = are_outputs ? check.output(name, tensor) : check.tensor(name, tensor);
    if (keys) of_tensor.dtype(kFloats);
    of_tensor.dtype({key.dtype}).dims(dims_of(format));
    if (!check.ok()) return {};
    check_panels(check, name, tensor, format);
    const int64_t block_size = format.block_size(tensor.shape), elements = format.row_elements(tensor.shape);
    check.holds(name, "block_size", block_size).holds(name, keys ? "head_dim" : "value_head_dim", elements);
    if (keys) {
      sizes = {tensor.shape[0], block_size, tensor.shape[format.heads_dim], elements, 0};
    } else {
      sizes.value_head_dim = elements;
    }
  }
  // Anything else that the layout cannot hold has no such shape.
  if (check.ok() && sizes.block_size == 0) check.require(supports(layout, key.dtype, sizes.block_size));
  return sizes;
}

Pages::Pages(PageLayout layout, PageSide side, const ConstTensor& tensor)
    : data_(static_cast<char*>(const_cast<void*>(tensor.data))), element_bytes_(size_bytes(tensor.dtype)) {
  const PageFormat& format = page_format(layout, tensor.dtype, side);
  const ConstTensor t = normal_strides(tensor);
  dim_ = format.row_elements(t.shape);
  block_stride_ = t.strides[0];
  head_stride_ = t.strides[format.heads_dim];
  group_ = format.panel_rows;
  group_stride_ = t.strides[format.rows_dim];
  row_stride_ = step_ = format.step;
  word_stride_ = format.panel_rows * format.step * t.strides[format.rank - 1];
}

CopyRowsKernel copy_rows_kernel(Isa isa, DType from, DType to) {
  return kernels(isa).copy_rows[float_index(from)][float_index(to)];
}

void check_slots(ShapeCheck& check, const ConstTensor& slot_mapping, const PageSizes& sizes) {
  if (!check.ok()) return;
  const int64_t num_slots = sizes.num_blocks * sizes.block_size;  // the cache's tensors have no more elements than fit
  for (int64_t t = 0; t < distinct(slot_mapping, 0) && check.ok(); ++t) {
    const int64_t slot = index_at(slot_mapping, t);
    check.require(slot >= -1 && slot < num_slots, "slot_mapping[", t, "] is ", slot, ", but the cache has ",
                  sizes.num_blocks, " blocks of ", sizes.block_size, " rows = ", num_slots,
                  " slots (-1 skips a token)");
  }
}

}  // namespace kv_cache
}  // namespace opst
