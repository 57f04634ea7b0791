#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <utility>

#include "attention/sequences.h"
#include "core/elements.h"
#include "core/int_math.h"

namespace opst::attention {
namespace {

// The same elements: largest stride first, and dimensions that follow one another in memory are one.
Tensor merge_dimensions(const Tensor& t) {
  std::pair<int64_t, int64_t> dims[kMaxRank] = {};  // stride and size
  int count = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] != 1) dims[count++] = {t.strides[i], t.shape[i]};
  }
  std::sort(std::begin(dims), std::end(dims), std::greater<>());
  Tensor merged = Tensor::contiguous(t.dtype, {}, t.data);
  for (int i = 0; i < count; ++i) {
    const auto [stride, size] = dims[i];
    const bool follows = merged.rank > 0 && merged.strides[merged.rank - 1] == size * stride;
    const int dim = follows ? merged.rank - 1 : merged.rank++;
    merged.shape[dim] = follows ? merged.shape[dim] * size : size;
    merged.strides[dim] = stride;
  }
  return count > 0 ? merged : Tensor::contiguous(t.dtype, {1}, t.data);
}

// `element`: the bytes of one element.
template <class T>
void fill_as(const Tensor& t, const void* element, ThreadPool& pool) {
  T x;
  std::memcpy(&x, element, sizeof(T));
  const Tensor merged = merge_dimensions(t);
  const int inner = merged.rank - 1;
  const int64_t run = merged.shape[inner], stride = merged.strides[inner];  // the elements nearest to each other
  constexpr int64_t kPiece = 65536 / sizeof(T);
  // Runs shorter than a piece go to a thread several at a time, longer ones in pieces.
  const int64_t runs = num_rows(merged), parts = ceil_div(run, kPiece);
  const int64_t runs_per_task = parts > 1 ? 1 : std::clamp<int64_t>(kPiece / run, 1, runs);
  pool.parallel_for(ceil_div(runs, runs_per_task) * parts, [&](int64_t task, int) {
    const int64_t first_run = task / parts * runs_per_task, begin = task % parts * kPiece;
    for (int64_t r = first_run; r < std::min(first_run + runs_per_task, runs); ++r) {
      T* const data = static_cast<T*>(t.data) + row_offset(merged, r, inner) + begin * stride;
      const int64_t count = std::min(run - begin, kPiece);
      if (stride == 1)
        std::fill_n(data, count, x);
      else
        for (int64_t i = 0; i < count; ++i) data[i * stride] = x;
    }
  });
}

}  // namespace

void fill(const Tensor& t, double x, ThreadPool& pool) {
  if (!t || t.num_elements() == 0) return;
  alignas(8) char storage[8];
  store_element(Tensor::contiguous(t.dtype, {}, storage), 0, x);
  const int64_t size = size_bytes(t.dtype);
  const auto fill_elements_of = size == 8 ? fill_as<uint64_t> : size == 4 ? fill_as<uint32_t> : fill_as<uint16_t>;
  fill_elements_of(t, storage, pool);
}

void fill_rows(const Tensor& t, int64_t first, double x, ThreadPool& pool) {
  if (t) fill(t.narrowed(2, first, t.shape[2] - first), x, pool);
}

}  // namespace opst::attention
