// Random int8 and int4 weights with their values.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "matmul/test_calls.h"
#include "opst/matmul.h"
#include "testing/contexts.h"
#include "testing/random.h"

namespace opst::test {

inline std::vector<int64_t> integers(int64_t count, int64_t low, int64_t high, Random& random) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  for (int64_t& value : out) value = random.integer(low, high);
  return out;
}

inline void put_i8(const Tensor& tensor, const std::vector<int64_t>& values) {
  const int64_t cols = tensor.shape[1];
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    static_cast<int8_t*>(tensor.data)[at / cols * tensor.strides[0] + at % cols * tensor.strides[1]] =
        static_cast<int8_t>(values[i]);
  }
}

// A weight in all its forms.
struct IntWeight {
  int64_t n, k, groups;
  int bits;
  std::vector<int64_t> q, zeros;  // zeros: empty for none
  std::vector<float> scales;
  PackedIntWeight packed;

  IntWeight(int bits_, int64_t n_, int64_t k_, int64_t groups_, bool with_zeros, Random& random)
      : n(n_), k(k_), groups(groups_), bits(bits_) {
    const int64_t most = bits == 8 ? 127 : 7;
    q = integers(n * k, -most - 1, most, random);
    if (random.chance(0.2)) std::fill(q.begin(), q.end(), random.pick({-most - 1, most}));
    if (with_zeros) zeros = integers(n * groups, -128, 127, random);
    for (int64_t i = 0; i < n * groups; ++i) scales.push_back(static_cast<float>(random.normal()));
    pack(random);
  }

  void pack(Random& random) {
    const Guard guard = random.pick({Guard::after, Guard::before});
    Matrix bytes(bits == 8 ? DType::i8 : DType::u8, n, bits == 8 ? k : k / 2, bits == 8 && random.chance(0.5), guard);
    if (bits == 8) {
      put_i8(bytes.tensor, q);
    } else {
      for (size_t i = 0; i < q.size(); i += 2) {
        static_cast<uint8_t*>(bytes.tensor.data)[i / 2] = static_cast<uint8_t>((q[i] & 15) | (q[i + 1] & 15) << 4);
      }
    }
    Matrix scale(DType::f32, n, groups, random.chance(0.5), guard),
        zero(DType::i8, n, groups, random.chance(0.5), guard);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t g = 0; g < groups; ++g) {
        static_cast<float*>(scale.tensor.data)[row * scale.tensor.strides[0] + g * scale.tensor.strides[1]] =
            scales[static_cast<size_t>(row * groups + g)];
      }
    }
    IntMatrix matrix{bytes.tensor, scale.tensor};
    if (!zeros.empty()) {
      put_i8(zero.tensor, zeros);
      matrix.zeros = zero.tensor;
    }
    Result<PackedIntWeight> result = PackedIntWeight::pack(contexts_with_threads(1).back().context, matrix);
    ASSERT_TRUE(result.ok()) << result.status().message();
    packed = std::move(result.value());
  }

  int64_t group(int64_t t) const { return t / (k / groups); }
  // q - zero
  int64_t integer(int64_t row, int64_t t) const {
    const int64_t value = q[static_cast<size_t>(row * k + t)];
    return zeros.empty() ? value : value - zeros[static_cast<size_t>(row * groups + group(t))];
  }
  float value(int64_t row, int64_t t) const {
    return static_cast<float>(integer(row, t)) * scales[static_cast<size_t>(row * groups + group(t))];
  }
};

}  // namespace opst::test
