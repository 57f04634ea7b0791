// The questions that every fuzzed call must answer, whatever it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "opst/context.h"
#include "opst/status.h"
#include "testing/fuzz_operands.h"

namespace opst::test {

using Views = std::vector<Tensor>;
using Call = std::function<Status(Context&, const Views&)>;

struct FuzzedCall {
  Call call;
  std::optional<double> tolerance = {};  // default: what the dtypes allow; 0: the same bits everywhere
  // Comes before the call and writes those of its inputs that another operator makes: a backward's out and lse. Where
  // it is refused, these inputs hold anything and the call's values are not compared. (A backward call whose lse is NaN
  // computes the statistics of the row's whole block once more, and blocks differ between the levels.)
  Call prepare = {};
  Call plain = {};  // the call on contiguous copies, where it differs
  // Infinity times a weight is infinity or, where the weight underflows, NaN: in which tile a key lies decides.
  bool loose_infinities = false;
};

// Faults planted behind the library's back, one for each question: a test shows that the answer is no.
enum class PlantedFault : uint8_t {
  none,
  refused,  // a byte changes though the call was refused
  outside,  // a byte of an input changes
  threads,  // one thread gives another bit
  value,    // the generic level gives another value
};

// A refused call has written nothing. An accepted one wrote its outputs alone, the same bits on one thread, and the
// values that contiguous copies give at the generic level. A broken promise ends the process. True where accepted.
bool answers(const FuzzedCall& fuzzed, Operands& operands, PlantedFault fault);

}  // namespace opst::test
