// int8 activations in blocks of 32 as activations.h defines them, in plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace opst::reference {

// scale * q of each value of x [k]; NaN throughout a block with a value that is not finite.
inline std::vector<double> rounded_to_int8_blocks(const std::vector<double>& x) {
  std::vector<double> out(x.size());
  for (size_t begin = 0; begin < x.size(); begin += 32) {
    const size_t end = std::min(x.size(), begin + 32);
    double top = 0;
    bool finite = true;
    for (size_t t = begin; t < end; ++t) {
      top = std::max(top, std::abs(x[t]));
      finite = finite && std::isfinite(x[t]);
    }
    const float scale = static_cast<float>(top) / 127.0f;
    for (size_t t = begin; t < end; ++t) {
      const float q = scale > 0 && finite ? std::nearbyint(static_cast<float>(x[t]) / scale) : 0.0f;
      out[t] = static_cast<double>(std::clamp(q, -127.0f, 127.0f)) * static_cast<double>(scale);
      if (!finite) out[t] = std::numeric_limits<double>::quiet_NaN();
    }
  }
  return out;
}

}  // namespace opst::reference
