// Whether moe_layer_forward and moe_layer_backward agree with float64, with the steps that they stand for, and with
// themselves on other threads.
#pragma once

#include <string>
#include <vector>

#include "moe_case.h"
#include "product_bound.h"

namespace opst::tools {

struct MoeVerdict {
  std::string step;
  Judged judged;
};

// Of a case whose steps have run: "layer" against float64, and "layer bits": elements with other bits than the steps' or
// than those of 1 and 2 threads. backward: "grad x" and so on, and "grad bits". spoiled: of results that have been
// changed.
std::vector<MoeVerdict> check_moe_layer(Context& context, const MoeCase& data, bool backward, bool spoiled);

}  // namespace opst::tools
