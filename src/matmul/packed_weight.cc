// Packing a weight, and reading rows back out of it. The layout: packed_layout.h.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "core/convert.h"
#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "matmul/call.h"
#include "matmul/packed_layout.h"
#include "matmul/plan.h"
#include "opst/matmul.h"
#include "quant/formats.h"
#include "quant/quant_check.h"

namespace opst {
namespace {

using gemm::kPanelColumns;
using gemm::PieceBf16;
using gemm::PieceF16;
using gemm::PieceF32;
using gemm::PieceQ4_0;
using gemm::PieceQ4_1;
using gemm::PieceQ4_K;
using gemm::PieceQ5_0;
using gemm::PieceQ5_1;
using gemm::PieceQ5_K;
using gemm::PieceQ6_K;
using gemm::PieceQ8_0;

// ---- put: column `c` of a piece from one quant block; get: value `t` of a column back

// The low halves of 8 bytes side by side, the first byte's lowest.
uint32_t gather_nibbles(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0f;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}
// Likewise the lowest two bits.
uint16_t gather_pairs(uint64_t bytes) {
  bytes &= 0x0303030303030303;
  bytes = (bytes | bytes >> 6) & 0x000f000f000f000f;
  bytes = (bytes | bytes >> 12) & 0x000000ff000000ff;
  return static_cast<uint16_t>(bytes | bytes >> 24);
}
// The 8 bits of a byte, each the lowest of its 4-bit field.
uint32_t spread_bits(uint32_t byte) {
  byte = (byte | byte << 12) & 0x000f000f;
  byte = (byte | byte << 6) & 0x03030303;
  return (byte | byte << 3) & 0x11111111;
}
uint64_t eight_bytes(const void* p) {
  uint64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  if constexpr (std::endian::native == std::endian::big) bytes = __builtin_bswap64(bytes);
  return bytes;
}
void put(PieceQ8_0& piece, int c, const BlockQ8_0& block) {
  piece.d[c] = block.d;
  for (int group = 0; group < 4; ++group) {
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t word = 0;
      for (int i = 3; i >= 0; --i) word = word << 8 | static_cast<uint8_t>(block.q[8 * group + 2 * i + odd]);
      piece.words[2 * group + odd][c] = word;
    }
  }
}

// 16 bytes of two 4-bit values each -> 4 words: the lower halves first.
template <class Piece>
void put_halves(Piece& piece, int c, const uint8_t* q) {
  for (int half = 0; half < 2; ++half) {
    const uint64_t bytes = eight_bytes(q + 8 * half);
    piece.words[half][c] = gather_nibbles(bytes);
    piece.words[half + 2][c] = gather_nibbles(bytes >> 4);
  }
}
void put(PieceQ4_1& piece, int c, const BlockQ4_1& block) {
  piece.d[c] = block.d;
  piece.m[c] = block.m;
  put_halves(piece, c, block.q);
}
void put(PieceQ4_0& piece, int c, const BlockQ4_0& block) {
  piece.d[c] = block.d;
  put_halves(piece, c, block.q);
}
uint32_t high_bits(const uint8_t (&bytes)[4]) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= spread_bits(bytes[i]) << i;
  return word;
}
void put(PieceQ5_0& piece, int c, const BlockQ5_0& block) {
  piece.d[c] = block.d;
  piece.high[0][c] = high_bits(block.high);
  put_halves(piece, c, block.q);
}
void put(PieceQ5_1& piece, int c, const BlockQ5_1& block) {
  piece.d[c] = block.d;
  piece.m[c] = block.m;
  piece.high[0][c] = high_bits(block.high);
  put_halves(piece, c, block.q);
}
void put(PieceQ6_K& piece, int c, const BlockQ6_K& block) {
  piece.d[c] = block.d;
  for (int s = 0; s < 16; ++s) piece.scales[s][c] = block.scales[s];
  for (int group = 0; group < 32; ++group) {  // of 8 values
    const int half = group / 16, i = group % 16;
    piece.words[group][c] = gather_nibbles(eight_bytes(block.low + 64 * half + 8 * (i % 8)) >> (i / 8 * 4));
    const uint64_t high = eight_bytes(block.high + 32 * half + 8 * (i % 4)) >> (i / 4 * 2) & 0x0303030303030303;
    if (group % 2 == 0) piece.high[group / 2][c] = 0;
    piece.high[group / 2][c] |= gather_nibbles(high) << group % 2 * 2;
  }
}
// Shared by Q4_K and Q5_K: everything but the fifth bits.
template <class Piece, class Block>
void put_super_block(Piece& piece, int c, const Block& block) {
  piece.d[c] = block.d;
  piece.minus_dmin[c] = block.dmin;
  piece.minus_dmin[c].bits ^= 0x8000;
  uint8_t scales[8], minimums[8];
  for (int s = 0; s < 8; ++s) {
    const ScaleAndMinimum factors = scale_and_minimum(block.scales, s);
    scales[s] = static_cast<uint8_t>(factors.scale);
    minimums[s] = static_cast<uint8_t>(factors.minimum);
  }
  piece.scale_words[0][c] = gather_nibbles(eight_bytes(scales));
  piece.scale_high[0][c] = gather_pairs(eight_bytes(scales) >> 4);
  piece.scale_words[1][c] = gather_nibbles(eight_bytes(minimums));
  piece.scale_high[1][c] = gather_pairs(eight_bytes(minimums) >> 4);
  for (int group = 0; group < 32; ++group) {  // of 8 values
    const uint8_t* const q = block.q + 32 * (group / 8) + 8 * (group % 4);
    piece.words[group][c] = gather_nibbles(eight_bytes(q) >> (group / 4 % 2 * 4));
  }
}
void put(PieceQ4_K& piece, int c, const BlockQ4_K& block) { put_super_block(piece, c, block); }
void put(PieceQ5_K& piece, int c, const BlockQ5_K& block) {
  put_super_block(piece, c, block);
  for (int s = 0; s < 8; ++s) {
    piece.high[s][c] = 0;
    for (int i = 0; i < 4; ++i) {
      piece.high[s][c] |= gather_nibbles(eight_bytes(block.high + 8 * i) >> s & 0x0101010101010101) << i;
    }
  }
}

float get(const PieceF32& piece, int c, int) { return piece.x[c]; }
float get(const PieceF16& piece, int c, int) { return to_f32(piece.x[c]); }
float get(const PieceBf16& piece, int c, int t) {
  return to_f32(bf16{static_cast<uint16_t>(piece.words[c] >> 16 * t)});
}
float get(const PieceQ8_0& piece, int c, int t) {
  const uint32_t word = piece.words[t / 8 * 2 + t % 2][c];
  return to_f32(piece.d[c]) * static_cast<float>(static_cast<int8_t>(word >> t % 8 / 2 * 8));
}
// Field `i` of `bits` bits.
int field(uint32_t word, int i, int bits) { return static_cast<int>(word >> (i * bits) & ((1u << bits) - 1)); }
template <class Piece>
int low_four(const Piece& piece, int c, int t) {
  return field(piece.words[t / 8][c], t % 8, 4);
}
template <class Piece>
int five(const Piece& piece, int c, int t) {
  return low_four(piece, c, t) + 16 * (field(piece.high[t / 32][c], t % 8, 4) >> t / 8 % 4 & 1);
}
float get(const PieceQ4_1& piece, int c, int t) {
  return to_f32(piece.d[c]) * static_cast<float>(low_four(piece, c, t)) + to_f32(piece.m[c]);
}
float get(const PieceQ4_0& piece, int c, int t) {
  return to_f32(piece.d[c]) * static_cast<float>(low_four(piece, c, t) - 8);
}
float get(const PieceQ5_0& piece, int c, int t) {
  return to_f32(piece.d[c]) * static_cast<float>(five(piece, c, t) - 16);
}
float get(const PieceQ5_1& piece, int c, int t) {
  return to_f32(piece.d[c]) * static_cast<float>(five(piece, c, t)) + to_f32(piece.m[c]);
}
float get(const PieceQ6_K& piece, int c, int t) {
  const int q = low_four(piece, c, t) + 16 * (field(piece.high[t / 16][c], t % 8, 4) >> t / 8 % 2 * 2 & 3);
  return to_f32(piece.d[c]) * static_cast<float>(piece.scales[t / 16][c]) * static_cast<float>(q - 32);
}
// Value t of Q4_K and Q5_K from its q.
template <class Piece>
float get_scaled(const Piece& piece, int c, int t, int q) {
  const auto factor = [&](int which) {
    return static_cast<float>(field(piece.scale_words[which][c], t / 32, 4) +
                              16 * field(piece.scale_high[which][c], t / 32, 2));
  };
  return to_f32(piece.d[c]) * factor(0) * static_cast<float>(q) + to_f32(piece.minus_dmin[c]) * factor(1);
}
float get(const PieceQ4_K& piece, int c, int t) { return get_scaled(piece, c, t, low_four(piece, c, t)); }
float get(const PieceQ5_K& piece, int c, int t) { return get_scaled(piece, c, t, five(piece, c, t)); }

// Calls body with null pointers to the format's piece and block.
template <class Body>
void with_format(QuantFormat format, const Body& body) {
  switch (format) {
    case QuantFormat::f32:
      return body(static_cast<PieceF32*>(nullptr), static_cast<const BlockF32*>(nullptr));
    case QuantFormat::f16:
      return body(static_cast<PieceF16*>(nullptr), static_cast<const BlockF16*>(nullptr));
    case QuantFormat::bf16:
      return body(static_cast<PieceBf16*>(nullptr), static_cast<const BlockBf16*>(nullptr));
    case QuantFormat::q8_0:
      return body(static_cast<PieceQ8_0*>(nullptr), static_cast<const BlockQ8_0*>(nullptr));
    case QuantFormat::q4_1:
      return body(static_cast<PieceQ4_1*>(nullptr), static_cast<const BlockQ4_1*>(nullptr));
    case QuantFormat::q4_0:
      return body(static_cast<PieceQ4_0*>(nullptr), static_cast<const BlockQ4_0*>(nullptr));
    case QuantFormat::q5_0:
      return body(static_cast<PieceQ5_0*>(nullptr), static_cast<const BlockQ5_0*>(nullptr));
    case QuantFormat::q5_1:
      return body(static_cast<PieceQ5_1*>(nullptr), static_cast<const BlockQ5_1*>(nullptr));
    case QuantFormat::q6_k:
      return body(static_cast<PieceQ6_K*>(nullptr), static_cast<const BlockQ6_K*>(nullptr));
    case QuantFormat::q4_k:
      return body(static_cast<PieceQ4_K*>(nullptr), static_cast<const BlockQ4_K*>(nullptr));
    case QuantFormat::q5_k:
      return body(static_cast<PieceQ5_K*>(nullptr), static_cast<const BlockQ5_K*>(nullptr));
  }
}

// Packs all panels; block(row, index) is a block of the source.
template <class Piece, class SourceBlock>
void pack_panels(Context& context, int64_t n, int64_t k, Piece* out, const SourceBlock& block) {
  const int64_t pieces = k / Piece::kValues;
  if (pieces == 0) return;  // however many outputs
  context.impl().pool.parallel_for(ceil_div(n, kPanelColumns), [&](int64_t panel, int) {
    const int64_t first = panel * kPanelColumns;
    const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, n - first));
    for (int64_t p = 0; p < pieces; ++p) {
      Piece& piece = out[panel * pieces + p];
      if (columns < kPanelColumns) piece = Piece{};
      for (int c = 0; c < columns; ++c) put(piece, c, block(first + c, p));
    }
  });
}

// The bytes of a packed weight; kMaxBytes where there are more, which no memory holds.
int64_t packed_bytes(QuantFormat format, int64_t n, int64_t k) {
  return (Size(gemm::packed_column_bytes(format, k)) * round_up(n, kPanelColumns)).value();
}

// Panels per task: a source that lies as [k, n] is read in runs of so many times 16 elements.
constexpr int64_t kPanelsPerTask = 4;

}  // namespace

namespace gemm {

void pack_float_weight(Context& context, const ConstTensor& weight, void* panels) {
  const int64_t n = weight.shape[0];
  const int64_t k = weight.shape[1];
  if (k == 0) return;  // however many outputs
  const auto pack_panel = float_kernels(context.machine().isa).pack_panel[static_cast<int>(float_type(weight.dtype))];
  const int64_t panel_bytes = kPanelColumns * packed_column_bytes(weight_format(weight.dtype), k);
  const int64_t num_panels = ceil_div(n, kPanelColumns);
  context.impl().pool.parallel_for(ceil_div(num_panels, kPanelsPerTask), [&](int64_t task, int) {
    for (int64_t panel = task * kPanelsPerTask; panel < std::min(num_panels, (task + 1) * kPanelsPerTask); ++panel) {
      const int64_t first = panel * kPanelColumns;
      pack_panel(static_cast<const char*>(weight.data) + first * weight.strides[0] * size_bytes(weight.dtype),
                 weight.strides[0], weight.strides[1], std::min<int64_t>(kPanelColumns, n - first), k,
                 static_cast<char*>(panels) + panel * panel_bytes);
    }
  });
}

}  // namespace gemm

Result<PackedWeight> PackedWeight::pack(Context& context, const ConstTensor& weight) {
  return guarded([&]() -> Result<PackedWeight> {
    ShapeCheck check("PackedWeight::pack");
    check.tensor("weight", weight).dtype({DType::f32, DType::bf16, DType::f16}).dims({"n", "k"});
    if (!check.ok()) return check.status();
    const QuantFormat format = gemm::weight_format(weight.dtype);
    const int64_t bytes = packed_bytes(format, check["n"], check["k"]);
    if (bytes == kMaxBytes) return Status::out_of_memory();
    Result<Buffer> buffer = context.impl().weights.allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    gemm::pack_float_weight(context, normal_strides(weight), buffer.value().data());
    return PackedWeight(format, check["n"], check["k"], std::move(buffer.value()));
  });
}

namespace {

// The panels of a checked matrix.
void pack_matrix(Context& context, const QuantMatrix& weight, void* panels) {
  with_format(weight.format, [&]<class Piece, class Block>(Piece*, const Block*) {
    if constexpr (Block::kValues == 1) {
      constexpr DType dtype = std::is_same_v<Block, BlockF32>   ? DType::f32
                              : std::is_same_v<Block, BlockF16> ? DType::f16
                                                                : DType::bf16;
      gemm::pack_float_weight(context, ConstTensor::contiguous(dtype, {weight.rows, weight.cols}, weight.data), panels);
    } else {
      const int64_t blocks_per_row = weight.cols / Block::kValues;
      pack_panels(context, weight.rows, weight.cols, static_cast<Piece*>(panels), [&](int64_t row, int64_t index) {
        Block block;  // copied, since its address may be odd
        std::memcpy(&block,
                    static_cast<const char*>(weight.data) +
                        (row * blocks_per_row + index) * static_cast<int64_t>(sizeof(Block)),
                    sizeof(Block));
        return block;
      });
    }
  });
}

}  // namespace

Result<PackedWeight> PackedWeight::pack(Context& context, const QuantMatrix& weight) {
  return pack(context, std::span(&weight, 1));
}

Result<PackedWeight> PackedWeight::pack(Context& context, std::span<const QuantMatrix> parts) {
  return guarded([&]() -> Result<PackedWeight> {
    ShapeCheck check("PackedWeight::pack");
    check.require(!parts.empty(), [] { return std::string("no matrix is given"); });
    int64_t rows = 0;
    for (size_t i = 0; check.ok() && i < parts.size(); ++i) {
      const std::string name = parts.size() == 1 ? "weight" : "part " + std::to_string(i);
      check_quant_matrix(check, name.c_str(), parts[i]);
      if (!check.ok()) break;
      check.require(parts[i].format == parts[0].format && parts[i].cols == parts[0].cols, [&] {
        return name + " is " + to_string(parts[i].format) + " with " + std::to_string(parts[i].cols) +
               " columns, but part 0 is " + to_string(parts[0].format) + " with " + std::to_string(parts[0].cols);
      });
      check.require(i + 1 == parts.size() || parts[i].rows % kPanelColumns == 0, [&] {
        return name + " has " + std::to_string(parts[i].rows) + " rows, not a multiple of " +
               std::to_string(kPanelColumns) + ", and another part below it";
      });
      rows = (Size(rows) + parts[i].rows).value();
    }
    if (!check.ok()) return check.status();
    const QuantFormat format = parts[0].format;
    const int64_t bytes = packed_bytes(format, rows, parts[0].cols);
    if (bytes == kMaxBytes) return Status::out_of_memory();
    Result<Buffer> buffer = context.impl().weights.allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    char* panels = static_cast<char*>(buffer.value().data());
    for (const QuantMatrix& part : parts) {
      pack_matrix(context, part, panels);
      panels += part.rows * gemm::packed_column_bytes(format, part.cols);
    }
    return PackedWeight(format, rows, parts[0].cols, std::move(buffer.value()));
  });
}

Status lookup_rows(Context& context, const PackedWeight& weight, const ConstTensor& rows, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("lookup_rows");
    check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
    check.tensor("rows", rows).dtype({DType::i64}).dims({"count"});
    check.output("out", out).dtype({DType::f32}).dims({"count", "k"});
    check.require(check["k"] == weight.k(), [&] {
      return "out dim 1 (k) is " + std::to_string(check["k"]) +
             ", but the weight has k = " + std::to_string(weight.k());
    });
    check_row_indices(check, rows, weight.n());
    if (!check.ok()) return check.status();
    if (check["count"] == 0 || weight.k() == 0) return {};
    with_format(weight.format(), [&]<class Piece, class Block>(Piece*, const Block*) {
      const int64_t pieces = ceil_div(weight.k(), Piece::kValues);
      context.impl().pool.parallel_for(check["count"], [&](int64_t i, int) {
        const int64_t row = static_cast<const int64_t*>(rows.data)[i * rows.strides[0]];
        const Piece* const panel = static_cast<const Piece*>(weight.data()) + row / kPanelColumns * pieces;
        float* const to = static_cast<float*>(out.data) + i * out.strides[0];
        for (int64_t t = 0; t < weight.k(); ++t) {
          to[t * out.strides[1]] = get(panel[t / Piece::kValues], static_cast<int>(row % kPanelColumns),
                                       static_cast<int>(t % Piece::kValues));
        }
      });
    });
    return {};
  });
}

}  // namespace opst
