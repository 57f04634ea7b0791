#include "attention/kernel_table.h"

namespace opst {

#define OPST_DECLARE_LEVEL(level)                   \
  namespace level::attention {                      \
  extern const opst::attention::KernelTable kTable; \
  }
OPST_DECLARE_LEVEL(generic)
#if defined(__x86_64__)
OPST_DECLARE_LEVEL(avx2)
OPST_DECLARE_LEVEL(avx512)
OPST_DECLARE_LEVEL(avx512_bf16)
#endif
#undef OPST_DECLARE_LEVEL

namespace attention {

static const KernelTable& table_for(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::avx512_bf16:
      return avx512_bf16::attention::kTable;
    case Isa::avx512_vnni:  // nothing here uses 8-bit products
    case Isa::avx512:
      return avx512::attention::kTable;
    case Isa::avx2:
      return avx2::attention::kTable;
    case Isa::generic:
      break;
  }
#endif
  (void)isa;
  return generic::attention::kTable;
}

const Kernels& kernels_for(Isa isa, AttentionProduct product, DType kv_dtype) {
  if (product == AttentionProduct::f64) return generic::attention::kTable.f64_product;
  const KernelTable& table = table_for(isa);
  if (product == AttentionProduct::bf16_dot && table.has_bf16_dot) return table.bf16_dot;
  return table.f32_product[kv_dtype == DType::bf16 ? 1 : kv_dtype == DType::f16 ? 2 : 0];
}

}  // namespace attention
}  // namespace opst
