// The fuzz target of operators as a function, for the test that shows that it can say no.
#pragma once

#include <cstddef>
#include <cstdint>

#include "testing/fuzz_call.h"

namespace opst::test {

// Draws a call from the bytes, makes it and asks. True where it was accepted.
bool fuzz_operator(const uint8_t* data, size_t size, PlantedFault fault);

}  // namespace opst::test
