// Reproducible random inputs.
//
//   Random random(test::seed());            // prints the seed once; OPST_TEST_SEED=N repeats a run
//   fill(query, Fill::normal, random);
#pragma once

#include <cstdint>
#include <initializer_list>

#include "opst/tensor.h"

namespace opst::test {

// This run's seed: OPST_TEST_SEED, else drawn anew by each process. Printed to stdout at the first call.
uint64_t seed();

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits();
  double uniform(double low, double high);
  double normal();
  int64_t integer(int64_t low, int64_t high);  // both included
  bool chance(double probability) { return uniform(0, 1) < probability; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[integer(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  uint64_t state_;
  bool has_spare_ = false;
  double spare_ = 0;
};

// A row is the last dimension.
enum class Fill : uint8_t {
  normal,
  uniform,         // [-1, 1)
  small_integers,  // -4 .. 4: sums and products are exact
  powers_of_two,   // +-2^-3 .. 2^3
  ones,
  large_normal,          // normal * 1000 (f16: * 100)
  alternating_extremes,  // +-the square root of the dtype's largest value, signs in turn
  ascending_rows,        // row r is about r: a running maximum grows at every step
  outlier,               // normal, with one element 10000 times as large (f16: 1000)
  denormals,             // multiples of the dtype's smallest positive value
  zeros,
  nan,
};
inline constexpr Fill kAllFills[] = {Fill::normal,
                                     Fill::uniform,
                                     Fill::small_integers,
                                     Fill::powers_of_two,
                                     Fill::ones,
                                     Fill::large_normal,
                                     Fill::alternating_extremes,
                                     Fill::ascending_rows,
                                     Fill::outlier,
                                     Fill::denormals,
                                     Fill::zeros,
                                     Fill::nan};
const char* to_string(Fill fill);

// Integer dtypes: normal and large_normal have a standard deviation of 32, uniform and alternating_extremes reach the
// ends of the range, denormals are -1, 0 and 1.
void fill(const Tensor& tensor, Fill kind, Random& random);

}  // namespace opst::test
