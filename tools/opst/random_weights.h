// Weights with random numbers in every type that `opst bench|check matmul` and `moe` know, packed and as doubles.
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "opst/matmul.h"
#include "testing/random.h"

namespace opst::tools {

// `count` matrices [n, k] of a float type, a quantised format, or i8 or i4 with a scale per output. The first is drawn;
// the others have its rows in other places.
class RandomWeights {
 public:
  RandomWeights(const std::string& dtype, int64_t count, int64_t n, int64_t k, test::Random& random);

  bool integers() const { return !ints_.empty(); }
  // The matrices, or so many copies of the first one, as a stack; stack false: the first alone. Of integers() or not.
  PackedWeight pack(Context& context, bool stack, int64_t copies = 0) const;
  PackedIntWeight pack_integers(Context& context, bool stack, int64_t copies = 0) const;
  // Matrix e as numbers, row-major.
  std::vector<double> values(Context& context, int64_t e) const;
  int64_t matrix_bytes() const;  // of one, without scales
  // The matrices of a float type as they are, one behind another.
  Buffer unpacked() const;

 private:
  int64_t n_, k_;
  std::vector<Buffer> memory_;
  std::vector<QuantMatrix> blocks_;
  std::vector<IntMatrix> ints_;
};

}  // namespace opst::tools
