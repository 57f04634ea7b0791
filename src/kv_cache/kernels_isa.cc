#include "kv_cache/copy_rows.h"
#include "kv_cache/kernels.h"

namespace opst::OPST_ISA_NS::kv_cache {

extern const opst::kv_cache::Kernels kKernels;
constinit const opst::kv_cache::Kernels kKernels = {{
    {copy_rows<float, float>, copy_rows<float, bf16>, copy_rows<float, f16>},
    {copy_rows<bf16, float>, copy_rows<bf16, bf16>, copy_rows<bf16, f16>},
    {copy_rows<f16, float>, copy_rows<f16, bf16>, copy_rows<f16, f16>},
}};

}  // namespace opst::OPST_ISA_NS::kv_cache
