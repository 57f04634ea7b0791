// The kernel table of the kv_cache room, one per instruction set level.
#pragma once

#include <cstdint>

namespace opst {
namespace kv_cache {

// The heads of one token: num_heads rows of head_dim elements; all strides in elements.
struct TokenRows {
  int64_t num_heads, head_dim;
  const void* from;
  int64_t from_head_stride, from_dim_stride;
  void* to;
  int64_t to_head_stride, to_dim_stride;
};

// Indexed by storage types: f32, bf16, f16. Equal types are copied as bits; others round once, to nearest even.
inline constexpr int kNumTypes = 3;
struct Kernels {
  void (*write_token[kNumTypes][kNumTypes])(const TokenRows& rows);  // [from][to]
};

}  // namespace kv_cache

namespace generic::kv_cache {
extern const opst::kv_cache::Kernels kKernels;
}
namespace avx2::kv_cache {
extern const opst::kv_cache::Kernels kKernels;
}
namespace avx512::kv_cache {
extern const opst::kv_cache::Kernels kKernels;
}

}  // namespace opst
