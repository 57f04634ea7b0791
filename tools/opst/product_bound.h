// How far a product of random numbers may lie from its float64 value, and whether what was computed does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace opst::tools {

// Half a unit in the last place of an f32 of 1.
inline constexpr double kRoundingF32 = 0x1p-24;

// A sum of k products of random numbers and of the sizes `terms` together, rounded at every step: errors of random
// signs grow with the square root of k. What an operand in fixed point may be off is added: half a step of 24 bits below
// the largest |x|, times every |weight|.
inline double sum_bound(int64_t k, double terms, double largest_x, double weights) {
  return kRoundingF32 * ((16 + 2 * std::sqrt(static_cast<double>(k))) * terms + 2 * largest_x * weights);
}

struct Judged {
  int64_t count = 0, wrong = 0;
  double error = 0, bound = 0;  // of the result that lies nearest to its bound, or farthest beyond it
  double worst = 0;             // that error over that bound

  bool ok() const { return wrong == 0; }
  void take(double got, double want, double allowed) {
    const double off = std::fabs(got - want), part = allowed > 0 ? off / allowed : off > 0 ? 1e300 : 0;
    ++count;
    wrong += !(part <= 1);  // NaN is wrong
    if (count == 1 || part > worst || std::isnan(part)) error = off, bound = allowed, worst = part;
  }
};

// At most `most` of 0 .. size - 1, spread evenly.
template <class Body>
void for_each_sample(int64_t size, int64_t most, const Body& body) {
  const int64_t step = std::max<int64_t>(1, (size + most - 1) / std::max<int64_t>(1, most));
  for (int64_t i = 0; i < size; i += step) body(i);
}

}  // namespace opst::tools
