// Packing a weight, and reading rows back out of it. The layout: packed_layout.h.
#include <algorithm>
#include <cstring>

#include "core/shape_check.h"
#include "matmul/call.h"
#include "matmul/pack_blocks.h"
#include "quant/matrices.h"

namespace opst {
namespace {

using namespace gemm;

// Calls body.operator()<Block>() with the format's block.
template <class Body>
void with_format(QuantFormat format, const Body& body) {
  QuantBlocks::each([&]<class Block>() {
    if (format == Block::kFormat) body.template operator()<Block>();
  });
}

template <class Block>
void pack_blocks(Context& context, const QuantMatrix& weight, Piece<Block>* out) {
  const int64_t pieces = ceil_div(weight.cols, Piece<Block>::kValues);
  if (pieces == 0) return;  // however many outputs
  context.impl().pool.parallel_for(ceil_div(weight.rows, kPanelColumns), [&](int64_t panel, int) {
    const int64_t first = panel * kPanelColumns;
    const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, weight.rows - first));
    for (int64_t p = 0; p < pieces; ++p) {
      Piece<Block>& piece = out[panel * pieces + p];
      if (columns < kPanelColumns) piece = {};
      for (int c = 0; c < columns; ++c) {
        Block block;  // copied, since its address may be odd
        const auto size = static_cast<int64_t>(sizeof(Block));
        std::memcpy(&block, static_cast<const char*>(weight.data) + ((first + c) * pieces + p) * size, sizeof(Block));
        put(piece, c, block);
      }
    }
  });
}

// u * s summed over a group stays below 2^31: 255 * 128 * 2^16.
constexpr int64_t kMaxGroupValues = 1 << 16;

// The whole of a matrix into its panels.
void pack_matrix(Context& context, const QuantMatrix& matrix, void* panels) {
  with_format(matrix.format, [&]<class Block>() {
    if constexpr (kIsFloat<Block>) {
      const auto floats = ConstTensor::contiguous(Block::kType, {matrix.rows, matrix.cols}, matrix.data);
      pack_float_weight(context, floats, panels);
    } else {
      pack_blocks<Block>(context, matrix, static_cast<Piece<Block>*>(panels));
    }
  });
}

// One panel: outputs [first, first + 16) of the weight, as far as there are any, into the parts of a packed one.
void pack_int_panel(const IntMatrix& weight, int bits, int64_t first, const gemm::IntWeightPart& parts) {
  const int64_t values = 32 / bits, numbers = parts.groups * kIntPanelColumns;
  auto* const words = const_cast<uint32_t*>(parts.words) + first * parts.groups * parts.group_words;
  auto* const scales = const_cast<float*>(parts.scales) + first * parts.groups;
  auto* const zeros = parts.zeros == nullptr ? nullptr : const_cast<int32_t*>(parts.zeros) + first * parts.groups;
  std::fill_n(words, numbers * parts.group_words, 0u);
  std::fill_n(scales, numbers, 0.0f);
  if (zeros != nullptr) std::fill_n(zeros, numbers, 0);
  for (int64_t c = 0; c < std::min<int64_t>(kIntPanelColumns, weight.q.shape[0] - first); ++c) {
    const IntRow row{weight, first + c};
    for (int64_t g = 0; g < parts.groups; ++g) {
      uint32_t* const group = words + g * parts.group_words * kIntPanelColumns + c;
      for (int64_t t = 0; t < parts.group_values; ++t) {
        const auto u = static_cast<uint32_t>(row.q(g * parts.group_values + t) + (1 << (bits - 1)));
        const int64_t i = t % values;
        const int64_t bit = bits == 8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4);
        group[t / values * kIntPanelColumns] |= u << bit;
      }
      scales[g * kIntPanelColumns + c] = row.scale(g);
      if (zeros != nullptr) zeros[g * kIntPanelColumns + c] = row.zero(g);
    }
  }
}

}  // namespace

void gemm::pack_float_weight(Context& context, const ConstTensor& weight, void* panels) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  if (k == 0) return;  // however many outputs
  // Panels per task: a source that lies as [k, n] is read in runs of so many times 16 elements.
  constexpr int64_t kPanelsPerTask = 4;
  const auto pack_panel = float_kernels(context.machine().isa).pack_panel[float_index(weight.dtype)];
  const int64_t panel_bytes = kPanelColumns * packed_column_bytes(weight_format(weight.dtype), k);
  context.impl().pool.for_each(ceil_div(n, kPanelColumns), kPanelsPerTask, [&](int64_t panel, int) {
    const int64_t first = panel * kPanelColumns;
    pack_panel(static_cast<const char*>(weight.data) + first * weight.strides[0] * size_bytes(weight.dtype),
               weight.strides[0], weight.strides[1], std::min<int64_t>(kPanelColumns, n - first), k,
               static_cast<char*>(panels) + panel * panel_bytes);
  });
}

Result<PackedWeight> PackedWeight::pack(Context& context, const ConstTensor& weight) {
  return checked("PackedWeight::pack", [&](ShapeCheck& check) -> Result<PackedWeight> {
    check.tensor("weight", weight).dtype({DType::f32, DType::bf16, DType::f16}).dims({"n", "k"});
    if (!check.ok()) return check.status();
    const QuantFormat format = weight_format(weight.dtype);
    Result<Buffer> buffer = allocate_weight(context, packed_bytes(format, check["n"], check["k"]));
    if (!buffer.ok()) return buffer.status();
    pack_float_weight(context, normal_strides(weight), buffer.value().data());
    return PackedWeight(format, 1, check["n"], check["k"], std::move(buffer.value()));
  });
}

Result<PackedWeight> PackedWeight::pack_stack(Context& context, const ConstTensor& weights) {
  return checked("PackedWeight::pack_stack", [&](ShapeCheck& check) -> Result<PackedWeight> {
    check.tensor("weights", weights).dtype({DType::f32, DType::bf16, DType::f16}).dims({"count", "n", "k"});
    if (!check.ok()) return check.status();
    const QuantFormat format = weight_format(weights.dtype);
    const int64_t count = check["count"], n = check["n"], k = check["k"];
    const Size bytes = packed_bytes(format, n, k);
    Result<Buffer> buffer = allocate_weight(context, bytes * count);
    if (!buffer.ok()) return buffer.status();
    for (int64_t i = 0; i < count && bytes > 0; ++i) {
      pack_float_weight(context, normal_strides(weights.selected(0, i)),
                        static_cast<char*>(buffer.value().data()) + i * bytes.value());
    }
    return PackedWeight(format, count, n, k, std::move(buffer.value()));
  });
}

Result<PackedWeight> PackedWeight::pack_stack(Context& context, std::span<const QuantMatrix> weights, int64_t parts) {
  return checked("PackedWeight::pack_stack", [&](ShapeCheck& check) -> Result<PackedWeight> {
    const auto size = static_cast<int64_t>(weights.size());
    check.require(parts >= 1 && size % std::max<int64_t>(1, parts) == 0, "parts is ", parts,
                  ", but must be at least 1 and divide the ", size, " matrices");
    if (!check.ok()) return check.status();
    // Part j of every weight is like part j of the first, and the parts of that have one format and k.
    int64_t rows_of_weight = 0;
    for (int64_t i = 0; check.ok() && i < size; ++i) {
      const auto& [format, rows, cols, data, bytes] = weights[static_cast<size_t>(i)];
      check_quant_matrix(check, ("weight " + std::to_string(i)).c_str(), weights[static_cast<size_t>(i)]);
      const QuantMatrix& like = weights[static_cast<size_t>(i % parts)];
      const QuantMatrix& first = weights[0];
      check.require(format == like.format && rows == like.rows && cols == like.cols, "weight ", i, " is ",
                    to_string(format), " [", rows, ", ", cols, "], but weight ", i % parts, " is ",
                    to_string(like.format), " [", like.rows, ", ", like.cols, "]");
      if (!check.ok() || i >= parts) continue;
      check.require(format == first.format && cols == first.cols, "weight ", i, " is ", to_string(format), " with ",
                    cols, " columns, but weight 0, which it lies below, is ", to_string(first.format), " with ",
                    first.cols);
      check.require(i + 1 == parts || rows % kPanelColumns == 0, "weight ", i, " has ", rows,
                    " rows, not a multiple of ", kPanelColumns, ", and another part below it");
      rows_of_weight = (Size(rows_of_weight) + rows).value();
    }
    if (!check.ok()) return check.status();
    const QuantMatrix first = weights.empty() ? QuantMatrix() : weights[0];
    const Size bytes = packed_bytes(first.format, rows_of_weight, first.cols);
    const int64_t count = size / parts;
    Result<Buffer> buffer = allocate_weight(context, bytes * count);
    if (!buffer.ok()) return buffer.status();
    char* const panels = static_cast<char*>(buffer.value().data());
    for (int64_t e = 0; e < count && bytes > 0; ++e) {
      int64_t row = 0;
      for (const QuantMatrix& part : weights.subspan(static_cast<size_t>(e * parts), static_cast<size_t>(parts))) {
        pack_matrix(context, part, panels + e * bytes.value() + row * packed_column_bytes(part.format, part.cols));
        row += part.rows;
      }
    }
    return PackedWeight(first.format, count, rows_of_weight, first.cols, std::move(buffer.value()));
  });
}

Result<PackedWeight> PackedWeight::pack(Context& context, std::span<const QuantMatrix> parts) {
  return checked("PackedWeight::pack", [&](ShapeCheck& check) -> Result<PackedWeight> {
    check.require(!parts.empty(), "no matrix is given");
    int64_t rows = 0;
    for (size_t i = 0; check.ok() && i < parts.size(); ++i) {
      const std::string name = parts.size() == 1 ? "weight" : "part " + std::to_string(i);
      check_quant_matrix(check, name.c_str(), parts[i]);
      if (!check.ok()) break;
      check.require(parts[i].format == parts[0].format && parts[i].cols == parts[0].cols, name, " is ",
                    to_string(parts[i].format), " with ", parts[i].cols, " columns, but part 0 is ",
                    to_string(parts[0].format), " with ", parts[0].cols);
      check.require(i + 1 == parts.size() || parts[i].rows % kPanelColumns == 0, name, " has ", parts[i].rows,
                    " rows, not a multiple of ", kPanelColumns, ", and another part below it");
      rows = (Size(rows) + parts[i].rows).value();
    }
    if (!check.ok()) return check.status();
    const QuantFormat format = parts[0].format;
    Result<Buffer> buffer = allocate_weight(context, packed_bytes(format, rows, parts[0].cols));
    if (!buffer.ok()) return buffer.status();
    char* panels = static_cast<char*>(buffer.value().data());
    for (const QuantMatrix& part : parts) {
      pack_matrix(context, part, panels);
      panels += part.rows * packed_column_bytes(format, part.cols);
    }
    return PackedWeight(format, 1, rows, parts[0].cols, std::move(buffer.value()));
  });
}

Status lookup_rows(Context& context, const PackedWeight& weight, const ConstTensor& rows, const Tensor& out) {
  return checked("lookup_rows", [&](ShapeCheck& check) {
    check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
    check.tensor("rows", rows).dtype({DType::i64}).dims({"count"});
    check.output("out", out).dtype({DType::f32}).dims({"count", "k"});
    const int64_t count = check["count"], k = check["k"];
    check.require(k == weight.k(), "out dim 1 (k) is ", k, ", but the weight has k = ", weight.k());
    check_row_indices(check, rows, weight.count() * weight.n());
    if (!check.ok() || count == 0 || k == 0) return;
    const int64_t matrix_bytes = weight.size_bytes() / weight.count();
    with_format(weight.format(), [&]<class Block>() {
      constexpr int kValues = Piece<Block>::kValues;
      const int64_t pieces = ceil_div(k, kValues);
      context.impl().pool.parallel_for(count, [&](int64_t i, int) {
        const int64_t in_stack = static_cast<const int64_t*>(rows.data)[i * rows.strides[0]];
        const int64_t row = in_stack % weight.n();
        const char* const matrix = static_cast<const char*>(weight.data()) + in_stack / weight.n() * matrix_bytes;
        const auto* const panel = reinterpret_cast<const Piece<Block>*>(matrix) + row / kPanelColumns * pieces;
        const int column = static_cast<int>(row % kPanelColumns);
        float* const to = static_cast<float*>(out.data) + i * out.strides[0];
        for (int64_t t = 0; t < k; ++t) {
          to[t * out.strides[1]] = get(panel[t / kValues], column, static_cast<int>(t % kValues));
        }
      });
    });
  });
}

// ---- int8 and int4 with scales

namespace {

IntMatrixSizes check_int_weight(ShapeCheck& check, const IntMatrix& weight) {
  const IntMatrixSizes sizes = check_int_matrix(check, weight);
  if (!check.ok()) return sizes;
  const int64_t group_values = sizes.cols / sizes.groups;
  check.require(group_values <= kMaxGroupValues, "a group of the weight has ", group_values, " values, but at most ",
                kMaxGroupValues, " can be summed");
  return sizes;
}

// Of one matrix.
Size int_weight_bytes(const IntMatrixSizes& sizes, bool has_zeros) {
  const int64_t group_numbers = int_group_words(sizes.cols / sizes.groups, sizes.bits) + (has_zeros ? 2 : 1);
  return Size(4 * kIntPanelColumns * group_numbers) * sizes.groups * ceil_div(sizes.rows, kIntPanelColumns);
}

void pack_int_matrix(Context& context, const IntMatrix& weight, int bits, const IntWeightPart& parts) {
  context.impl().pool.parallel_for(ceil_div(weight.q.shape[0], kIntPanelColumns), [&](int64_t panel, int) {
    pack_int_panel(weight, bits, panel * kIntPanelColumns, parts);
  });
}

}  // namespace

Result<PackedIntWeight> PackedIntWeight::pack(Context& context, const IntMatrix& weight) {
  return checked("PackedIntWeight::pack", [&](ShapeCheck& check) -> Result<PackedIntWeight> {
    const IntMatrixSizes sizes = check_int_weight(check, weight);
    if (!check.ok()) return check.status();
    const bool has_zeros{weight.zeros};
    Result<Buffer> buffer = allocate_weight(context, int_weight_bytes(sizes, has_zeros));
    if (!buffer.ok()) return buffer.status();
    const auto& [rows, cols, groups, bits] = sizes;
    PackedIntWeight packed(1, rows, cols, groups, bits, has_zeros, std::move(buffer.value()));
    pack_int_matrix(context, weight, bits, int_weight(packed));
    return packed;
  });
}

Result<PackedIntWeight> PackedIntWeight::pack_stack(Context& context, std::span<const IntMatrix> weights) {
  return checked("PackedIntWeight::pack_stack", [&](ShapeCheck& check) -> Result<PackedIntWeight> {
    IntMatrixSizes first;
    const bool has_zeros = !weights.empty() && weights[0].zeros;
    for (size_t i = 0; check.ok() && i < weights.size(); ++i) {
      // A check of its own: a name is bound to one matrix's size.
      ShapeCheck of_one("");
      const auto [rows, cols, groups, bits] = check_int_weight(of_one, weights[i]);
      check.require(of_one.ok(), "weight ", i, of_one.status().message());
      if (i == 0) first = {rows, cols, groups, bits};
      const bool zeros{weights[i].zeros};
      check.require(rows == first.rows && cols == first.cols && groups == first.groups && bits == first.bits &&
                        zeros == has_zeros,
                    "weight ", i, " is int", bits, " [", rows, ", ", cols, "] in ", groups, " groups",
                    zeros ? " with zeros" : "", ", but weight 0 is int", first.bits, " [", first.rows, ", ", first.cols,
                    "] in ", first.groups, " groups", has_zeros ? " with zeros" : "");
    }
    if (!check.ok()) return check.status();
    const auto count = static_cast<int64_t>(weights.size());
    if (count == 0) first.groups = 1;
    Result<Buffer> buffer = allocate_weight(context, int_weight_bytes(first, has_zeros) * count);
    if (!buffer.ok()) return buffer.status();
    PackedIntWeight packed(count, first.rows, first.cols, first.groups, first.bits, has_zeros,
                           std::move(buffer.value()));
    for (int64_t i = 0; i < count; ++i) {
      pack_int_matrix(context, weights[static_cast<size_t>(i)], first.bits, int_weight(packed, i));
    }
    return packed;
  });
}

Result<PackedIntWeight> PackedIntWeight::pack(Context& context, const ConstTensor& weight) {
  return checked("PackedIntWeight::pack", [&](ShapeCheck& check) -> Result<PackedIntWeight> {
    static constexpr float kOne = 1;
    check.tensor("weight", weight).dtype({DType::i8}).dims({"n", "k"});
    if (!check.ok()) return check.status();
    IntMatrix matrix;
    matrix.q = weight;
    matrix.scales = ConstTensor::contiguous(DType::f32, {weight.shape[0], 1}, &kOne);
    matrix.scales.strides[0] = 0;
    return pack(context, matrix);
  });
}

gemm::IntWeightPart gemm::int_weight(const PackedIntWeight& weight, int64_t index) {
  const int64_t groups = weight.groups(), group_values = weight.k() / groups;
  const int64_t group_words = int_group_words(group_values, weight.bits());
  const int64_t numbers = round_up(weight.n(), kIntPanelColumns) * groups;
  const int64_t bytes = weight.count() == 0 ? 0 : weight.size_bytes() / weight.count();
  const auto* const words = reinterpret_cast<const uint32_t*>(static_cast<const char*>(weight.data()) + index * bytes);
  const auto* const scales = reinterpret_cast<const float*>(words + numbers * group_words);
  const auto* const zeros = reinterpret_cast<const int32_t*>(scales + numbers);
  return {words, scales, weight.has_zeros() ? zeros : nullptr, groups, group_words, group_values};
}

}  // namespace opst
