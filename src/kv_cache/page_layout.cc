// Page layouts: the table of their formats, and what is computed from it alone.
#include "opst/page_layout.h"

#include <algorithm>
#include <string>

#include "core/guarded.h"
#include "core/int_math.h"
#include "opst/kv_cache.h"

namespace opst {
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

// Whether a cache with rows of `elements` elements can be held and counted.
bool holds(PageLayout layout, DType dtype, const PageSizes& s, int64_t elements) {
  Size bytes = size_bytes(dtype);
  for (const int64_t size : {s.num_blocks, s.block_size, s.num_kv_heads, elements}) {
    if (size < 0) return false;
    bytes *= std::max<int64_t>(size, 1);
  }
  return bytes.within_limit() && supports(layout, dtype, s.block_size, s.head_dim).ok();
}

Tensor pages(PageLayout layout, DType dtype, PageSide side, const PageSizes& s, int64_t elements, void* data) {
  if (!holds(layout, dtype, s, elements)) return {};
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

const char* to_string(PageLayout layout) {
  switch (layout) {
    case PageLayout::norm:
      return "norm";
    case PageLayout::panel32:
      return "panel32";
  }
  return "unknown";
}

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

Tensor key_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data) {
  return pages(layout, dtype, PageSide::key, sizes, sizes.head_dim, data);
}

Tensor value_pages(PageLayout layout, DType dtype, const PageSizes& sizes, void* data) {
  return pages(layout, dtype, PageSide::value, sizes, sizes.value_head_dim, data);
}

}  // namespace opst
