#include "kv_cache/kernels.h"
#include "kv_cache/write_token.h"

namespace opst::OPST_ISA_NS::kv_cache {

constinit const opst::kv_cache::Kernels kKernels = {{
    {write_token<float, float>, write_token<float, bf16>, write_token<float, f16>},
    {write_token<bf16, float>, write_token<bf16, bf16>, write_token<bf16, f16>},
    {write_token<f16, float>, write_token<f16, bf16>, write_token<f16, f16>},
}};

}  // namespace opst::OPST_ISA_NS::kv_cache
