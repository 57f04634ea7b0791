// Pages of eight bits for tests: a cache of float pages becomes one of bytes, and its floats the numbers that the bytes
// stand for. f32 holds these exactly: nine bits of q + offset times six bits of a scale. Rows of nobody stay poisoned: in
// the floats, in the scales, and in bytes that can be NaN.
//
//   BytePages bytes(inputs, kByteFormats[3], random);       // inputs: norm pages of f32
//   flash_attention_forward(context, bytes.inputs, ...);    // the reference reads `inputs`
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "attention/tests/attention_problem.h"
#include "core/elements.h"

namespace opst::test {

struct ByteFormat {
  const char* name;
  DType dtype;
  bool has_offsets = false;
  bool in_groups = false;  // a row has several scales

  bool is_integer() const { return dtype == DType::i8 || dtype == DType::u8; }
  int64_t numbers() const { return dtype == DType::u8 ? 2 : 1; }
  // Dimensions of rows must be a multiple of numbers(); groups divide them, and fill whole bytes.
  int64_t draw_groups(int64_t dim, Random& random) const {
    if (!in_groups) return 1;
    std::vector<int64_t> fitting;
    for (int64_t groups = 1; groups <= dim; ++groups) {
      if (dim % groups == 0 && dim / groups % numbers() == 0) fitting.push_back(groups);
    }
    return fitting[static_cast<size_t>(random.integer(0, static_cast<int64_t>(fitting.size()) - 1))];
  }
};
inline constexpr ByteFormat kByteFormats[] = {
    {"int8", DType::i8},
    {"int8 with offsets", DType::i8, true, false},
    {"int8 in groups", DType::i8, false, true},
    {"int8 in groups with offsets", DType::i8, true, true},
    {"int4", DType::u8, false, false},
    {"int4 in groups", DType::u8, false, true},
    {"int4 in groups with offsets", DType::u8, true, true},
    {"f8_e4m3", DType::f8_e4m3},
    {"f8_e5m2", DType::f8_e5m2},
};

class BytePages {
 public:
  struct Side {
    std::unique_ptr<GuardedBuffer> bytes, scales, offsets;
    int64_t groups = 1;
  };

  BytePages(const AttentionInputs& floats, const ByteFormat& format, Random& random) : inputs(floats), format_(format) {
    fill(floats.key, key, inputs.key, inputs.key_scales, inputs.key_offsets, random);
    fill(floats.value, value, inputs.value, inputs.value_scales, inputs.value_offsets, random);
  }

  // The same in panel32 pages; these bytes, and what `memory` holds, must outlive what is returned.
  struct Panels {
    PanelPages numbers, scales, offsets;
  };
  AttentionInputs as_panels(Panels& memory) const {
    memory.numbers = panels_of(inputs);
    AttentionInputs out = memory.numbers.inputs;
    const auto relay = [&](ConstTensor& keys, ConstTensor& values, PanelPages& pages) {
      if (!keys) return;
      AttentionInputs lists = inputs;
      lists.key = keys, lists.value = values;
      pages = panels_of(lists);
      keys = pages.inputs.key, values = pages.inputs.value;
    };
    relay(out.key_scales, out.value_scales, memory.scales);
    relay(out.key_offsets, out.value_offsets, memory.offsets);
    return out;
  }

  AttentionInputs inputs;
  Side key, value;

 private:
  void fill(const ConstTensor& pages, Side& side, ConstTensor& numbers, ConstTensor& scales, ConstTensor& offsets,
            Random& random) {
    const Tensor floats = mutable_view(pages);
    const int64_t dim = floats.shape[3], rows = dim > 0 ? floats.num_elements() / dim : 0,
                  width = dim / format_.numbers();
    side.groups = format_.draw_groups(dim, random);
    side.bytes = std::make_unique<GuardedBuffer>(rows * width);
    side.scales = std::make_unique<GuardedBuffer>(rows * side.groups * 4);
    side.offsets = std::make_unique<GuardedBuffer>(rows * side.groups * 4);
    const auto shaped = [&](const GuardedBuffer& memory, DType dtype, int64_t last) {
      return memory.tensor(dtype, {floats.shape[0], floats.shape[1], floats.shape[2], last});
    };
    for (int64_t row = 0; row < rows; ++row) {
      if (std::isnan(test::get(floats, row * dim))) continue;
      for (int64_t i = 0; i < dim; ++i) fill_number(side, floats, row, i, random);
    }
    numbers = shaped(*side.bytes, format_.dtype, width);
    if (!format_.is_integer()) return;
    scales = shaped(*side.scales, DType::f32, side.groups);
    if (format_.has_offsets) offsets = shaped(*side.offsets, DType::f32, side.groups);
  }

  void fill_number(const Side& side, const Tensor& floats, int64_t row, int64_t i, Random& random) const {
    const int64_t dim = floats.shape[3];
    if (!format_.is_integer()) {
      test::set(format_.dtype, side.bytes->data(), row * dim + i, random.normal());
      test::set(floats, row * dim + i, test::get(format_.dtype, side.bytes->data(), row * dim + i));
      return;
    }
    const bool halves = format_.dtype == DType::u8;
    const int64_t most = halves ? 7 : 127, size = dim / side.groups, group = row * side.groups + i / size;
    float& scale = static_cast<float*>(side.scales->data())[group];
    float& offset = static_cast<float*>(side.offsets->data())[group];
    if (i % size == 0) {
      scale = static_cast<float>(random.integer(1, 63)) * (halves ? 0x1p-7f : 0x1p-11f);
      offset = format_.has_offsets ? static_cast<float>(random.integer(-most, most + 1)) : 0.0f;
    }
    const int64_t q = random.integer(-most - 1, most);
    auto& byte = static_cast<uint8_t*>(side.bytes->data())[halves ? (row * dim + i) / 2 : row * dim + i];
    const auto bits = static_cast<unsigned>(q) & (halves ? 15u : 255u);
    byte = static_cast<uint8_t>(!halves ? bits : i % 2 == 0 ? (byte & 0xf0u) | bits : (byte & 0x0fu) | bits << 4);
    test::set(floats, row * dim + i,
              (static_cast<double>(q) + static_cast<double>(offset)) * static_cast<double>(scale));
  }

  ByteFormat format_;
};

// A problem's keys and values as such a cache; the problem gets the numbers that its bytes stand for.
struct BytePagesOf {
  Pages norm;
  BytePages bytes;
  const AttentionInputs& inputs = bytes.inputs;

  BytePagesOf(const Problem& problem, const ByteFormat& format, int64_t block_size, Random& random)
      : norm(problem.paged(block_size, random)), bytes(norm.inputs, format, random) {
    const ProblemOptions& p = problem.options();
    const auto max_blocks = static_cast<int64_t>(norm.table.size()) / p.batch;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t j = 0; j < problem.length(b); ++j) {
        const int64_t block = norm.table[static_cast<size_t>(b * max_blocks + j / block_size)];
        for (int64_t h = 0; h < p.num_kv_heads; ++h) {
          const auto row_of = [&](const Tensor& t) { return t.selected(0, b).selected(0, h).selected(0, j); };
          const auto page_of = [&](const Tensor& t) {
            return t.selected(0, block).selected(0, j % block_size).selected(0, h);
          };
          copy(page_of(norm.key->tensor()), row_of(problem.key()));
          copy(page_of(norm.value->tensor()), row_of(problem.value()));
        }
      }
    }
  }
  BytePagesOf(const BytePagesOf&) = delete;  // `inputs` refers to itself
  BytePagesOf& operator=(const BytePagesOf&) = delete;
};

}  // namespace opst::test
