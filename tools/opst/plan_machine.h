// `opst plan attention --machine`, and what the plans of described machines print alike.
#pragma once

#include <string>

#include "attention_case.h"
#include "machine_profile.h"

namespace opst::tools {

struct MachinePlanOptions {
  bool train = false;
  int64_t sram_heads = 0;
};
void plan_attention_on(const std::string& machine, const AttentionArguments& arguments,
                       const MachinePlanOptions& options);

// Its name, units and memories; two or three lines.
std::string machine_text(const MachineProfile& machine);

}  // namespace opst::tools
