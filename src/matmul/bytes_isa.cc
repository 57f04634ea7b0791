#include "matmul/activations_int8_many_rows.h"
#include "matmul/kernels.h"
#include "matmul/weights_int_few_rows.h"
#include "matmul/weights_int_floats.h"
#include "matmul/weights_int_many_rows.h"
#if defined(__AVX2__)
#include "matmul/activations_few_rows.h"
#endif

namespace opst::OPST_ISA_NS::gemm {
namespace {

// A few rows of blocks: null where the level takes more instructions for the products of a format's bytes than for
// decoding them to floats.
template <class Piece, class Block>
constexpr opst::gemm::Product few_blocks() {
#if defined(__AVX2__)
#if !defined(__AVX512VNNI__)
  if (Int8Piece<Piece>::Shape::kMost > 127) return nullptr;
#endif
  return few_rows_blocks<Piece, Block>;
#else
  return nullptr;
#endif
}

template <class... Pieces>
constexpr opst::gemm::ByteKernels kernels_for() {
  static_assert(sizeof...(Pieces) + 3 == kNumBlockFormats);  // and bf16, the last
  return {
    .int8_columns = kInt8Columns, .int_columns = kIntColumns,
    .activations_fixed = {nullptr, nullptr, few_blocks<Pieces, opst::gemm::FixedBlock>()...},
    .activations_int8_few_rows = {nullptr, nullptr, few_blocks<Pieces, opst::gemm::ActivationBlock>()...},
    .activations_int8_many_rows = {nullptr, nullptr, int8_block_rows<Pieces>...},
    .weights_int_few_rows = {int_few<WordI8>, int_few<WordI4>},
    .weights_int_many_rows = {int_many<WordI8>, int_many<WordI4>},
    .weights_int_floats = {int_with_floats<WordI8>, int_with_floats<WordI4>}, .quantise_row = quantise_row,
#if defined(__AVX2__)
    .fix_row = fix_row,
#else
    .fix_row = nullptr,
#endif
    .pack_int_row = pack_int_row
  };
}

}  // namespace

extern const opst::gemm::ByteKernels kByteKernels;
constinit const opst::gemm::ByteKernels kByteKernels =
    kernels_for<PieceQ8_0, PieceQ4_1, PieceQ4_0, PieceQ5_0, PieceQ5_1, PieceQ6_K, PieceQ4_K, PieceQ5_K>();

}  // namespace opst::OPST_ISA_NS::gemm
