// Page layouts: the table of their formats; the check of a cache and addresses in it, computed from that table.
#include "kv_cache/pages.h"

#include <string>

#include "core/guarded.h"
#include "core/int_math.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, kv_cache, Kernels, kKernels, kernels)

namespace {

// In the order of PageFormat: rank, dims, heads_dim, rows_dim, contiguous_from, panel_rows, step, numbers. Keys, values,
// scales of keys, scales of values.
constexpr PageFormat kNorm[] = {
    {4, {"num_blocks", "block_size", "num_kv_heads", "head_dim"}, 2, 1, 4, 1, 1},
    {4, {"num_blocks", "block_size", "num_kv_heads", "value_head_dim"}, 2, 1, 4, 1, 1},
    {4, {"num_blocks", "block_size", "num_kv_heads", "key_groups"}, 2, 1, 4, 1, 1},
    {4, {"num_blocks", "block_size", "num_kv_heads", "value_groups"}, 2, 1, 4, 1, 1},
};
constexpr PageFormat kNormOfHalves[] = {
    {4, {"num_blocks", "block_size", "num_kv_heads", "head_dim / 2"}, 2, 1, 4, 1, 1, 2},
    {4, {"num_blocks", "block_size", "num_kv_heads", "value_head_dim / 2"}, 2, 1, 4, 1, 1, 2},
};
constexpr PageFormat kPanels[] = {
    {5, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim", "32"}, 1, 2, 2, kPanelRows, 1},
    {4, {"num_blocks", "num_kv_heads", "block_size", "value_head_dim"}, 1, 2, 2, 1, 1},
    {5, {"num_blocks", "num_kv_heads", "block_size / 32", "key_groups", "32"}, 1, 2, 2, kPanelRows, 1},
    {4, {"num_blocks", "num_kv_heads", "block_size", "value_groups"}, 1, 2, 2, 1, 1},
};
constexpr PageFormat kPanelsOfPairs[] = {
    {5, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim / 2", "64"}, 1, 2, 2, kPanelRows, 2},
    {4, {"num_blocks", "num_kv_heads", "block_size / 2", "2 * value_head_dim"}, 1, 2, 2, 2, 1},
};
constexpr PageFormat kPanelsOfHalves[] = {
    {5, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim / 2", "32"}, 1, 2, 2, kPanelRows, 1, 2},
    {4, {"num_blocks", "num_kv_heads", "block_size", "value_head_dim / 2"}, 1, 2, 2, 1, 1, 2},
};

// Pages with rows of `numbers` numbers, if they can be held and counted.
Tensor pages(PageLayout layout, DType dtype, PageSide side, const PageSizes& s, int64_t numbers, void* data) {
  Size bytes = size_bytes(dtype);
  for (const int64_t size : {s.num_blocks, s.block_size, s.num_kv_heads, numbers}) {
    if (size < 0) return {};
    bytes *= std::max<int64_t>(size, 1);
  }
  if (!bytes.within_limit() || !supports(layout, dtype, s.block_size, s.head_dim).ok()) return {};
  const PageFormat& f = page_format(layout, dtype, side);
  if (numbers % f.numbers != 0) return {};
  int64_t shape[5];
  shape[0] = s.num_blocks;
  shape[f.heads_dim] = s.num_kv_heads;
  shape[f.rows_dim] = s.block_size / f.panel_rows;
  shape[4] = f.rank == 5 ? f.panel_rows * f.step : 1;
  shape[3] = f.panel_rows * (numbers / f.numbers) / shape[4];
  const Tensor tensor = Tensor::contiguous(dtype, {shape[0], shape[1], shape[2], shape[3], shape[4]}, data);
  return f.rank == 5 ? tensor : tensor.selected(4, 0);
}

}  // namespace

const char* to_string(PageLayout layout) { return name_of(layout, {"norm", "panel32"}); }

const PageFormat& page_format(PageLayout layout, DType dtype, PageSide side) {
  const auto index = static_cast<size_t>(side);
  const bool scales = side == PageSide::key_scales || side == PageSide::value_scales, halves = dtype == DType::u8;
  if (layout != PageLayout::panel32) return halves && !scales ? kNormOfHalves[index] : kNorm[index];
  if (scales) return kPanels[index];
  return dtype == DType::bf16 ? kPanelsOfPairs[index] : halves ? kPanelsOfHalves[index] : kPanels[index];
}

int64_t PageFormat::block_size(const int64_t* shape) const { return shape[rows_dim] * panel_rows; }

int64_t PageFormat::row_elements(const int64_t* shape) const {
  return shape[3] * (rank == 5 ? shape[4] : 1) / panel_rows;
}
int64_t PageFormat::row_numbers(const int64_t* shape) const { return numbers * row_elements(shape); }

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
    const bool held =
        std::find(kv_cache::kPageTypes.begin(), kv_cache::kPageTypes.end(), dtype) != kv_cache::kPageTypes.end();
    if (!held) return refused("dtype", to_string(dtype), "f32, bf16, f16, i8, u8, f8_e4m3 or f8_e5m2");
    if (panels && block_size % kPanelRows != 0) return refused("block_size", block_size, "a multiple of 32");
    if (panels && dtype == DType::bf16 && head_dim % 2 != 0) return refused("head_dim", head_dim, "even for bf16");
    if (dtype == DType::u8 && head_dim % 2 != 0) return refused("head_dim", head_dim, "even for u8, two numbers each");
    return {};
  });
}

Tensor key_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data) {
  return pages(layout, dtype, PageSide::key, sizes, sizes.head_dim, data);
}

Tensor value_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data) {
  return pages(layout, dtype, PageSide::value, sizes, sizes.value_head_dim, data);
}

Tensor key_scale_pages(PageLayout layout, const PageSizes& sizes, int64_t groups, void* data) {
  return pages(layout, DType::f32, PageSide::key_scales, sizes, groups, data);
}
Tensor value_scale_pages(PageLayout layout, const PageSizes& sizes, int64_t groups, void* data) {
  return pages(layout, DType::f32, PageSide::value_scales, sizes, groups, data);
}

PageScales PageScales::blocks(int64_t first, int64_t count) const {
  const auto some = [&](const Tensor& t) { return t.rank > 0 ? t.narrowed(0, first, count) : t; };
  return {some(key), some(value), some(key_offsets), some(value_offsets)};
}

Result<KvFormat> kv_format(std::string_view name, int64_t head_dim, int64_t value_head_dim) {
  return guarded([&]() -> Result<KvFormat> {
    for (const DType dtype : kv_cache::kPageTypes) {
      if (!kv_cache::holds_integers(dtype) && name == to_string(dtype)) return KvFormat{dtype};
    }
    const auto groups = [](int64_t dim) { return dim > 0 && dim % 32 == 0 ? dim / 32 : int64_t{1}; };
    for (const bool has_offsets : {false, true}) {
      if (name == (has_offsets ? "int8_offset" : "int8")) return KvFormat{DType::i8, 1, 1, has_offsets};
      if (name == (has_offsets ? "int4_offset" : "int4")) {
        return KvFormat{DType::u8, groups(head_dim), groups(value_head_dim), has_offsets};
      }
    }
    return Status::invalid_argument(text("kv_format: \"", std::string(name),
                                         "\" is no format: f32, bf16, f16, f8_e4m3, f8_e5m2, int8, int8_offset, int4 "
                                         "and int4_offset are"));
  });
}

namespace kv_cache {

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

PageSizes check_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const ConstTensor& key,
                      const char* value_name, const ConstTensor& value, bool are_outputs,
                      std::initializer_list<DType> dtypes) {
  // Before the shapes, which depend on the dtype.
  if (layout != PageLayout::norm) check.require(supports(layout, key.dtype, kPanelRows));
  PageSizes sizes;
  for (const PageSide side : {PageSide::key, PageSide::value}) {
    const bool keys = side == PageSide::key;
    const char* const name = keys ? key_name : value_name;
    const ConstTensor& tensor = keys ? key : value;
    const PageFormat& format = page_format(layout, key.dtype, side);
    ShapeCheck::TensorCheck of_tensor = are_outputs ? check.output(name, tensor) : check.tensor(name, tensor);
    if (keys) of_tensor.dtype(dtypes);
    of_tensor.dtype({key.dtype}).dims(dims_of(format));
    if (!check.ok()) return {};
    check_panels(check, name, tensor, format);
    const int64_t block_size = format.block_size(tensor.shape), numbers = format.row_numbers(tensor.shape);
    check.holds(name, "block_size", block_size).holds(name, keys ? "head_dim" : "value_head_dim", numbers);
    if (keys) {
      sizes = {tensor.shape[0], block_size, tensor.shape[format.heads_dim], numbers, 0};
    } else {
      sizes.value_head_dim = numbers;
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
  const auto index = [](DType dtype) {
    return dtype == DType::f8_e4m3 ? 3 : dtype == DType::f8_e5m2 ? 4 : float_index(dtype);
  };
  const Kernels& table = kernels(isa);
  return holds_integers(from) ? table.copy_bytes : table.copy_rows[index(from)][index(to)];
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
