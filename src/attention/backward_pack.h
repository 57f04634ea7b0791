// BackwardPack: tensors -> words of a block or of a tile, and sums -> tensors.
//
// Computes   per row     origin, reference, weight: P = exp2(c (s - origin) - reference) * weight is what forward had
//                        delta = rowsum(dO * O) - grad_lse
//            finite      no NaN or Inf among what a block's products multiply
// Shapes     Q [rows][query_stride], dO [rows][value_stride] row forms, and column forms for pairs of bf16; K^T and V^T
//            panels, K's column form
// Memory     a block's: only the task that packs it. A tile's: the task's worker.
// Numerics   A row of weight 0 takes no part: its Q, dO and delta are 0, whatever the tensors hold. delta of dtypes
//            that the product takes is dP's own arithmetic: a row that sees one key alone then has dS = 0 exactly.
#pragma once

#include "attention/backward_forms.h"
#include "attention/stacked_rows.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct BackwardPack : BackwardForms<P> {
  using F = BackwardForms<P>;
  using F::accumulators, F::is_finite, F::kLanes, F::kStep, F::kTileRows;
  using typename F::Element, typename F::S, typename F::V, typename F::Word;

  static void pack_queries(const PackQueries& from, const BackwardSizes& z, const QueryRows& to) {
    bool finite = true;
    *to.far = false;
    for (int64_t r = 0; r < to.rows; ++r) finite = pack_row(from, z, to, r) && finite;
    for (int64_t first = 0; first < to.rows; first += kDeltaRows) {
      S deltas[kDeltaRows];
      with_row<S>(from.out, from.first_row, [&](const auto* row) OPST_INLINE_LAMBDA {
        find_deltas<std::remove_const_t<std::remove_reference_t<decltype(*row)>>>(from, z, to, first, deltas);
      });
      for (int64_t r = first; r < to.rows && r < first + kDeltaRows; ++r) {
        S delta = deltas[r - first];
        if (from.grad_lse.data != nullptr) delta -= statistic(from.grad_lse, from.first_row + r);
        if (accumulators(to.weight)[r] == 0) delta = 0;
        accumulators(to.delta)[r] = delta;
        finite = finite && is_finite(delta);
      }
    }
    if constexpr (kStep == 2) {
      finite = to_columns(to.query, z.query_stride, to.rows, z.head_dim, from.pointers, to.query_columns) && finite;
      finite = to_columns(to.grad_out, z.value_stride, to.rows, z.value_head_dim, from.pointers, to.grad_out_columns) &&
               finite;
    }
    *to.finite = finite;
  }

  // Q, dO and statistics of row r; dQ = 0. Returns whether they are seen to be finite.
  static OPST_INLINE bool pack_row(const PackQueries& from, const BackwardSizes& z, const QueryRows& to, int64_t r) {
    const int64_t row = from.first_row + r;
    Word* query = static_cast<Word*>(to.query) + r * z.query_stride;
    Word* grad_out = static_cast<Word*>(to.grad_out) + r * z.value_stride;
    S* acc = accumulators(to.grad_query) + r * z.acc_stride;
    for (int64_t d = 0; d < z.acc_stride; d += kLanes) V::zero().store(acc + d);
    S &origin = accumulators(to.origin)[r], &reference = accumulators(to.reference)[r];
    S& weight = accumulators(to.weight)[r];
    origin = reference = weight = 0;
    if (!takes_part(from, row, r)) {
      __builtin_memset(query, 0, static_cast<size_t>(z.query_stride) * sizeof(Word));
      __builtin_memset(grad_out, 0, static_cast<size_t>(z.value_stride) * sizeof(Word));
      return true;
    }
    const double top = static_cast<double>(statistic(from.top, row)) / from.score_scale;
    const double sum = from.sum.data != nullptr ? static_cast<double>(statistic(from.sum, row)) : 1;
    const double exact = top * static_cast<double>(static_cast<S>(from.exponent_scale));
    double rest = 0;
    if (exact > -kFar && exact < kFar) {  // the reference is rounded; its rest goes into the weight
      reference = static_cast<S>(exact);
      rest = (static_cast<double>(reference) - exact) * 0x1.62e42fefa39efp-1;
    } else {
      origin = static_cast<S>(top);
      *to.far = true;
    }
    weight = static_cast<S>(__builtin_exp(rest) / sum);
    bool finite = is_finite(weight) && is_finite(reference) && is_finite(origin);
    const int64_t dim = z.head_dim - from.rope_dim;
    with_row<S>(from.query, row, [&](const auto* x) OPST_INLINE_LAMBDA {
      finite = copy_row(x, from.query.dim_stride, dim, from.query_factor, query, z.query_stride) && finite;
    });
    if (from.rope_dim > 0) {  // whole words behind whole words (choose_product); rows end with a vector to spare
      const int64_t width = (tile::words<P>(from.rope_dim) + kLanes - 1) / kLanes * kLanes;
      Word* rope = query + tile::words<P>(dim);
      with_row<S>(from.query_rope, row, [&](const auto* x) OPST_INLINE_LAMBDA {
        finite = copy_row(x, from.query_rope.dim_stride, from.rope_dim, from.query_factor, rope, width) && finite;
      });
    }
    with_row<S>(from.grad_out, row, [&](const auto* x) OPST_INLINE_LAMBDA {
      finite = copy_row(x, from.grad_out.dim_stride, z.value_head_dim, 1, grad_out, z.value_stride) && finite;
    });
    return finite;
  }
  // In exponents of 2; a score of 710. Beyond it a statistic rounded to f32 says too little about exp.
  static constexpr double kFar = 1024;
  // Whether forward may have seen a key of the row, and saved statistics of it that are finite or NaN.
  static OPST_INLINE bool takes_part(const PackQueries& from, int64_t row, int64_t r) {
    if (from.visible_begin[r] >= from.visible_end[r]) return false;
    const S inf = __builtin_inff();
    const auto infinite = [&](S x) { return x == inf || x == -inf; };
    const S sum = from.sum.data != nullptr ? statistic(from.sum, row) : 1;
    return !infinite(statistic(from.top, row)) && !infinite(sum) && sum != 0;
  }
  static OPST_INLINE S statistic(const StackedRows& t, int64_t row) {
    return static_cast<const S*>(t.data)[offset_of(t, row)];
  }

  // copy_words (stacked_rows.h) with zeros up to `stride`. False where the row is seen not to be finite: rows of pairs
  // are looked at once more when they become columns.
  template <class T>
  static OPST_INLINE bool copy_row(const T* row, int64_t dim_stride, int64_t length, double factor, Word* out,
                                   int64_t stride) {
    Element* elements = reinterpret_cast<Element*>(out);  // exact: pairs were bf16, and the factor is a power of two
    if (kStep == 2 && std::is_same<T, bf16>::value && factor == 1 && dim_stride == 1) {
      __builtin_memcpy(elements, row, static_cast<size_t>(length) * sizeof(T));
      __builtin_memset(elements + length, 0, static_cast<size_t>(stride * kStep - length) * sizeof(T));
      return true;
    }
    const V f = V::set1(static_cast<S>(factor)), zero = V::zero();
    V not_finite = zero;
    for (int64_t d = 0; d < stride * kStep; d += kLanes) {
      const V x = d < length ? tile::load_row<V>(row, dim_stride, d, length) : zero;
      not_finite = simd::fma(x, zero, not_finite);
      (x * f).store(elements + d);
    }
    return simd::hsum(not_finite) == 0;
  }
  static OPST_INLINE bool to_columns(const void* row_form, int64_t stride, int64_t rows, int64_t length,
                                     const void** pointers, void* out) {
    for (int64_t r = 0; r < rows; ++r) pointers[r] = static_cast<const Word*>(row_form) + r * stride;
    return tile::pack_values<P, bf16>({pointers, 1}, rows, length, static_cast<Word*>(out));
  }

  // delta[r] = sum of packed row r times the same row of O, for rows from `first` on that share a register tile.
  static constexpr int kDeltaRows = kTileRows < kLanes ? kTileRows : kLanes;
  template <class T>
  static OPST_NOINLINE void find_deltas(const PackQueries& from, const BackwardSizes& z, const QueryRows& to,
                                        int64_t first, S* delta) {
    const int rows = static_cast<int>(to.rows - first < kDeltaRows ? to.rows - first : kDeltaRows);
    const int64_t length = z.value_head_dim, stride = z.value_stride;
    const Word* packed = static_cast<const Word*>(to.grad_out) + first * stride;
    const void* pointers[kDeltaRows];
    for (int i = 0; i < rows; ++i) {
      pointers[i] = static_cast<const T*>(from.out.data) + offset_of(from.out, from.first_row + first + i);
    }
    const tile::Rows<T> out = {pointers, from.out.dim_stride};
    if constexpr (kStep == 2 && !std::is_same<T, bf16>::value) {
      for (int r = 0; r < rows; ++r) delta[r] = dot_row(out.row(r), out.dim_stride, length, packed + r * stride);
    } else {
      alignas(64) Word panel[(kMaxDim + kStep - 1) / kStep * kLanes];
      alignas(64) S products[kDeltaRows * kLanes];
      tile::pack_columns<P, T>(out, rows, length, panel);
      tile::product_for<P, 1>(rows)(tile::words<P>(length), packed, stride, panel, kLanes, products, kLanes,
                                    reinterpret_cast<const char*>(packed));
      for (int r = 0; r < rows; ++r) delta[r] = products[r * kLanes + r];
    }
  }
  static constexpr int kMaxDim = 768 + 2 * kLanes;
  template <class T>
  static OPST_INLINE S dot_row(const T* row, int64_t dim_stride, int64_t length, const Word* packed) {
    V sum = V::zero();
    for (int64_t d = 0; d < length; d += kLanes) {
      sum = simd::fma(F::elements(packed, 0, 0, d), tile::load_row<V>(row, dim_stride, d, length), sum);
    }
    return simd::hsum(sum);
  }

  template <class T>
  static void pack_keys(const PackKeys& from, const BackwardSizes& z, GradTile& to) {
    const tile::Rows<T> keys = {from.key_rows, from.key_dim_stride}, values = {from.value_rows, from.value_dim_stride};
    tile::pack_columns<P, T>(keys, to.count, z.head_dim, static_cast<Word*>(to.keys));
    tile::pack_columns<P, T>(values, to.count, z.value_head_dim, static_cast<Word*>(to.values));
    Word* columns = static_cast<Word*>(to.key_columns);
    if constexpr (kStep == 2) {
      to.keys_finite = tile::pack_values<P, T>(keys, to.count, z.head_dim, columns);
    } else {
      to.keys_finite = true;
      for (int64_t j = 0; j < to.count; ++j, columns += z.query_stride) {
        const bool finite = copy_row(keys.row(j), keys.dim_stride, z.head_dim, 1, columns, z.query_stride);
        to.keys_finite = finite && to.keys_finite;
      }
    }
  }

  static void finish_rows(const FinishGradient& f) {
    const V factor = V::set1(static_cast<S>(f.factor));
    for (int64_t r = 0; r < f.rows; ++r) {
      const S* acc = static_cast<const S*>(f.acc) + r * f.acc_stride;
      with_row<S>(f.out, f.first_row + r, [&](auto* out) OPST_INLINE_LAMBDA {
        for (int64_t d = 0; d < f.length; d += kLanes) {
          const int64_t n = simd::clamp_lanes<V>(f.length - d);
          store_elements(V::load_n(acc + d, n) * factor, out, f.out.dim_stride, d, n);
        }
      });
    }
  }
  static void add_row(const void* terms, int64_t count, void* sums) {
    const S* from = static_cast<const S*>(terms);
    S* to = static_cast<S*>(sums);
    for (int64_t i = 0; i < count; i += kLanes) (V::load(to + i) + V::load(from + i)).store(to + i);
  }
};

}  // namespace opst::OPST_ISA_NS::attention
