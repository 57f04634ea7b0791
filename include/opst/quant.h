// Numbers stored as small integers: matrices in GGUF block formats, and int8 and int4 with scales beside them.
//
// GGUF block formats (quant_format.h). A row of `cols` values is a sequence of blocks, so `cols` must be a multiple of
// the block; rows follow one another without gaps.
//
//   QuantMatrix embedding{QuantFormat::q8_0, 49152, 576, file_bytes, num_file_bytes};
//   Status status = dequantize_rows(context, embedding, token_ids, hidden);
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "opst/context.h"
#include "opst/quant_format.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// The enumerator's name; "unknown" for a value that is no enumerator.
const char* to_string(QuantFormat format);
// The format of such a name, in upper or lower case ("Q4_1").
std::optional<QuantFormat> parse_quant_format(const std::string& name);

// Values per block, and bytes per block; 0 for a value that is no enumerator.
int64_t block_values(QuantFormat format);
int64_t block_bytes(QuantFormat format);

// A non-owning matrix [rows, cols] of blocks.
struct QuantMatrix {
  QuantFormat format = QuantFormat::f32;
  int64_t rows = 0, cols = 0;
  const void* data = nullptr;
  int64_t size_bytes = 0;  // at least rows * row_bytes(format, cols)
};

// Bytes of one row. invalid_argument where cols is negative or not whole blocks, such a row has 2^56 bytes or more, or
// the format is no enumerator.
Result<int64_t> row_bytes(QuantFormat format, int64_t cols);

// out[r, c] = matrix[r, c]: every value exactly as its format defines it (products are exact in f32, so only the
// addition of a minimum rounds, once). Non-finite scales give what IEEE arithmetic gives.
//   matrix  [rows, cols]
//   out     [rows, cols] f32, any strides
// Errors: invalid_argument for cols that are not whole blocks, too few bytes, null data, or shapes that disagree.
Status dequantize(Context& context, const QuantMatrix& matrix, const Tensor& out);

// out[i, c] = matrix[rows[i], c]: embedding lookup.
//   matrix  [num_rows, cols]
//   rows    [count] i64, each in [0, num_rows); any strides
//   out     [count, cols] f32, any strides
// Errors: those of dequantize; an index out of range is refused before anything is written.
Status dequantize_rows(Context& context, const QuantMatrix& matrix, const ConstTensor& rows, const Tensor& out);

// Integer matrices: [rows, cols] values in groups of cols / groups along a row (groups = 1: one scale per row, for a
// weight [n, k] one per output channel).
//   value[r, c] = (q[r, c] - zero[r, g]) * scale[r, g]        g = c / (cols / groups)
struct IntMatrix {
  // int8: i8 [rows, cols], any strides. int4: u8 [rows, cols / 2], two values in -8..7 a byte in two's complement, the
  // lower half first; bytes of a row next to each other.
  ConstTensor q;
  ConstTensor scales;      // f32 [rows, groups], any strides
  ConstTensor zeros = {};  // i8 [rows, groups], any strides; absent (ConstTensor{}): 0
};

struct QuantizeOptions {
  // i8 [rows, groups]. Given: the range from min(0, smallest) to max(0, largest) value is used in full.
  //   scale = largest / steps - smallest / steps, steps = 255 (int4: 15);  zero = round(lowest q - smallest / scale)
  // Absent (without data): symmetric, scale = max |x| / 127 (int4: 7), so that -128 (-8) does not occur.
  Tensor zeros = {};
  // Scales and zeros are read, not written: static quantisation.
  bool scales_given = false;
};

// q = round(x / scale) + zero, to nearest, ties to even, and never beyond -128..127 (int4: -8..7).
//   x       [rows, cols] f32, bf16 or f16, any strides
//   q       [rows, cols] i8 or, for int4, [rows, cols / 2] u8, as in IntMatrix
//   scales  [rows, groups] f32, any strides; groups divides cols
// The quotient is rounded to f32 first.
//   a group of zeros, or whose scale is rounded to 0    scale 0, zero 0, q = 0
//   a group with a NaN or an infinity                   scale NaN, zero 0, q = 0; other groups are not concerned
//   scales given: NaN; an infinity                      q = zero; the end of the range
//   scales given: a scale that is 0 or not finite       q = zero
// Errors: invalid_argument for ranks, dtypes or sizes that disagree.
Status quantize(Context& context, const ConstTensor& x, const Tensor& q, const Tensor& scales,
                const QuantizeOptions& options = {});

// out[r, c] = value[r, c] of an IntMatrix, rounded once.
//   out     [rows, cols] f32, bf16 or f16 (rounded a second time), any strides
Status dequantize(Context& context, const IntMatrix& matrix, const Tensor& out);

struct DynamicQuantOptions {
  ConstTensor smooth_scales = {};  // smooth, f32 [k], any stride: x is multiplied with it first, in f32
};

// Each token's row with a scale of its own: scale = max |x * smooth| / 127 (int4: 7), q = round(x * smooth / scale) to
// nearest, ties to even. Zeros, NaN and infinities as in quantize.
//   x       [.., k] f32, bf16 or f16, rank 1 to 5, any strides
//   q       [.., k] i8, any strides; or int4: [.., k / 2] u8, bytes of a row next to each other
//   scales  [..] f32: x's shape without k, any strides
Status dynamic_quant(Context& context, const ConstTensor& x, const Tensor& q, const Tensor& scales,
                     const DynamicQuantOptions& options = {});

}  // namespace opst
