// Computes   to[i, d] = from[i, d], converted to the target's type
// Shapes     from, to [num_rows, dim], each as Rows say (kernels.h)
// Loop nest  equal types, a transposed page on one side, contiguous rows on the other:
//              squares of 32-bit words: lanes over rows on the one side, over words on the other
//            equal 16-bit types, a pair of value rows on one side, contiguous rows on the other:
//              both rows at once, lanes over elements
//            else:
//              for each row; pieces of 64 elements: collect, convert (lanes over elements), spread
// Memory     contiguous rows stream; the lines of a transposed page that one row touches stay in L1 for the next row
// Numerics   one rounding, to nearest even; equal types keep their bits
#include "kv_cache/kernels.h"
#include "simd/float8.h"

namespace opst::OPST_ISA_NS::kv_cache {

using opst::kv_cache::CopyRows;
using opst::kv_cache::Rows;
using simd::F32;

// kLanes elements, or n of them.
template <class T>
OPST_INLINE void store(F32 x, T* p) {
  if constexpr (simd::kIsFloat8<T>)
    simd::store_f8(x, p);
  else
    x.store(p);
}
template <class T>
OPST_INLINE void store_n(F32 x, T* p, int64_t n) {
  if constexpr (simd::kIsFloat8<T>)
    simd::store_f8_n(x, p, n);
  else
    x.store_n(p, n);
}

// n contiguous elements.
template <class From, class To>
OPST_INLINE void copy_contiguous(const From* from, To* to, int64_t n) {
  if constexpr (__is_same(From, To)) {
    __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(To));
  } else {
    int64_t d = 0;
    for (; d + F32::kLanes <= n; d += F32::kLanes) store(simd::load_stored<F32>(from + d), to + d);
    store_n(simd::load_stored_n<F32>(from + d, n - d), to + d, n - d);
  }
}

// n elements of a row whose words are from_stride and to_stride apart; `step` as in Rows.
template <class T>
OPST_INLINE void copy_words(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t step, int64_t n) {
  if (step == 1) {
    for (int64_t d = 0; d < n; ++d) to[d * to_stride] = from[d * from_stride];
  } else {
    for (int64_t d = 0; d < n; d += 2) {
      __builtin_memcpy(to + d / 2 * to_stride, from + d / 2 * from_stride, 2 * sizeof(T));
    }
  }
}

// Lines of 32-bit words become columns: word j of line i goes to word i of line j. Strides between lines in elements.
template <class T>
OPST_INLINE void transpose_words(const T* from, int64_t from_stride, int64_t num_lines, T* to, int64_t to_stride,
                                 int64_t num_words) {
  constexpr int kLanes = F32::kLanes;
  constexpr int64_t kStep = 4 / static_cast<int64_t>(sizeof(T));
  for (int64_t line = 0; line < num_lines; line += kLanes) {
    const int64_t lines = num_lines - line < kLanes ? num_lines - line : kLanes;
    for (int64_t word = 0; word < num_words; word += kLanes) {
      const int64_t words = num_words - word < kLanes ? num_words - word : kLanes;
      const T* const source = from + line * from_stride + word * kStep;
      T* const target = to + word * to_stride + line * kStep;
      F32 square[kLanes];
      OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
        const auto* const p = reinterpret_cast<const float*>(source + i * from_stride);
        square[i] = i >= lines ? F32::zero() : words == kLanes ? F32::load(p) : F32::load_n(p, words);
      }
      simd::transpose(square);
      OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
        auto* const p = reinterpret_cast<float*>(target + i * to_stride);
        if (i >= words) continue;
        if (lines == kLanes) {
          square[i].store(p);
        } else {
          square[i].store_n(p, lines);
        }
      }
    }
  }
}

// Two rows of 16-bit elements and their pairs, which are 32-bit words.
template <class T>
OPST_INLINE void join_pairs(const T* __restrict first, const T* __restrict second, int64_t n, T* __restrict pairs) {
  for (int64_t d = 0; d < n; ++d) {
    const uint32_t word = first[d].bits | static_cast<uint32_t>(second[d].bits) << 16;
    __builtin_memcpy(pairs + 2 * d, &word, sizeof(word));
  }
}
template <class T>
OPST_INLINE void split_pairs(const T* __restrict pairs, int64_t n, T* __restrict first, T* __restrict second) {
  for (int64_t d = 0; d < n; ++d) {
    uint32_t word = 0;
    __builtin_memcpy(&word, pairs + 2 * d, sizeof(word));
    first[d].bits = static_cast<uint16_t>(word);
    second[d].bits = static_cast<uint16_t>(word >> 16);
  }
}
OPST_INLINE bool is_pair_of_rows(const Rows& view) {
  return view.row_stride == 1 && view.word_stride == 2 && view.step == 1;
}

template <class From, class To>
void copy_rows(const CopyRows& rows) {
  constexpr int64_t kPiece = 64;
  const Rows& in = rows.from;
  const Rows& out = rows.to;
  const bool contiguous_in = in.word_stride == in.step, contiguous_out = out.word_stride == out.step;
  if constexpr (__is_same(From, To)) {
    const From* const from = static_cast<const From*>(in.data);
    To* const to = static_cast<To*>(out.data);
    constexpr int64_t kStep = 4 / static_cast<int64_t>(sizeof(To));  // elements of a 32-bit word
    if (rows.num_rows > 1 && in.row_stride == kStep && in.step == kStep && !contiguous_in && contiguous_out) {
      return transpose_words(from, in.word_stride, rows.dim / kStep, to, out.row_stride, rows.num_rows);
    }
    if (rows.num_rows > 1 && out.row_stride == kStep && out.step == kStep && !contiguous_out && contiguous_in) {
      return transpose_words(from, in.row_stride, rows.num_rows, to, out.word_stride, rows.dim / kStep);
    }
    if constexpr (sizeof(To) == 2) {
      if (rows.num_rows == 2 && is_pair_of_rows(in) && contiguous_out) {
        return split_pairs(from, rows.dim, to, to + out.row_stride);
      }
      if (rows.num_rows == 2 && is_pair_of_rows(out) && contiguous_in) {
        return join_pairs(from, from + in.row_stride, rows.dim, to);
      }
    }
  }
  int64_t num_rows = rows.num_rows, dim = rows.dim;
  if (contiguous_in && contiguous_out && in.row_stride == dim && out.row_stride == dim) {
    dim *= num_rows;
    num_rows = 1;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const From* const from = static_cast<const From*>(in.data) + row * in.row_stride;
    To* const to = static_cast<To*>(out.data) + row * out.row_stride;
    if (contiguous_in && contiguous_out) {
      copy_contiguous(from, to, dim);
      continue;
    }
    for (int64_t d = 0; d < dim; d += kPiece) {
      const int64_t n = dim - d < kPiece ? dim - d : kPiece;
      From collected[kPiece];
      const From* source = from + d;
      if (!contiguous_in) {
        copy_words(from + d / in.step * in.word_stride, in.word_stride, collected, in.step, in.step, n);
        source = collected;
      }
      if (contiguous_out) {
        copy_contiguous(source, to + d, n);
        continue;
      }
      To* const target = to + d / out.step * out.word_stride;
      if constexpr (__is_same(From, To)) {
        copy_words(source, out.step, target, out.word_stride, out.step, n);
      } else {
        To converted[kPiece];
        copy_contiguous(source, converted, n);
        copy_words(converted, out.step, target, out.word_stride, out.step, n);
      }
    }
  }
}

template <class From>
constexpr void fill_row(void (*(&row)[opst::kv_cache::kNumStorageTypes])(const CopyRows& rows)) {
  row[0] = copy_rows<From, float>;
  row[1] = copy_rows<From, bf16>;
  row[2] = copy_rows<From, f16>;
  row[3] = copy_rows<From, f8_e4m3>;
  row[4] = copy_rows<From, f8_e5m2>;
}
constexpr opst::kv_cache::Kernels all_kernels() {
  opst::kv_cache::Kernels table = {};
  fill_row<float>(table.copy_rows[0]);
  fill_row<bf16>(table.copy_rows[1]);
  fill_row<f16>(table.copy_rows[2]);
  fill_row<f8_e4m3>(table.copy_rows[3]);
  fill_row<f8_e5m2>(table.copy_rows[4]);
  table.copy_bytes = copy_rows<uint8_t, uint8_t>;
  return table;
}

extern const opst::kv_cache::Kernels kKernels;
constinit const opst::kv_cache::Kernels kKernels = all_kernels();

}  // namespace opst::OPST_ISA_NS::kv_cache
