// What no caller should pass, and may: sizes that no memory holds, which strides of 0 make legal for inputs, negative
// ones, strides that mean nothing, ranks and enumerators that are none, addresses between elements. Every tensor is
// honest: its elements lie in memory between forbidden pages, so that a wild read or write is a fault, or its data is
// null.
//
//   Extremes draw(random);
//   const int64_t m = draw.size(), n = draw.size();
//   const Status status = add(context, draw.input(DType::f32, {m, n}), .., draw.output(DType::f32, {m, n}));
//   draw.expect_untouched(status);                  // where the call was refused
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

class Extremes {
 public:
  // `least`: the smallest of the large sizes. 2^31 bytes are memory and time in earnest where a call may take them.
  explicit Extremes(Random& random, int64_t least = int64_t{1} << 31) : random_(random), least_(least) {}

  int64_t size() {
    const double kind = random_.uniform(0, 1);
    if (kind < 0.08) return 0;
    if (kind < 0.82) return random_.integer(1, 6);
    return random_.pick<int64_t>({least_, least_ + 1, int64_t{1} << 40, int64_t{1} << 53, int64_t{1} << 62,
                                  std::numeric_limits<int64_t>::max(), -1, std::numeric_limits<int64_t>::min()});
  }
  // The value as it should be, or now and then another byte.
  template <class Enumeration>
  Enumeration enumerator(std::initializer_list<Enumeration> usual) {
    return random_.chance(0.02) ? static_cast<Enumeration>(random_.integer(0, 255)) : random_.pick(usual);
  }

  // Its bytes are all `byte`: 0, or 0xff, which is -1 and NaN.
  ConstTensor input(DType dtype, const std::vector<int64_t>& shape, uint8_t byte = 0) {
    const Tensor tensor = honest(enumerator({dtype}), shape, true);
    if (tensor.data == nullptr) return tensor;
    std::memset(inputs_.emplace_back(kMostBytes).data(), byte, kMostBytes);
    ConstTensor view = tensor;
    // Small ones end where the memory does.
    view.data = static_cast<char*>(inputs_.back().data()) + kMostBytes - span_bytes(tensor);
    inputs_.back().make_read_only();
    return disturbed(view);
  }
  Tensor output(DType dtype, const std::vector<int64_t>& shape) {
    Tensor tensor = honest(enumerator({dtype}), shape, false);
    if (tensor.data == nullptr) return tensor;
    tensor.data = outputs_.emplace_back(std::max<int64_t>(span_bytes(tensor), 1)).data();
    return disturbed(tensor);
  }

  // A refused call has written nothing.
  void expect_untouched(const Status& status) const {
    if (status.ok()) return;
    EXPECT_FALSE(status.message().empty());
    EXPECT_NE(status.code(), StatusCode::internal) << status.message();
    for (const GuardedBuffer& buffer : outputs_) {
      const auto* const bytes = static_cast<const uint8_t*>(buffer.data());
      const bool untouched = std::all_of(bytes, bytes + buffer.size_bytes(), [](uint8_t b) { return b == 0xff; });
      EXPECT_TRUE(untouched) << "written before it was refused: " << status.message();
    }
  }

 private:
  static constexpr int64_t kMostBytes = 4096;

  // Strides that keep all elements within kMostBytes; data: null where there are none, where an output would have to
  // repeat some, and now and then.
  Tensor honest(DType dtype, const std::vector<int64_t>& shape, bool may_repeat) {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = static_cast<int>(shape.size());
    const int64_t most = kMostBytes / std::max<int64_t>(1, size_bytes(dtype));
    int64_t stride = 1;
    bool repeats = false, empty = false;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      const int64_t size = shape[static_cast<size_t>(i)];
      tensor.shape[i] = size;
      empty = empty || size <= 0;
      if (size <= 1) {
        tensor.strides[i] = random_.pick<int64_t>({0, 1, -7, std::numeric_limits<int64_t>::max()});
      } else if (size <= most / stride) {
        tensor.strides[i] = stride;
        stride *= size;
      } else {
        repeats = true;
      }
    }
    if (random_.chance(0.02) || empty || (repeats && !may_repeat && random_.chance(0.5))) return tensor;
    static char somewhere;
    tensor.data = &somewhere;
    return tensor;
  }
  static int64_t span_bytes(const Tensor& tensor) {
    int64_t span = 1;
    for (int i = 0; i < tensor.rank; ++i) {
      if (tensor.shape[i] > 1) span += (tensor.shape[i] - 1) * tensor.strides[i];
    }
    return span * size_bytes(tensor.dtype);
  }
  template <class AnyTensor>
  AnyTensor disturbed(AnyTensor tensor) {
    if (random_.chance(0.01)) tensor.rank = static_cast<int>(random_.pick<int64_t>({-1, 0, 1, 2, 3, 6, 100}));
    if (random_.chance(0.01) && size_bytes(tensor.dtype) > 1) {
      tensor.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(tensor.data))) + 1;
    }
    return tensor;
  }

  Random& random_;
  int64_t least_;
  std::vector<GuardedBuffer> inputs_, outputs_;
};

// Runs rounds of calls that are drawn by Extremes.
class ExtremesTest : public testing::Test {
 protected:
  // num_rounds: of each `rounds`; least: of Extremes.
  explicit ExtremesTest(int num_rounds, int64_t least = int64_t{1} << 31) : num_rounds_(num_rounds), least_(least) {}

  // `call(draw)` draws a call, makes it and returns its Status.
  template <class Call>
  void rounds(const Call& call) {
    int accepted = 0;
    for (int i = 0; i < num_rounds_; ++i) {
      Extremes draw(random_, least_);
      const Status status = call(draw);
      draw.expect_untouched(status);
      accepted += status.ok() ? 1 : 0;
      if (HasFailure()) FAIL() << "round " << i;
    }
    EXPECT_GT(accepted, num_rounds_ / 50);
  }
  DType float_type() { return random_.pick({DType::f32, DType::bf16, DType::f16}); }

  Random random_{seed()};
  Context context_ = std::move(Context::create({.num_threads = 2}).value());

 private:
  const int num_rounds_;
  const int64_t least_;
};

}  // namespace opst::test
