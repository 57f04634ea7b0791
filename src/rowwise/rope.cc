// rope_table, rope, rope_cached.
#include <cmath>

#include "core/convert.h"
#include "core/guarded.h"
#include "opst/rowwise.h"
#include "rowwise/rows.h"

namespace opst {
namespace rowwise {
namespace {

bool has_axes(const RopeSections& sections) {
  return sections.temporal != 0 || sections.height != 0 || sections.width != 0;
}

// The row of positions, 0, 1 or 2, by which pair i turns.
int axis_of(const RopeSections& s, int64_t i) {
  if (!has_axes(s)) return 0;
  if (!s.interleaved) return i < s.temporal ? 0 : i < s.temporal + s.height ? 1 : 2;
  if (i % 3 == 1) return i < 3 * s.height ? 1 : 0;
  if (i % 3 == 2) return i < 3 * s.width ? 2 : 0;
  return 0;
}

void check_positions(ShapeCheck& check, const ConstTensor& positions, const RopeSections& sections) {
  ShapeCheck::TensorCheck tensor = check.tensor("positions", positions).dtype({DType::i64});
  if (has_axes(sections)) {
    tensor.dims({"3", "tokens"});
  } else {
    tensor.dims({"tokens"});
  }
}
// Once `half` is known: the sections add up to it.
void check_sections(ShapeCheck& check, const RopeSections& s) {
  if (!check.ok() || !has_axes(s)) return;
  const int64_t half = check["half"];
  const auto text = [&] {
    return "sections are " + std::to_string(s.temporal) + ", " + std::to_string(s.height) + " and " +
           std::to_string(s.width);
  };
  const bool in_range =
      s.temporal >= 0 && s.height >= 0 && s.width >= 0 && s.temporal <= half && s.height <= half && s.width <= half;
  check.require(in_range && s.temporal + s.height + s.width == half,
                [&] { return text() + ", but must be >= 0 and add up to half = " + std::to_string(half); });
  if (!check.ok() || !s.interleaved) return;
  const int64_t last = std::max(s.height > 0 ? 3 * s.height - 2 : 0, s.width > 0 ? 3 * s.width - 1 : 0);
  check.require(last < half, [&] {
    return text() + ", which interleaved reach pair " + std::to_string(last) + ", but half is " + std::to_string(half);
  });
}

int64_t position_at(const ConstTensor& positions, int axis, int64_t token) {
  return positions.rank > 1 ? index_at(positions, axis, token) : index_at(positions, token);
}

void check_pairs(ShapeCheck& check, const char* cos_name) {
  const int64_t half = check["half"], head_dim = check["head_dim"];
  check.require(half <= head_dim / 2, [&] {
    return std::string(cos_name) + " dim 1 (half) is " + std::to_string(half) +
           ", but x has head_dim = " + std::to_string(head_dim) + ", which holds " + std::to_string(head_dim / 2) +
           " pairs";
  });
}

// x and out [tokens, num_heads, head_dim]; out may be the same view as x.
void check_heads(ShapeCheck& check, const ConstTensor& x, const Tensor& out) {
  const bool in_place = same_view(x, out);
  if (in_place) check.output("out", out).dims({"tokens", "num_heads", "head_dim"});
  check.tensor("x", x).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "num_heads", "head_dim"});
  if (!in_place) check.output("out", out).dtype({x.dtype}).dims({"tokens", "num_heads", "head_dim"});
}

// The kernel's argument for token 0, without the angles.
RopeToken first_token(const ConstTensor& x, const Tensor& out, int64_t half, RopeStyle style, bool inverse) {
  return {.x = {x.data, x.strides[2]},
          .out = {out.data, out.strides[2]},
          .num_heads = x.shape[1],
          .x_head_stride = x.strides[1],
          .out_head_stride = out.strides[1],
          .head_dim = x.shape[2],
          .half = half,
          .cos = {nullptr, 0},
          .sin = {nullptr, 0},
          .pairs = style == RopeStyle::pairs,
          .inverse = inverse};
}

void turn_token(Rope kernel, RopeToken token, const ConstTensor& x, const Tensor& out, int64_t index, ConstRow cos,
                ConstRow sin) {
  const int64_t bytes = size_bytes(x.dtype);
  token.x.data = static_cast<const char*>(x.data) + index * x.strides[0] * bytes;
  token.out.data = static_cast<char*>(out.data) + index * out.strides[0] * bytes;
  token.cos = cos;
  token.sin = sin;
  kernel(token);
}

float load_f32(const ConstTensor& tensor, int64_t offset) {
  if (tensor.dtype == DType::bf16) return to_f32(static_cast<const bf16*>(tensor.data)[offset]);
  if (tensor.dtype == DType::f16) return to_f32(static_cast<const f16*>(tensor.data)[offset]);
  return static_cast<const float*>(tensor.data)[offset];
}

}  // namespace

void check_style(ShapeCheck& check, RopeStyle style) {
  check.require(style == RopeStyle::pairs || style == RopeStyle::halves, [&] {
    return "style is " + std::to_string(static_cast<int>(style)) + ", but must be pairs or halves";
  });
}

}  // namespace rowwise

using rowwise::axis_of;
using rowwise::for_each_row;
using rowwise::has_axes;
using rowwise::position_at;
using rowwise::row_of;

Status rope_table(Context& context, const ConstTensor& positions, const Tensor& cos, const Tensor& sin,
                  const RopeTableOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rope_table");
    rowwise::check_positions(check, positions, options.sections);
    check.output("cos", cos).dtype({DType::f32}).dims({"tokens", "half"});
    check.output("sin", sin).dtype({DType::f32}).dims({"tokens", "half"});
    check.require(options.theta > 0 && std::isfinite(options.theta),
                  [&] { return "theta is " + std::to_string(options.theta) + ", but must be positive and finite"; });
    rowwise::check_sections(check, options.sections);
    if (!check.ok()) return check.status();

    const int64_t half = check["half"];
    if (check["tokens"] == 0 || half == 0) return {};
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(Arena::size_of<double>(half));
    if (!lease.ok()) return lease.status();
    auto* const frequency = Arena(lease.value()).take<double>(half);
    for (int64_t i = 0; i < half; ++i) {
      frequency[i] = std::pow(options.theta, -static_cast<double>(i) / static_cast<double>(half));
    }
    // A sine and a cosine count as 64 elements of the other operators.
    for_each_row(context, check["tokens"], 64 * half, [&](int64_t token) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(position_at(positions, axis_of(options.sections, i), token)) * frequency[i];
        static_cast<float*>(cos.data)[token * cos.strides[0] + i * cos.strides[1]] =
            static_cast<float>(std::cos(angle));
        static_cast<float*>(sin.data)[token * sin.strides[0] + i * sin.strides[1]] =
            static_cast<float>(std::sin(angle));
      }
    });
    return {};
  });
}

const char* to_string(RopeStyle style) {
  switch (style) {
    case RopeStyle::pairs:
      return "pairs";
    case RopeStyle::halves:
      return "halves";
  }
  return "unknown";
}

Status rope(Context& context, const ConstTensor& x, const ConstTensor& cos, const ConstTensor& sin, const Tensor& out,
            const RopeOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rope");
    check.tensor("cos", cos).dtype({DType::f32}).dims({"tokens", "half"});
    check.tensor("sin", sin).dtype({DType::f32}).dims({"tokens", "half"});
    rowwise::check_heads(check, x, out);
    rowwise::check_pairs(check, "cos");
    rowwise::check_style(check, options.style);
    if (!check.ok()) return check.status();

    const rowwise::Rope kernel = rowwise::kernels(context.machine().isa).rope[float_index(x.dtype)];
    const rowwise::RopeToken first = rowwise::first_token(x, out, check["half"], options.style, options.inverse);
    for_each_row(context, x.shape[0], x.shape[1] * x.shape[2], [&](int64_t token) {
      rowwise::turn_token(kernel, first, x, out, token, row_of(cos, token), row_of(sin, token));
    });
    return {};
  });
}

Status rope_cached(Context& context, const ConstTensor& x, const ConstTensor& positions, const ConstTensor& cos_cache,
                   const ConstTensor& sin_cache, const Tensor& out, const RopeCachedOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rope_cached");
    rowwise::check_positions(check, positions, options.sections);
    check.tensor("cos_cache", cos_cache).dtype({DType::f32, x.dtype}).dims({"max_positions", "half"});
    check.tensor("sin_cache", sin_cache).dtype({cos_cache.dtype}).dims({"max_positions", "half"});
    rowwise::check_heads(check, x, out);
    rowwise::check_pairs(check, "cos_cache");
    rowwise::check_sections(check, options.sections);
    rowwise::check_style(check, options.style);
    if (!check.ok()) return check.status();
    const int64_t tokens = check["tokens"], half = check["half"], max_positions = check["max_positions"];
    const bool axes = has_axes(options.sections);
    for (int axis = 0; axis < (axes ? 3 : 1); ++axis) {
      for (int64_t token = 0; token < distinct(positions, positions.rank - 1); ++token) {
        const int64_t position = position_at(positions, axis, token);
        if (position >= 0 && position < max_positions) continue;
        check.require(false, std::string("positions[") + (axes ? std::to_string(axis) + ", " : "") +
                                 std::to_string(token) + "] is " + std::to_string(position) +
                                 ", but cos_cache has max_positions = " + std::to_string(max_positions));
        return check.status();
      }
    }

    const rowwise::Rope kernel = rowwise::kernels(context.machine().isa).rope[float_index(x.dtype)];
    const rowwise::RopeToken first = rowwise::first_token(x, out, half, options.style, options.inverse);
    const int64_t elements = x.shape[1] * x.shape[2];
    if (tokens == 0 || elements == 0) return {};
    if (!axes && cos_cache.dtype == DType::f32) {
      for_each_row(context, tokens, elements, [&](int64_t token) {
        const int64_t position = position_at(positions, 0, token);
        rowwise::turn_token(kernel, first, x, out, token, row_of(cos_cache, position), row_of(sin_cache, position));
      });
      return {};
    }
    // Each worker gathers the angles of one token: cos, sin [half].
    const int64_t row_bytes = Arena::size_of<float>(half);
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(2 * row_bytes * context.num_threads());
    if (!lease.ok()) return lease.status();
    char* const angles = static_cast<char*>(lease.value().data());
    for_each_row(context, tokens, elements, [&](int64_t token, int worker) {
      auto* const cos = reinterpret_cast<float*>(angles + 2 * worker * row_bytes);
      auto* const sin = reinterpret_cast<float*>(angles + (2 * worker + 1) * row_bytes);
      for (int64_t i = 0; i < half; ++i) {
        const int64_t position = position_at(positions, axis_of(options.sections, i), token);
        cos[i] = rowwise::load_f32(cos_cache, position * cos_cache.strides[0] + i * cos_cache.strides[1]);
        sin[i] = rowwise::load_f32(sin_cache, position * sin_cache.strides[0] + i * sin_cache.strides[1]);
      }
      rowwise::turn_token(kernel, first, x, out, token, {cos, 1}, {sin, 1});
    });
    return {};
  });
}

}  // namespace opst
