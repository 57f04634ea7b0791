// The loops of naive attention (naive_attention.h), compiled once per level. The inner ones go over neighbouring
// elements, a vector at a time; there are no register tiles and no blocks for a cache.
#include "simd/vec.h"
#include "testing/naive_loops.h"

namespace opst::OPST_ISA_NS {
namespace {

template <class V, class T>
struct Naive {
  using S = typename V::Scalar;
  static constexpr int kLanes = V::kLanes;
  static constexpr int64_t kMaxDim = 768;

  // f(j, n) for each vector of elements [j, j + n).
  template <class F>
  static OPST_INLINE void each(int64_t count, const F& f) {
    for (int64_t j = 0; j < count; j += kLanes) f(j, count - j < kLanes ? count - j : kLanes);
  }
  template <class P>
  static OPST_INLINE V load(const P* p, int64_t n) {
    return n == kLanes ? V::load(p) : V::load_n(p, n);
  }
  template <class P>
  static OPST_INLINE void store(V x, P* p, int64_t n) {
    n == kLanes ? x.store(p) : x.store_n(p, n);
  }
  static OPST_INLINE void widen(const void* row, int64_t count, S* out) {
    each(count,
         [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA { store(load(static_cast<const T*>(row) + j, n), out + j, n); });
  }
  static OPST_INLINE void clear(S* x, int64_t count) {
    each(count, [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA { store(V::zero(), x + j, n); });
  }
  static OPST_INLINE S exponential(S x) {
    if constexpr (sizeof(S) == 8)
      return __builtin_exp(x);
    else
      return __builtin_expf(x);
  }

  static void multiply(const void* row, const void* columns, int64_t dim, int64_t keys, double scale, const float* mask,
                       void* work, void* out) {
    S factors[kMaxDim];
    widen(row, dim, factors);
    S* sums = static_cast<S*>(work);
    clear(sums, keys);
    for (int64_t d = 0; d < dim; ++d) {
      const V factor = V::set1(factors[d]);
      const T* column = static_cast<const T*>(columns) + d * keys;
      each(keys, [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA {
        store(simd::fma(factor, load(column + j, n), load(sums + j, n)), sums + j, n);
      });
    }
    const V by = V::set1(static_cast<S>(scale));
    each(keys,
         [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA { store(load(sums + j, n) * by, static_cast<T*>(out) + j, n); });
    if (mask == nullptr) return;
    for (int64_t j = 0; j < keys; ++j) sums[j] = static_cast<S>(mask[j]);
    each(keys, [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA {
      T* score = static_cast<T*>(out) + j;
      store(load(score, n) + load(sums + j, n), score, n);
    });
  }

  static void softmax(const void* scores, int64_t keys, void* work, void* out) {
    S* x = static_cast<S*>(work);
    widen(scores, keys, x);
    S max = -static_cast<S>(__builtin_inff()), sum = 0;
    for (int64_t j = 0; j < keys; ++j) max = x[j] > max ? x[j] : max;
    for (int64_t j = 0; j < keys; ++j) x[j] = exponential(x[j] - max);
    for (int64_t j = 0; j < keys; ++j) sum += x[j];
    const V by = V::set1(1 / sum);
    each(keys,
         [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA { store(load(x + j, n) * by, static_cast<T*>(out) + j, n); });
  }

  static void weigh(const void* weights, const void* rows, int64_t keys, int64_t dim, void* work, void* out) {
    S* w = static_cast<S*>(work);
    widen(weights, keys, w);
    S sums[kMaxDim];
    clear(sums, dim);
    for (int64_t j = 0; j < keys; ++j) {
      const V weight = V::set1(w[j]);
      const T* row = static_cast<const T*>(rows) + j * dim;
      each(dim, [&](int64_t d, int64_t n)
                    OPST_INLINE_LAMBDA { store(simd::fma(weight, load(row + d, n), load(sums + d, n)), sums + d, n); });
    }
    round(sums, dim, out);
  }

  static void softmax_grad(const void* probabilities, const void* grads, int64_t keys, double scale, void* work,
                           void* out) {
    const T *p = static_cast<const T*>(probabilities), *g = static_cast<const T*>(grads);
    S* products = static_cast<S*>(work);
    each(keys,
         [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA { store(load(p + j, n) * load(g + j, n), products + j, n); });
    S delta = 0;
    for (int64_t j = 0; j < keys; ++j) delta += products[j];
    const V shift = V::set1(delta), by = V::set1(static_cast<S>(scale));
    each(keys, [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA {
      store(load(p + j, n) * (load(g + j, n) - shift) * by, static_cast<T*>(out) + j, n);
    });
  }

  static void add_outer(const void* weights, const void* row, int64_t keys, int64_t dim, void* sums) {
    S factors[kMaxDim], weight[1];
    widen(row, dim, factors);
    for (int64_t j = 0; j < keys; ++j) {
      widen(static_cast<const T*>(weights) + j, 1, weight);
      const V w = V::set1(weight[0]);
      S* sum = static_cast<S*>(sums) + j * dim;
      each(dim, [&](int64_t d, int64_t n)
                    OPST_INLINE_LAMBDA { store(simd::fma(w, load(factors + d, n), load(sum + d, n)), sum + d, n); });
    }
  }

  static void round(const void* sums, int64_t count, void* out) {
    each(count, [&](int64_t j, int64_t n) OPST_INLINE_LAMBDA {
      store(load(static_cast<const S*>(sums) + j, n), static_cast<T*>(out) + j, n);
    });
  }

  static constexpr test::NaiveLoops loops() { return {multiply, softmax, weigh, softmax_grad, add_outer, round}; }
};

}  // namespace

namespace test {
extern const opst::test::NaiveTable kNaiveTable;
constinit const opst::test::NaiveTable kNaiveTable = {
    .f32 = Naive<simd::F32, float>::loops(),
    .bf16 = Naive<simd::F32, bf16>::loops(),
    .f16 = Naive<simd::F32, f16>::loops(),
#if !defined(__AVX2__)
    .f64 = Naive<simd::F64, double>::loops(),
#else
    .f64 = {},
#endif
};
}  // namespace test

}  // namespace opst::OPST_ISA_NS
