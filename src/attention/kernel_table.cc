#include "attention/kernel_table.h"

#include "core/elements.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, KernelTable, kTable, kernel_table)
OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, StandardTable, kStandardTable, standard_table)

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

AttendStandard standard_for(Isa isa, AttentionProduct product) {
  if (product == AttentionProduct::f64) return standard_table(Isa::generic).f64;
  const StandardTable& table = standard_table(isa);
  return product == AttentionProduct::bf16_dot && kernel_table(isa).has_bf16_dot ? table.bf16_dot : table.f32;
}

}  // namespace attention
}  // namespace opst
