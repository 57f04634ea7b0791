// Rows of one format become rows of another. Floats are copied by this room's kernel, integers made and read by quant's.
#include "kv_cache/page_rows.h"

#include <limits>

#include "quant/kernels.h"
#include "quant/matrices.h"

namespace opst::kv_cache {

namespace {

Rows row_of(const Rows& rows, int64_t row, int64_t element_bytes) {
  Rows at = rows;
  at.data = static_cast<char*>(rows.data) + row * rows.row_stride * element_bytes;
  return at;
}

float* number_at(const Rows& rows, int64_t row, int64_t group) {
  return static_cast<float*>(rows.data) + row * rows.row_stride + group * rows.word_stride;
}

bool is_wide(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }
int bits_of(DType dtype) { return dtype == DType::i8 ? 8 : 4; }

}  // namespace

CacheSide::CacheSide(const CacheTensors& cache, PageSide side)
    : numbers_(cache.layout, side, side == PageSide::key ? cache.key : cache.value),
      scales_(cache.layout, side == PageSide::key ? PageSide::key_scales : PageSide::value_scales,
              side == PageSide::key ? cache.scales.key : cache.scales.value),
      offsets_(cache.layout, side == PageSide::key ? PageSide::key_scales : PageSide::value_scales,
               side == PageSide::key ? cache.scales.key_offsets : cache.scales.value_offsets) {
  const DType dtype = (side == PageSide::key ? cache.key : cache.value).dtype;
  format_.dtype = dtype;
  if (!holds_integers(dtype)) return;
  format_.groups = scales_.dim();
  format_.has_offsets = is_given(side == PageSide::key ? cache.scales.key_offsets : cache.scales.value_offsets);
}

RowConversion::RowConversion(Isa isa, const RowFormat& from, const RowFormat& to, bool scales_given)
    : isa_(isa), from_(from), to_(to), given_(scales_given) {
  const bool reads = holds_integers(from.dtype), makes = holds_integers(to.dtype);
  copies_ = (!reads && !makes) || (from == to && !scales_given);
  direct_ = reads != makes && is_wide(reads ? to.dtype : from.dtype);
}

void RowConversion::operator()(int64_t num_rows, int64_t dim, const PageRows& from, const PageRows& to,
                               float* scratch) const {
  if (copies_) return copy(num_rows, dim, from, to);
  const bool reads = holds_integers(from_.dtype), makes = holds_integers(to_.dtype);
  // The kernels of integers know no pairs.
  const bool in_pairs = (!reads && from.numbers.step != 1) || (!makes && to.numbers.step != 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (direct_ && !in_pairs) {
      if (makes) {
        quantize(dim, row_of(from.numbers, row, size_bytes(from_.dtype)), from_.dtype, to, row);
      } else {
        dequantize(dim, from, row, row_of(to.numbers, row, size_bytes(to_.dtype)), to_.dtype);
      }
      continue;
    }
    const Rows floats = {scratch, dim, 1, 1};
    if (reads) {
      dequantize(dim, from, row, floats, DType::f32);
    } else {
      copy_rows_kernel(isa_, from_.dtype,
                       DType::f32)({1, dim, row_of(from.numbers, row, size_bytes(from_.dtype)), floats});
    }
    if (makes) {
      quantize(dim, floats, DType::f32, to, row);
    } else {
      copy_rows_kernel(isa_, DType::f32, to_.dtype)({1, dim, floats, row_of(to.numbers, row, size_bytes(to_.dtype))});
    }
  }
}

void RowConversion::copy(int64_t num_rows, int64_t dim, const PageRows& from, const PageRows& to) const {
  copy_rows_kernel(isa_, from_.dtype, to_.dtype)({num_rows, dim / numbers_of(to_.dtype), from.numbers, to.numbers});
  const CopyRowsKernel copy_floats = copy_rows_kernel(isa_, DType::f32, DType::f32);
  if (to_.groups > 0) copy_floats({num_rows, to_.groups, from.scales, to.scales});
  if (to_.has_offsets) copy_floats({num_rows, to_.groups, from.offsets, to.offsets});
}

void RowConversion::quantize(int64_t dim, const Rows& from, DType dtype, const PageRows& to, int64_t row) const {
  const auto kernel = quant::kernels(isa_).quantize_group[float_index(dtype)];
  const int64_t count = dim / to_.groups, numbers = numbers_of(to_.dtype);
  for (int64_t group = 0; group < to_.groups; ++group) {
    const int64_t first = group * count;
    float* const scale = number_at(to.scales, row, group);
    float* const offset = to_.has_offsets ? number_at(to.offsets, row, group) : nullptr;
    int8_t zero = given_ && offset != nullptr ? static_cast<int8_t>(-*offset) : int8_t{0};
    kernel({.x = static_cast<const char*>(from.data) + first * from.word_stride * size_bytes(dtype),
            .x_stride = from.word_stride,
            .count = count,
            .bits = bits_of(to_.dtype),
            .scales_given = given_,
            .scale = scale,
            .zero = offset != nullptr ? &zero : nullptr,
            .q = static_cast<int8_t*>(to.numbers.data) + row * to.numbers.row_stride +
                 first / numbers * to.numbers.word_stride,
            .q_stride = to.numbers.word_stride});
    if (given_) continue;
    // The kernel's mark of a group that is not finite is a scale of NaN, which a caller may not give.
    if (*scale != *scale) *scale = std::numeric_limits<float>::infinity();
    if (offset != nullptr) *offset = static_cast<float>(-zero);
  }
}

void RowConversion::dequantize(int64_t dim, const PageRows& from, int64_t row, const Rows& to, DType dtype) const {
  const auto kernel = quant::kernels(isa_).dequantize_group[float_index(dtype)];
  const int64_t count = dim / from_.groups, numbers = numbers_of(from_.dtype);
  for (int64_t group = 0; group < from_.groups; ++group) {
    const int64_t first = group * count;
    kernel({.q = static_cast<const int8_t*>(from.numbers.data) + row * from.numbers.row_stride +
                 first / numbers * from.numbers.word_stride,
            .q_stride = from.numbers.word_stride,
            .count = count,
            .bits = bits_of(from_.dtype),
            .scale = *number_at(from.scales, row, group),
            .zero = from_.has_offsets ? -*number_at(from.offsets, row, group) : 0.0f,
            .out = static_cast<char*>(to.data) + first * to.word_stride * size_bytes(dtype),
            .out_stride = to.word_stride});
  }
}

}  // namespace opst::kv_cache
