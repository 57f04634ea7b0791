// The kernel table of normed_matmul, one per instruction set level.
#pragma once

#include <cstdint>

namespace opst {
namespace extending {

struct NormedTile {
  int64_t rows, columns, k;  // 1 <= rows <= Kernels::tile_rows
  const float* x;
  int64_t x_row_stride, x_stride;
  const float* gain;
  int64_t gain_stride;
  float eps;
  float* normed;        // scratch [tile_rows][k]
  const float* panels;  // of pack: those of the tile's columns
  float* out;
  int64_t out_row_stride;
};

struct Kernels {
  int64_t tile_rows, panel_columns;
  // count rows of a weight, elements `stride` apart, into panels [k][panel_columns]; the last one is half as wide where
  // that holds the rest. Takes round_up(count, panel_columns) * k floats at most.
  void (*pack)(const void* const* rows, int64_t stride, int64_t count, int64_t k, float* panels);
  void (*run)(const NormedTile& tile);
};

}  // namespace extending

}  // namespace opst
