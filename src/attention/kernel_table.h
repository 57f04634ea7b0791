// The kernel tables that were compiled, by level. A build for another architecture has fewer: a plan for an invented
// machine counts in the tiles of the highest level that was compiled.
#pragma once

#include "attention/kernels.h"
#include "opst/attention.h"

namespace opst::attention {

// The kernels for a product and a storage type of keys and values at the highest compiled level up to `isa` (f64: the
// generic level). Never null.
const Kernels& kernels_for(Isa isa, AttentionProduct product, DType kv_dtype);
// What they count in, the same for every storage type.
const Geometry& geometry_of(Isa isa, AttentionProduct product);
// The standard form, over tiles packed by these kernels.
AttendStandard standard_for(Isa isa, AttentionProduct product);

}  // namespace opst::attention
