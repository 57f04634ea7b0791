// Packing an int8 or int4 weight with scales. The layout: packed_layout.h.
#include <algorithm>

#include "core/guarded.h"
#include "matmul/call.h"
#include "quant/matrices.h"

namespace opst {
namespace {

using gemm::kIntPanelColumns;

// u * s summed over a group stays below 2^31: 255 * 128 * 2^16.
constexpr int64_t kMaxGroupValues = 1 << 16;

// A packed weight's sizes; words, scales and zeros follow one another.
struct Layout {
  int64_t n, groups, group_values, group_words;
  bool has_zeros;

  int64_t panels() const { return ceil_div(n, kIntPanelColumns); }
  int64_t panel_words() const { return groups * group_words * kIntPanelColumns; }
  int64_t panel_numbers() const { return groups * kIntPanelColumns; }
  Size bytes() const { return Size(4 * kIntPanelColumns * (group_words + (has_zeros ? 2 : 1))) * groups * panels(); }
  uint32_t* words(void* data) const { return static_cast<uint32_t*>(data); }
  float* scales(void* data) const { return reinterpret_cast<float*>(words(data) + panels() * panel_words()); }
  int32_t* zeros(void* data) const { return reinterpret_cast<int32_t*>(scales(data) + panels() * panel_numbers()); }
};

Layout layout_of(int64_t n, int64_t k, int64_t groups, int bits, bool has_zeros) {
  return {n, groups, k / groups, ceil_div(k / groups, 32 / bits), has_zeros};
}

// One panel: outputs [first, first + 16) of the weight, as far as there are any.
void pack_panel(const IntMatrix& weight, int bits, const Layout& layout, int64_t panel, void* data) {
  const int64_t first = panel * kIntPanelColumns;
  const int values = 32 / bits;
  uint32_t* words = layout.words(data) + panel * layout.panel_words();
  std::fill(words, words + layout.panel_words(), 0u);
  float* const scales = layout.scales(data) + panel * layout.panel_numbers();
  std::fill(scales, scales + layout.panel_numbers(), 0.0f);
  int32_t* const zeros = layout.has_zeros ? layout.zeros(data) + panel * layout.panel_numbers() : nullptr;
  if (zeros != nullptr) std::fill(zeros, zeros + layout.panel_numbers(), 0);
  for (int64_t c = 0; c < std::min<int64_t>(kIntPanelColumns, layout.n - first); ++c) {
    const IntRow row(weight, first + c);
    for (int64_t g = 0; g < layout.groups; ++g) {
      uint32_t* const group = words + g * layout.group_words * kIntPanelColumns + c;
      for (int64_t t = 0; t < layout.group_values; ++t) {
        const auto u = static_cast<uint32_t>(row.q(g * layout.group_values + t) + (1 << (bits - 1)));
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

Result<PackedIntWeight> PackedIntWeight::pack(Context& context, const IntMatrix& weight) {
  return guarded([&]() -> Result<PackedIntWeight> {
    ShapeCheck check("PackedIntWeight::pack");
    const IntMatrixSizes sizes = check_int_matrix(check, weight);
    if (!check.ok()) return check.status();
    const bool has_zeros{weight.zeros};
    const Layout layout = layout_of(sizes.rows, sizes.cols, sizes.groups, sizes.bits, has_zeros);
    check.require(layout.group_values <= kMaxGroupValues, "a group of the weight has ", layout.group_values,
                  " values, but at most ", kMaxGroupValues, " can be summed");
    if (!check.ok()) return check.status();
    Result<Buffer> buffer = gemm::allocate_weight(context, layout.bytes());
    if (!buffer.ok()) return buffer.status();
    context.impl().pool.parallel_for(layout.panels(), [&](int64_t panel, int) {
      pack_panel(weight, sizes.bits, layout, panel, buffer.value().data());
    });
    return PackedIntWeight(sizes.rows, sizes.cols, sizes.groups, sizes.bits, has_zeros, std::move(buffer.value()));
  });
}

Result<PackedIntWeight> PackedIntWeight::pack(Context& context, const ConstTensor& weight) {
  return guarded([&]() -> Result<PackedIntWeight> {
    static constexpr float kOne = 1;
    ShapeCheck check("PackedIntWeight::pack");
    check.tensor("weight", weight).dtype({DType::i8}).dims({"n", "k"});
    if (!check.ok()) return check.status();
    IntMatrix matrix;
    matrix.q = weight;
    matrix.scales = ConstTensor::contiguous(DType::f32, {weight.shape[0], 1}, &kOne);
    matrix.scales.strides[0] = 0;
    return pack(context, matrix);
  });
}

gemm::IntWeightPart gemm::int_weight(const PackedIntWeight& weight) {
  const Layout layout = layout_of(weight.n(), weight.k(), weight.groups(), weight.bits(), weight.has_zeros());
  void* const data = const_cast<void*>(weight.data());
  return {.words = layout.words(data),
          .scales = layout.scales(data),
          .zeros = layout.has_zeros ? layout.zeros(data) : nullptr,
          .groups = layout.groups,
          .group_words = layout.group_words,
          .group_values = layout.group_values};
}

}  // namespace opst
