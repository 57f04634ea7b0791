// Bursts: a tile of kRows x kColumns independent accumulators, like a matmul's micro-kernel, whose operands come from
// the first-level cache and change at every step.
//
//   for iteration: for step: a[kRows] = load; for column: b = load; for row: acc[row][column] += a[row] * b
//
// Accumulators, one column's b and the rows' a fill the register file without spilling: 4 x 6 with 32 registers, 3 x 4
// with 16 (twelve chains, more than the latency of 4 cycles times two units needs).
#include "testing/peak_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace opst::OPST_ISA_NS {
namespace {

using test::kPeakStepBytes;
using test::kPeakSteps;

// Ops:
//   Register, kLanes, kSingle (multiply_add is one instruction)
//   zero(), load(p), multiply_add(acc, a, b), add(a, b), store(p, register)
// Integer registers are vectors of int: with __m512i, g++-12 copies and spills every accumulator of a dot product.
template <class Ops, int kRows, int kColumns>
void burst(int64_t iterations, const void* operands, void* sink) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Ops::Register));
  static_assert((kRows + kColumns) * kBytes <= kPeakStepBytes);
  typename Ops::Register acc[kRows][kColumns];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
    for (int c = 0; c < kColumns; ++c) acc[r][c] = Ops::zero();
  }
  for (int64_t n = 0; n < iterations; ++n) {
    const char* p = static_cast<const char*>(operands);
    for (int step = 0; step < kPeakSteps; ++step, p += kPeakStepBytes) {
      typename Ops::Register a[kRows];
#pragma GCC unroll 32
      for (int r = 0; r < kRows; ++r) a[r] = Ops::load(p + r * kBytes);
#pragma GCC unroll 32
      for (int c = 0; c < kColumns; ++c) {
        const typename Ops::Register b = Ops::load(p + (kRows + c) * kBytes);
#pragma GCC unroll 32
        for (int r = 0; r < kRows; ++r) acc[r][c] = Ops::multiply_add(acc[r][c], a[r], b);
      }
    }
  }
  typename Ops::Register sum = acc[0][0];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
    for (int c = 0; c < kColumns; ++c) sum = Ops::add(sum, acc[r][c]);
  }
  Ops::store(sink, sum);
}

template <class Ops, int kRows, int kColumns>
constexpr test::PeakBurst peak_burst() {
  return {burst<Ops, kRows, kColumns>, 2.0 * kPeakSteps * kRows * kColumns * Ops::kLanes, Ops::kLanes, Ops::kSingle};
}

#if defined(__AVX512F__)
struct F32 {
  using Register = __m512;
  static constexpr int kLanes = 16;
  static constexpr bool kSingle = true;
  static Register zero() { return _mm512_setzero_ps(); }
  static Register load(const char* p) { return _mm512_load_ps(p); }
  static Register multiply_add(Register acc, Register a, Register b) { return _mm512_fmadd_ps(a, b, acc); }
  static Register add(Register a, Register b) { return _mm512_add_ps(a, b); }
  static void store(void* p, Register v) { _mm512_storeu_ps(p, v); }
};
struct Integer {
  typedef unsigned Register __attribute__((vector_size(64)));  // sums of a burst wrap around
  static constexpr int kLanes = 64;
#if defined(__AVX512VNNI__)
  static constexpr bool kSingle = true;
#else
  static constexpr bool kSingle = false;
#endif
  static Register zero() { return Register{}; }
  static Register load(const char* p) { return (Register)_mm512_load_si512(p); }
  static Register multiply_add(Register acc, Register a, Register b) {
#if defined(__AVX512VNNI__)
    return (Register)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
    return acc + (Register)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#endif
  }
  static Register add(Register a, Register b) { return a + b; }
  static void store(void* p, Register v) { _mm512_storeu_si512(p, (__m512i)v); }
};
#if defined(__AVX512BF16__)
struct Bf16 : F32 {
  static constexpr int kLanes = 32;
  static Register multiply_add(Register acc, Register a, Register b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
};
#endif
constexpr int kRows = 4;
constexpr int kColumns = 6;
#elif defined(__AVX2__)
struct F32 {
  using Register = __m256;
  static constexpr int kLanes = 8;
  static constexpr bool kSingle = true;
  static Register zero() { return _mm256_setzero_ps(); }
  static Register load(const char* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
  static Register multiply_add(Register acc, Register a, Register b) { return _mm256_fmadd_ps(a, b, acc); }
  static Register add(Register a, Register b) { return _mm256_add_ps(a, b); }
  static void store(void* p, Register v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
};
struct Integer {
  typedef unsigned Register __attribute__((vector_size(32)));  // sums of a burst wrap around
  static constexpr int kLanes = 32;
  static constexpr bool kSingle = false;
  static Register zero() { return Register{}; }
  static Register load(const char* p) { return (Register)_mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static Register multiply_add(Register acc, Register a, Register b) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
    return acc + (Register)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static Register add(Register a, Register b) { return a + b; }
  static void store(void* p, Register v) { _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)v); }
};
constexpr int kRows = 3;
constexpr int kColumns = 4;
#else
// Two-operand instructions destroy one input: acc * a + b needs neither copies nor a second load, which acc + a * b
// does, and then the loads would be what is measured. (acc stays bounded: half of all normal numbers are below 0.67.)
typedef float Floats __attribute__((vector_size(16)));
struct F32 {
  using Register = Floats;
  static constexpr int kLanes = 4;
  static constexpr bool kSingle = false;
  static Register zero() { return Register{}; }
  static Register load(const char* p) { return *reinterpret_cast<const Register*>(p); }
  static Register multiply_add(Register acc, Register a, Register b) { return acc * a + b; }
  static Register add(Register a, Register b) { return a + b; }
  static void store(void* p, Register v) { *static_cast<Register*>(p) = v; }
};
#if defined(__x86_64__)
// The baseline has no product of bytes: they are read as 16-bit numbers.
struct Integer {
  typedef unsigned Register __attribute__((vector_size(16)));
  static constexpr int kLanes = 8;
  static constexpr bool kSingle = false;
  static Register zero() { return Register{}; }
  static Register load(const char* p) { return (Register)_mm_load_si128(reinterpret_cast<const __m128i*>(p)); }
  static Register multiply_add(Register acc, Register a, Register b) {
    return (Register)_mm_madd_epi16((__m128i)acc, (__m128i)a) + b;
  }
  static Register add(Register a, Register b) { return a + b; }
  static void store(void* p, Register v) { _mm_storeu_si128(static_cast<__m128i*>(p), (__m128i)v); }
};
#endif
constexpr int kRows = 3;
constexpr int kColumns = 4;
#endif

void read(const void* data, int64_t size_bytes, void* sink) {
  const char* p = static_cast<const char*>(data);
  const char* const end = p + size_bytes;
#if defined(__AVX512F__)
  using Register = __m512i;
#elif defined(__AVX2__)
  using Register = __m256i;
#else
  typedef long long Register __attribute__((vector_size(16)));
#endif
  typedef Register Loose __attribute__((aligned(1), may_alias));
  constexpr int kStreams = 8;
  constexpr int kBytes = static_cast<int>(sizeof(Register));
  Register acc[kStreams] = {};
  for (; p + kStreams * kBytes <= end; p += kStreams * kBytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kStreams; ++i) acc[i] ^= *reinterpret_cast<const Loose*>(p + i * kBytes);
  }
  for (; p + kBytes <= end; p += kBytes) acc[0] ^= *reinterpret_cast<const Loose*>(p);
#pragma GCC unroll 8
  for (int i = 1; i < kStreams; ++i) acc[0] ^= acc[i];
  *static_cast<Loose*>(sink) = acc[0];
}

}  // namespace

namespace test {
extern const opst::test::PeakKernels kPeakKernels;
constinit const opst::test::PeakKernels kPeakKernels = {
    .f32 = peak_burst<F32, kRows, kColumns>(),
#if defined(__AVX512BF16__)
    .bf16_dot = peak_burst<Bf16, kRows, kColumns>(),
#else
    .bf16_dot = {},
#endif
#if defined(__x86_64__)
    .i8 = peak_burst<Integer, kRows, kColumns>(),
#else
    .i8 = {},
#endif
    .read = read,
};
}  // namespace test

}  // namespace opst::OPST_ISA_NS
