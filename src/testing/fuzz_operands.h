// What the fuzz targets of operators and graphs share: choices out of the input's bytes, tensors of any shape and
// strides in memory of exactly their size, and the questions after a call.
//
//   Choices choose(data, size);
//   Operands operands(choose);
//   operands.input(DType::f32, {2, 3});  operands.output(DType::f32, {2, 3});
//   const Status status = call(context, operands.views());
//   if (status.ok()) operands.require_written_only_inside(); else operands.require_untouched();
//
// A broken promise ends the process with a line that names it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include "opst/tensor.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// Every choice takes a byte or more; behind the end of the input all choices are the first one.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}

  uint8_t byte() { return next_ < end_ ? *next_++ : 0; }
  int64_t integer(int64_t low, int64_t high) {
    const auto count = static_cast<uint64_t>(high - low) + 1;
    uint64_t bits = byte();
    if (count > 256) bits = bits << 8 | byte();
    return low + static_cast<int64_t>(bits % count);
  }
  // True for about one byte in `rarity`; never behind the end.
  bool rarely(int rarity) { return byte() % rarity == rarity - 1; }
  bool coin() { return byte() % 2 == 1; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[byte() % values.size()];
  }
  // The usual size, or now and then another one: one that no memory holds, or none at all.
  int64_t size(int64_t usual) {
    if (!rarely(64)) return usual;
    return pick<int64_t>({usual + 1, usual - 1, 0, 1, -1, int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 55,
                          int64_t{1} << 56, int64_t{1} << 62, std::numeric_limits<int64_t>::max(),
                          std::numeric_limits<int64_t>::min()});
  }
  DType dtype(DType usual) {
    if (!rarely(64)) return usual;
    return pick({DType::f32, DType::f64, DType::bf16, DType::f16, DType::i8, DType::u8, DType::i32, DType::i64,
                 DType::boolean, static_cast<DType>(77), DType::f8_e4m3, DType::f8_e5m2});
  }
  DType float_dtype() { return pick({DType::f32, DType::bf16, DType::f16, DType::f64}); }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

// The largest finite number of a floating dtype; infinity where rounding never gives one.
inline double largest_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return std::numeric_limits<float>::max();
    case DType::f64:
      return std::numeric_limits<double>::max();
    case DType::bf16:
      return 0x1.fep127;
    case DType::f16:
      return 65504;
    default:
      return std::numeric_limits<double>::infinity();
  }
}

// The largest amount of memory that a drawn tensor gets.
inline constexpr int64_t kMostFuzzBytes = int64_t{1} << 20;
// Of a tensor that a call may really go through; larger ones must be refused, or not looked at.
inline constexpr int64_t kMostFuzzElements = 200000;

struct Operand {
  Tensor view;
  bool is_output = false;
  // Exactly the bytes that the view spans, between pages that nobody may touch.
  std::unique_ptr<GuardedBuffer> memory;
  std::vector<char> before;

  int64_t span_bytes() const { return static_cast<int64_t>(before.size()); }
  // Elements, at most 2^62; 0 where a size is 0.
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < view.rank && i < kMaxRank; ++i) {
      if (view.shape[i] <= 0) return 0;
      if (__builtin_mul_overflow(n, view.shape[i], &n) || n > int64_t{1} << 62) n = int64_t{1} << 62;
    }
    return n;
  }
  int rank() const { return std::clamp(view.rank, 0, kMaxRank); }
  // Calls each(byte offset) for every element, in row-major order. Nothing where there are too many.
  template <class Each>
  void for_each(const Each& each) const {
    int64_t index[kMaxRank] = {};
    if (elements() > kMostFuzzElements) return;
    for (int64_t left = elements(); left > 0; --left) {
      int64_t offset = 0;
      for (int i = 0; i < rank(); ++i) offset += index[i] * view.strides[i];
      each(offset * size_bytes(view.dtype));
      for (int i = rank() - 1; i >= 0 && ++index[i] == view.shape[i]; --i) index[i] = 0;
    }
  }
  char* data() const { return static_cast<char*>(view.data); }
  char* bytes() const { return static_cast<char*>(memory->data()); }
  void allocate(int64_t size) { memory = std::make_unique<GuardedBuffer>(size, Guard::after); }
};

class Operands {
 public:
  explicit Operands(Choices& choose) : choose_(choose), random_(choose.byte()) {}

  // Integers lie in [low, high], floating numbers are normal; either may be drawn otherwise.
  void input(DType dtype, std::vector<int64_t> shape, int64_t low = 0, int64_t high = 1) {
    add(dtype, std::move(shape), false, low, high);
  }
  void output(DType dtype, std::vector<int64_t> shape) { add(dtype, std::move(shape), true, 0, 1); }
  void contiguous_output(DType dtype, const std::vector<int64_t>& shape) {
    Operand& o = all_.emplace_back();
    o.is_output = true;
    o.view.dtype = dtype;
    o.view.rank = static_cast<int>(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) o.view.shape[i] = shape[i], o.view.strides[i] = stride;
    fill(o, 0, 1);
  }
  // The integers themselves; values beyond the shape are 0.
  void integers(DType dtype, std::vector<int64_t> shape, const std::vector<int64_t>& values) {
    add(dtype, std::move(shape), false, 0, 0);
    Operand& o = all_.back();
    size_t i = 0;
    if (o.elements() > kMostFuzzElements || size_bytes(o.view.dtype) == 0) return;
    o.for_each([&](int64_t at) {
      if (i < values.size() && at >= 0) set(o.view.dtype, o.data() + at, 0, static_cast<double>(values[i++]));
    });
    remember(o);
  }
  // An operand that is not there.
  void absent() { all_.emplace_back(); }

  std::vector<Tensor> views() const {
    std::vector<Tensor> result;
    for (const Operand& o : all_) result.push_back(o.view);
    return result;
  }
  const std::vector<Operand>& all() const { return all_; }

  // To standard error, for a person who looks at an input that was found.
  void show() const {
    for (size_t n = 0; n < all_.size(); ++n) {
      const Operand& o = all_[n];
      if (o.memory == nullptr) continue;
      std::fprintf(stderr, "operand %zu %s: %s, strides", n, o.is_output ? "out" : "in", to_string(o.view).c_str());
      for (int i = 0; i < o.view.rank && i < kMaxRank; ++i)
        std::fprintf(stderr, " %lld", static_cast<long long>(o.view.strides[i]));
      std::fprintf(stderr, "%s\n", o.view.data == nullptr ? ", no data" : "");
    }
  }

  // Whether a call can end in reasonable time: none of the sizes is between what can be computed and what must be
  // refused, unless there is nothing to write.
  bool can_be_called() const {
    bool writes = false, huge = false;
    for (const Operand& o : all_) {
      writes = writes || (o.is_output && o.elements() > 0);
      huge = huge || (o.elements() > kMostFuzzElements && o.elements() < int64_t{1} << 56);
    }
    return !(writes && huge);
  }

  bool all_small() const {
    return std::all_of(all_.begin(), all_.end(), [](const Operand& o) { return o.elements() <= kMostFuzzElements; });
  }

  // Contiguous copies, for the call that this one is compared with. Only where every tensor is small.
  Operands clones() const {
    Operands copy(choose_);
    for (const Operand& o : all_) {
      Operand& c = copy.all_.emplace_back();
      c.view = o.view;
      c.is_output = o.is_output;
      if (o.view.data == nullptr) continue;
      if (size_bytes(o.view.dtype) == 0) {  // bytes of no dtype: as they are
        c.before = o.before;
        c.allocate(o.span_bytes());
        std::memcpy(c.bytes(), o.bytes(), o.before.size());
        c.view.data = c.bytes() + (o.data() - o.bytes());
        continue;
      }
      int64_t stride = 1;
      for (int i = c.rank() - 1; i >= 0; --i) {
        c.view.strides[i] = stride;
        stride *= std::max<int64_t>(c.view.shape[i], 1);
      }
      const int64_t bytes = o.elements() * size_bytes(o.view.dtype);
      c.allocate(bytes);
      c.view.data = c.bytes();
      int64_t to = 0;
      o.for_each([&](int64_t from) {
        std::memcpy(c.data() + to, o.data() + from, static_cast<size_t>(size_bytes(o.view.dtype)));
        to += size_bytes(o.view.dtype);
      });
      c.before.assign(c.bytes(), c.bytes() + bytes);
    }
    return copy;
  }

  // The same tensors in memory of the copy's own.
  Operands copy() const {
    Operands result(choose_);
    for (const Operand& o : all_) {
      Operand& c = result.all_.emplace_back();
      c.view = o.view;
      c.is_output = o.is_output;
      c.before = o.before;
      if (o.memory == nullptr) continue;
      c.allocate(static_cast<int64_t>(o.before.size()));
      std::memcpy(c.bytes(), o.bytes(), o.before.size());
      if (o.view.data != nullptr) c.view.data = c.bytes() + (o.data() - o.bytes());
    }
    return result;
  }
  // What is there now counts as what was there before the call.
  void remember() {
    for (Operand& o : all_) remember(o);
  }
  // Adds to the first element of the first output, relative to the output's largest number; 0: flips a bit of it.
  void plant(double relative) {
    for (const Operand& o : all_) {
      if (!o.is_output || o.elements() == 0) continue;
      const double x = get(o.view.dtype, o.data(), 0);
      double scale = 1;
      o.for_each([&](int64_t at) {
        const double y = std::fabs(get(o.view.dtype, o.data() + at, 0));
        if (std::isfinite(y)) scale = std::max(scale, y);
      });
      if (relative == 0) {
        *o.data() = static_cast<char>(*o.data() ^ 1);
      } else {
        set(o.view.dtype, o.data(), 0, x + relative * scale);
      }
      return;
    }
  }
  // Changes the first byte of the first input.
  void plant_outside() {
    for (const Operand& o : all_) {
      if (o.is_output || o.before.empty()) continue;
      *o.bytes() = static_cast<char>(*o.bytes() ^ 1);
      return;
    }
  }

  // Outputs as they were before the call.
  void restore() {
    for (Operand& o : all_) {
      if (!o.before.empty()) std::memcpy(o.bytes(), o.before.data(), o.before.size());
    }
  }

  void require_untouched() const {
    for (const Operand& o : all_) {
      require(o.before.empty() || std::memcmp(o.bytes(), o.before.data(), o.before.size()) == 0,
              "a refused call writes nothing");
    }
  }
  void require_written_only_inside() const {
    for (const Operand& o : all_) {
      if (o.memory == nullptr) continue;
      require(o.memory->slack_intact(), "no byte before or behind a tensor is written");
      std::vector<bool> inside(o.before.size());
      if (o.is_output) {
        o.for_each([&](int64_t at) {
          const int64_t begin = o.data() + at - o.bytes();
          for (int64_t i = 0; i < size_bytes(o.view.dtype); ++i) inside[static_cast<size_t>(begin + i)] = true;
        });
      }
      for (size_t i = 0; i < inside.size(); ++i) {
        require(inside[i] || o.bytes()[i] == o.before[i],
                "a call writes its outputs and nothing between their elements");
      }
    }
  }
  // Every output's elements are those of `other`, an equal set of operands: bit for bit, or within `tolerance` times
  // the largest number of that output; any values where `tolerance` is infinite. With `loose_infinities` one infinity
  // is as good as another and as NaN.
  void require_equals(const Operands& other, double tolerance, bool loose_infinities, const char* promise) const {
    for (size_t n = 0; n < all_.size(); ++n) {
      const Operand &a = all_[n], &b = other.all_[n];
      if (!a.is_output || a.view.data == nullptr) continue;
      std::vector<double> got, want;
      bool same_bits = true;
      a.for_each([&](int64_t at) { got.push_back(get(a.view.dtype, a.data() + at, 0)); });
      size_t i = 0;
      double scale = 1;
      b.for_each([&](int64_t at) {
        want.push_back(get(b.view.dtype, b.data() + at, 0));
        const bool same = want[i] == got[i] || (std::isnan(want[i]) && std::isnan(got[i]));
        same_bits = same_bits && same;
        if (std::isfinite(want[i])) scale = std::max(scale, std::fabs(want[i]));
        ++i;
      });
      if (tolerance == 0) require(same_bits, promise);
      for (i = 0; i < got.size(); ++i) {
        if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i])) || std::isinf(tolerance)) continue;
        if (loose_infinities && !std::isfinite(got[i]) && !std::isfinite(want[i])) continue;
        // At the end of the dtype's range rounding decides between a number and infinity.
        const double finite = std::isinf(got[i]) ? want[i] : got[i];
        const bool one_infinite = std::isinf(got[i]) != std::isinf(want[i]) && (got[i] > 0) == (want[i] > 0);
        if (one_infinite && std::fabs(finite) >= (1 - tolerance) * largest_of(a.view.dtype)) continue;
        if (!(std::fabs(got[i] - want[i]) <= tolerance * scale)) {
          std::fprintf(stderr, "operand %zu, element %zu: %.9g, expected %.9g\n", n, i, got[i], want[i]);
          require(false, promise);
        }
      }
    }
  }
  // The tolerance that the coarsest floating point type among the operands asks for.
  double tolerance() const {
    double largest = 1e-9;
    for (const Operand& o : all_) {
      if (o.view.data == nullptr) continue;
      if (o.view.dtype == DType::f32) largest = std::max(largest, 3e-4);
      if (o.view.dtype == DType::f16) largest = std::max(largest, 1e-2);
      if (o.view.dtype == DType::bf16) largest = std::max(largest, 8e-2);
      if (o.view.dtype == DType::f8_e4m3 || o.view.dtype == DType::f8_e5m2) largest = std::max(largest, 0.3);
    }
    return largest;
  }

 private:
  static void remember(Operand& o) {
    if (o.memory != nullptr) o.before.assign(o.bytes(), o.bytes() + o.before.size());
  }

  void add(DType dtype, std::vector<int64_t> shape, bool is_output, int64_t low, int64_t high) {
    Operand& o = all_.emplace_back();
    o.is_output = is_output;
    o.view.dtype = choose_.dtype(dtype);
    if (choose_.rarely(128)) shape.push_back(choose_.integer(0, 3));
    if (choose_.rarely(128) && !shape.empty()) shape.pop_back();
    o.view.rank = choose_.rarely(250) ? choose_.pick({6, -1, 100}) : static_cast<int>(shape.size());
    shape.resize(kMaxRank);
    for (int i = 0; i < kMaxRank; ++i)
      o.view.shape[i] = i < o.view.rank ? choose_.size(shape[static_cast<size_t>(i)]) : 0;
    draw_strides(o);
    fill(o, low, high);
  }

  void draw_strides(Operand& o) {
    const int rank = std::clamp(o.view.rank, 0, kMaxRank);
    int order[kMaxRank];
    for (int i = 0; i < rank; ++i) order[i] = i;
    const int kind = choose_.pick({0, 0, 0, 1, 2, 3, 4, 5});
    if (kind == 2 && rank > 1) std::swap(order[choose_.integer(0, rank - 1)], order[choose_.integer(0, rank - 1)]);
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      o.view.strides[order[i]] = stride;
      if (__builtin_mul_overflow(stride, std::max<int64_t>(o.view.shape[order[i]], 1), &stride)) stride = 1;
      if (kind == 1 && __builtin_add_overflow(stride, choose_.integer(0, 3), &stride)) stride = 1;
    }
    if (rank == 0) return;
    if (kind == 3) o.view.strides[choose_.integer(0, rank - 1)] = 0;
    if (kind == 4) {
      const int times = choose_.pick({2, -1, 3});
      int64_t& chosen = o.view.strides[choose_.integer(0, rank - 1)];
      if (__builtin_mul_overflow(chosen, times, &chosen)) chosen = 1;
    }
    if (kind == 5 && choose_.rarely(4)) {
      o.view.strides[choose_.integer(0, rank - 1)] =
          choose_.pick<int64_t>({1, 2, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min(), -7});
    }
  }

  // Memory of the bytes from the first to the last element; where those are too many, large dimensions repeat.
  void fill(Operand& o, int64_t low, int64_t high) {
    const int64_t element = std::max<int64_t>(size_bytes(o.view.dtype), 1);
    __int128 first = 0, last = 0;
    for (int i = 0; i < o.view.rank && i < kMaxRank; ++i) {
      if (o.view.shape[i] <= 1) continue;
      const __int128 reach = static_cast<__int128>(o.view.shape[i] - 1) * o.view.strides[i];
      if ((reach < 0 ? -reach : reach) > kMostFuzzBytes / 4 / element) {
        o.view.strides[i] = 0;
        continue;
      }
      (reach < 0 ? first : last) += reach;
    }
    const bool empty = o.elements() == 0;
    const int64_t bytes = empty ? 0 : static_cast<int64_t>(last - first + 1) * element;
    // At an address that is a multiple of the element's size, and no more.
    o.allocate(bytes);
    o.view.data = o.bytes() - static_cast<int64_t>(first) * element * (empty ? 0 : 1);
    if (empty && choose_.rarely(8)) o.view.data = nullptr;
    const bool special = choose_.rarely(32);
    for (int64_t at = 0; at + element <= bytes; at += element) {
      const bool is_float = o.view.dtype == DType::f32 || o.view.dtype == DType::f64 || o.view.dtype == DType::bf16 ||
                            o.view.dtype == DType::f16;
      double x = is_float ? random_.normal() : static_cast<double>(random_.integer(low, high));
      if (is_float && special && random_.chance(0.05)) {
        x = random_.pick({std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                          std::numeric_limits<double>::quiet_NaN(), 0.0});
      }
      set(o.view.dtype, o.bytes() + at, 0, x);
    }
    o.before.assign(o.bytes(), o.bytes() + bytes);
  }

  Choices& choose_;
  Random random_;
  std::vector<Operand> all_;
};

}  // namespace opst::test
