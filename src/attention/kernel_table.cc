#include "attention/kernel_table.h"

#include "core/elements.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, KernelTable, kTable, kernel_table)

namespace attention {

const Kernels& kernels_for(Isa isa, AttentionProduct product, DType kv_dtype) {
  if (product == AttentionProduct::f64) return kernel_table(Isa::generic).f64_product;
  const KernelTable& table = kernel_table(isa);
  if (product == AttentionProduct::bf16_dot && table.has_bf16_dot) return table.bf16_dot;
  return table.f32_product[float_index(kv_dtype)];
}

const Geometry& geometry_of(Isa isa, AttentionProduct product) {
  return kernels_for(isa, product, DType::f32).geometry;
}

}  // namespace attention
}  // namespace opst
