#include "matmul/activations_few_rows.h"
#include "matmul/weights_int_few_rows.h"
#include "matmul/weights_int_floats.h"
#include "matmul/weights_int_many_rows.h"

namespace opst::OPST_ISA_NS::gemm {
namespace {

// Of a few rows of blocks: products of larger bytes take more instructions than decoding them to floats.
#if defined(__AVX512VNNI__)
constexpr int kLargest = 255;
#elif defined(__AVX2__)
constexpr int kLargest = 127;
#else
constexpr int kLargest = 0;
#endif

constexpr ByteKernels all_kernels() {
  ByteKernels table = {.many_columns = kTileColumns,
                       .activations_fixed = {},
                       .activations_int8_few_rows = {},
                       .activations_int8_many_rows = {},
                       .weights_int_few_rows = {int_few<WordI8>, int_few<WordI4>},
                       .weights_int_many_rows = {int_many<WordI8>, int_many<WordI4>},
                       .weights_int_floats_few_rows = {int_floats_few<WordI8>, int_floats_few<WordI4>},
                       .weights_int_floats_many_rows = {int_floats_many<WordI8>, int_floats_many<WordI4>},
                       .quantise_row = quantise_row,
                       .fix_row = kLargest > 0 ? fix_row : nullptr,
                       .pack_int_row = pack_int_row};
  QuantBlocks::each([&]<class Block>() {
    if constexpr (!kIsFloat<Block>) {
      constexpr int kFormat = static_cast<int>(Block::kFormat);
      table.activations_int8_many_rows[kFormat] = int8_block_rows<Piece<Block>>;
      if constexpr (Int8Piece<Piece<Block>>::Shape::kMost <= kLargest) {
        table.activations_fixed[kFormat] = few_rows_blocks<Piece<Block>, FixedBlock>;
        table.activations_int8_few_rows[kFormat] = few_rows_blocks<Piece<Block>, ActivationBlock>;
      }
    }
  });
  return table;
}

}  // namespace

extern const ByteKernels kByteKernels;
constinit const ByteKernels kByteKernels = all_kernels();

}  // namespace opst::OPST_ISA_NS::gemm
