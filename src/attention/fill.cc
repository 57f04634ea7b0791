#include "attention/fill.h"

#include <algorithm>
#include <cstring>

#include "core/elements.h"
#include "core/int_math.h"

namespace opst::attention {
namespace {

struct Dimension {
  int64_t size, stride;
};

// The dimensions of t that have more than one element, largest stride first; those that follow one another in memory
// are one. Returns how many they are.
int dimensions_of(const Tensor& t, Dimension (&dims)[kMaxRank]) {
  int count = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] != 1) dims[count++] = {t.shape[i], t.strides[i]};
  }
  std::sort(dims, dims + count, [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  int merged = 0;
  for (int i = 0; i < count; ++i) {
    const auto [size, stride] = dims[i];
    if (merged > 0 && dims[merged - 1].stride == size * stride) {
      dims[merged - 1] = {dims[merged - 1].size * size, stride};
    } else {
      dims[merged++] = dims[i];
    }
  }
  return merged;
}

template <class T>
void fill_elements(T* data, int64_t count, int64_t stride, T x) {
  if (stride == 1) {
    std::fill_n(data, count, x);
  } else {
    for (int64_t i = 0; i < count; ++i) data[i * stride] = x;
  }
}

// `element`: the bytes of one element.
template <class T>
void fill_as(const Tensor& t, const void* element, ThreadPool& pool) {
  T x;
  std::memcpy(&x, element, sizeof(T));
  Dimension dims[kMaxRank];
  const int outer = dimensions_of(t, dims) - 1;
  const Dimension run = outer >= 0 ? dims[outer] : Dimension{1, 1};  // the elements nearest to each other
  constexpr int64_t kPiece = 65536 / sizeof(T);
  // Runs shorter than a piece go to a thread several at a time, longer ones in pieces.
  const int64_t runs = t.num_elements() / run.size, parts = ceil_div(run.size, kPiece);
  const int64_t runs_per_task = parts > 1 ? 1 : std::clamp<int64_t>(kPiece / run.size, 1, runs);
  pool.parallel_for(ceil_div(runs, runs_per_task) * parts, [&](int64_t task, int) {
    const int64_t first_run = task / parts * runs_per_task, begin = task % parts * kPiece;
    for (int64_t r = first_run; r < std::min(first_run + runs_per_task, runs); ++r) {
      int64_t at = begin * run.stride, index = r;
      for (int d = outer - 1; d >= 0; --d) {
        at += index % dims[d].size * dims[d].stride;
        index /= dims[d].size;
      }
      fill_elements(static_cast<T*>(t.data) + at, std::min(run.size - begin, kPiece), run.stride, x);
    }
  });
}

}  // namespace

void fill(const Tensor& t, double x, ThreadPool& pool) {
  if (!t || t.num_elements() == 0) return;
  alignas(8) char storage[8];
  store_element(Tensor::contiguous(t.dtype, {}, storage), 0, x);
  switch (size_bytes(t.dtype)) {
    case 8:
      return fill_as<uint64_t>(t, storage, pool);
    case 4:
      return fill_as<uint32_t>(t, storage, pool);
    default:
      return fill_as<uint16_t>(t, storage, pool);
  }
}

void fill_rows(const Tensor& t, int64_t first, double x, ThreadPool& pool) {
  if (t) fill(t.narrowed(2, first, t.shape[2] - first), x, pool);
}

}  // namespace opst::attention
