// Computes   out = rms_norm(x, gain) . weight^T, a tile of rows against panels of the weight
// Shapes     x [rows, k], panels [columns / panel][k][panel], out [rows, columns]
// Loop nest  normalise the rows into scratch; for each panel: k, with the whole tile of out in registers
// Memory     scratch: tile_rows x k floats, 28 KB at k = 576, stays in L1 or L2; the panels stream
// Numerics   f32; k ascending, one multiply-add per term
#include "extending/normed_matmul_kernels.h"
#include "simd/vec.h"
#include "tile/gemm_tile.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::extending {

using opst::extending::NormedTile;
using simd::F32;
using tile::load_row;
using tile::ProductF32;

constexpr int64_t kLanes = F32::kLanes;
constexpr int kTileRows = ProductF32::kTileRows, kTileVecs = ProductF32::kTileVecs;

OPST_INLINE void store_first(F32 v, float* to, int64_t n) { n < kLanes ? v.store_n(to, n) : v.store(to); }

void normalise(const NormedTile& t, int64_t row) {
  const float* const x = t.x + row * t.x_row_stride;
  F32 squares = F32::zero();
  for (int64_t i = 0; i < t.k; i += kLanes) {
    const F32 v = load_row<F32>(x, t.x_stride, i, t.k);
    squares = fma(v, v, squares);
  }
  const F32 mean = F32::set1(simd::hsum(squares) / static_cast<float>(t.k));
  const F32 r = F32::set1(1) / sqrt(mean + F32::set1(t.eps));
  for (int64_t i = 0; i < t.k; i += kLanes) {
    const F32 v = load_row<F32>(x, t.x_stride, i, t.k) * r * load_row<F32>(t.gain, t.gain_stride, i, t.k);
    store_first(v, t.normed + row * t.k + i, t.k - i);
  }
}

// All rows of a tile against one panel of kVecs vectors of columns. A function of its own: see gemm_tile.h.
template <int kVecs>
OPST_NOINLINE void multiply(const NormedTile& t, const float* panel, int64_t column) {
  F32 sums[kTileRows][kVecs];
  OPST_UNROLL for (int i = 0; i < kTileRows; ++i) {
    OPST_UNROLL for (int j = 0; j < kVecs; ++j) sums[i][j] = F32::zero();
  }
  const char* const next = reinterpret_cast<const char*>(panel + t.k * kVecs * kLanes);
  tile::multiply_add_tile<ProductF32, kTileRows, kVecs>(t.k, t.normed, t.k, panel, kVecs * kLanes, next, sums);
  OPST_UNROLL for (int i = 0; i < kTileRows; ++i) {
    OPST_UNROLL for (int j = 0; j < kVecs; ++j) {
      const int64_t begin = column + j * kLanes;
      if (i < t.rows && begin < t.columns) {
        store_first(sums[i][j], t.out + i * t.out_row_stride + begin, t.columns - begin);
      }
    }
  }
}

void run(const NormedTile& t) {
  for (int64_t row = 0; row < t.rows; ++row) normalise(t, row);
  for (int64_t i = t.rows * t.k; i < kTileRows * t.k; ++i) t.normed[i] = 0;
  const float* panel = t.panels;
  for (int64_t column = 0; column < t.columns; column += kTileVecs * kLanes) {
    if (t.columns - column > kLanes) {
      multiply<kTileVecs>(t, panel, column);
    } else {
      multiply<1>(t, panel, column);
    }
    panel += t.k * kTileVecs * kLanes;
  }
}

void pack(const void* const* rows, int64_t stride, int64_t count, int64_t k, float* panels) {
  tile::pack_columns<ProductF32, float>({rows, stride}, count, k, panels);
}

extern const opst::extending::Kernels kKernels;
constinit const opst::extending::Kernels kKernels = {kTileRows, kTileVecs* kLanes, pack, run};

}  // namespace opst::OPST_ISA_NS::extending
