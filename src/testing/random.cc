#include "testing/random.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numbers>
#include <random>

#include "testing/elements.h"

namespace opst::test {
namespace {

uint64_t choose_seed() {
  const char* text = std::getenv("OPST_TEST_SEED");
  const uint64_t chosen = text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : std::random_device()();
  std::printf("seed %llu (OPST_TEST_SEED=%llu repeats this run)\n", static_cast<unsigned long long>(chosen),
              static_cast<unsigned long long>(chosen));
  return chosen;
}

struct Range {
  bool integer;
  double largest;
  double smallest;  // positive
};

Range range_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {false, std::numeric_limits<float>::max(), 0x1p-149};
    case DType::f64:
      return {false, std::numeric_limits<double>::max(), std::numeric_limits<double>::denorm_min()};
    case DType::bf16:
      return {false, 0x1.fep127, 0x1p-133};
    case DType::f16:
      return {false, 65504, 0x1p-24};
    case DType::f8_e4m3:
      return {false, 448, 0x1p-9};
    case DType::f8_e5m2:
      return {false, 57344, 0x1p-16};
    case DType::i8:
      return {true, 127, 1};
    case DType::u8:
      return {true, 255, 1};
    case DType::boolean:
      return {true, 1, 1};
    case DType::i32:
    case DType::i64:
      break;
  }
  return {true, std::numeric_limits<int32_t>::max(), 1};
}

double value_of(Fill kind, const Range& range, DType dtype, int64_t index, int64_t row, Random& random) {
  switch (kind) {
    case Fill::normal:
      return random.normal() * (range.integer ? 32 : 1);
    case Fill::uniform:
      return random.uniform(-1, 1) * (range.integer ? range.largest : 1);
    case Fill::small_integers:
      return static_cast<double>(random.integer(-4, 4));
    case Fill::powers_of_two:
      return std::ldexp(random.chance(0.5) ? 1.0 : -1.0, static_cast<int>(random.integer(-3, 3)));
    case Fill::ones:
      return 1;
    case Fill::large_normal:
      return random.normal() * (range.integer ? 32 : dtype == DType::f16 ? 100 : 1000);
    case Fill::alternating_extremes:
      return (index % 2 == 0 ? 1 : -1) * (range.integer ? range.largest : std::sqrt(range.largest));
    case Fill::ascending_rows:
      return static_cast<double>(row) + random.uniform(-0.25, 0.25);
    case Fill::outlier:
      return random.normal() * (range.integer ? 32 : 1);
    case Fill::denormals:
      return static_cast<double>(range.integer ? random.integer(-1, 1) : random.integer(-7, 7)) * range.smallest;
    case Fill::zeros:
      return 0;
    case Fill::nan:
      break;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

uint64_t seed() {
  static const uint64_t chosen = choose_seed();
  return chosen;
}

// A counter through a mixing function (the finaliser known from splitmix64): any seed is as good as another.
uint64_t Random::bits() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::uniform(double low, double high) {
  return low + static_cast<double>(bits() >> 11) * 0x1p-53 * (high - low);
}

double Random::normal() {
  if (has_spare_) {
    has_spare_ = false;
    return spare_;
  }
  const double radius = std::sqrt(-2 * std::log(1 - uniform(0, 1)));
  const double angle = 2 * std::numbers::pi * uniform(0, 1);
  spare_ = radius * std::sin(angle);
  has_spare_ = true;
  return radius * std::cos(angle);
}

int64_t Random::integer(int64_t low, int64_t high) {
  const uint64_t choices = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
  const uint64_t drawn = choices == 0 ? bits() : bits() % choices;
  return static_cast<int64_t>(static_cast<uint64_t>(low) + drawn);
}

const char* to_string(Fill fill) {
  switch (fill) {
    case Fill::normal:
      return "normal";
    case Fill::uniform:
      return "uniform";
    case Fill::small_integers:
      return "small_integers";
    case Fill::powers_of_two:
      return "powers_of_two";
    case Fill::ones:
      return "ones";
    case Fill::large_normal:
      return "large_normal";
    case Fill::alternating_extremes:
      return "alternating_extremes";
    case Fill::ascending_rows:
      return "ascending_rows";
    case Fill::outlier:
      return "outlier";
    case Fill::denormals:
      return "denormals";
    case Fill::zeros:
      return "zeros";
    case Fill::nan:
      return "nan";
  }
  return "unknown";
}

void fill(const Tensor& tensor, Fill kind, Random& random) {
  const Range range = range_of(tensor.dtype);
  const int64_t count = tensor.num_elements();
  const int64_t row_length = tensor.rank > 0 ? tensor.shape[tensor.rank - 1] : 1;
  for (int64_t i = 0; i < count; ++i) {
    set(tensor, i, value_of(kind, range, tensor.dtype, i, i / row_length, random));
  }
  if (kind == Fill::outlier && count > 0) {
    const double factor = range.integer ? range.largest : tensor.dtype == DType::f16 ? 1000 : 10000;
    set(tensor, random.integer(0, count - 1), (random.chance(0.5) ? 1 : -1) * factor);
  }
}

}  // namespace opst::test
