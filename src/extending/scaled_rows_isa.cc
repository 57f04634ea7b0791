#include "attention/finish.h"
#include "extending/scaled_rows.h"
#include "extending/scaled_rows_kernels.h"

namespace opst::OPST_ISA_NS::extending {

extern const opst::extending::ScaledRowsKernels kScaledRowsKernels;
constinit const opst::extending::ScaledRowsKernels kScaledRowsKernels = {
    .lanes = ScaledRows::V::kLanes,
    .empty_state = attention::empty_state<ScaledRows::V>,
    .attend = attention::attend<ScaledRows>,
    .finish_rows = attention::Finish<ScaledRows::V>::finish_rows};

}  // namespace opst::OPST_ISA_NS::extending
