// rope_table, rope, rope_cached.
#include <cmath>
#include <span>

#include "rowwise/rows.h"

namespace opst {

const char* to_string(RopeStyle style) { return name_of(style, {"pairs", "halves"}); }

namespace rowwise {

void check_heads(ShapeCheck& check, const Input& x, const Output& out, std::initializer_list<DType> dtypes) {
  const bool in_place = same_view(*x.tensor, *out.tensor);
  if (in_place) check.output(out.name, *out.tensor).dims({"tokens", "num_heads", "head_dim"});
  check.tensor(x.name, *x.tensor).dtype(dtypes).dims({"tokens", "num_heads", "head_dim"});
  if (in_place) return;
  check.output(out.name, *out.tensor).dtype({x.tensor->dtype}).dims({"tokens", "num_heads", "head_dim"});
}

void check_pairs(ShapeCheck& check, const char* cos, const char* tensor) {
  const int64_t half = check["half"], head_dim = check["head_dim"];
  check.require(half <= head_dim / 2, cos, " dim 1 (half) is ", half, ", but ", tensor, " has head_dim = ", head_dim,
                ", which holds ", head_dim / 2, " pairs");
}

void check_style(ShapeCheck& check, RopeStyle style) {
  check.require(style == RopeStyle::pairs || style == RopeStyle::halves, "style is ", static_cast<int>(style),
                ", but must be pairs or halves");
}

}  // namespace rowwise

using namespace rowwise;

namespace {

bool has_axes(const RopeSections& s) { return s.temporal != 0 || s.height != 0 || s.width != 0; }

// The row of positions, 0, 1 or 2, by which pair i turns.
int axis_of(const RopeSections& s, int64_t i) {
  if (!has_axes(s)) return 0;
  if (!s.interleaved) return i < s.temporal ? 0 : i < s.temporal + s.height ? 1 : 2;
  if (i % 3 == 1) return i < 3 * s.height ? 1 : 0;
  if (i % 3 == 2) return i < 3 * s.width ? 2 : 0;
  return 0;
}

void check_positions(ShapeCheck& check, const ConstTensor& positions, const RopeSections& sections) {
  constexpr const char* kDims[] = {"3", "tokens"};
  check.tensor("positions", positions).dtype({DType::i64}).dims(std::span(kDims).subspan(has_axes(sections) ? 0 : 1));
}

// Once `half` is known: the sections add up to it.
void check_sections(ShapeCheck& check, const RopeSections& s) {
  if (!check.ok() || !has_axes(s)) return;
  const int64_t half = check["half"];
  const auto sections = [&] { return text("sections are ", s.temporal, ", ", s.height, " and ", s.width); };
  const bool in_range =
      s.temporal >= 0 && s.height >= 0 && s.width >= 0 && s.temporal <= half && s.height <= half && s.width <= half;
  check.require(in_range && s.temporal + s.height + s.width == half, sections,
                ", but must be >= 0 and add up to half = ", half);
  if (!check.ok() || !s.interleaved) return;
  const int64_t last = std::max(s.height > 0 ? 3 * s.height - 2 : 0, s.width > 0 ? 3 * s.width - 1 : 0);
  check.require(last < half, sections, ", which interleaved reach pair ", last, ", but half is ", half);
}

int64_t position_at(const ConstTensor& positions, int axis, int64_t token) {
  return positions.rank > 1 ? index_at(positions, axis, token) : index_at(positions, token);
}

// The heads of each token of x [tokens, num_heads, head_dim], turned into out.
struct Rotation {
  Rope kernel;
  const ConstTensor& x;
  const Tensor& out;
  int64_t half;
  RopeStyle style;
  bool inverse;

  void run(int64_t token, ConstRow cos, ConstRow sin) const {
    const int64_t bytes = size_bytes(x.dtype);
    kernel({.x = {static_cast<const char*>(x.data) + token * x.strides[0] * bytes, x.strides[2]},
            .out = {static_cast<char*>(out.data) + token * out.strides[0] * bytes, out.strides[2]},
            .num_heads = x.shape[1],
            .x_head_stride = x.strides[1],
            .out_head_stride = out.strides[1],
            .head_dim = x.shape[2],
            .half = half,
            .cos = cos,
            .sin = sin,
            .pairs = style == RopeStyle::pairs,
            .inverse = inverse});
  }
};

float load_f32(const ConstTensor& tensor, int64_t i, int64_t j) {
  const int64_t offset = i * tensor.strides[0] + j * tensor.strides[1];
  if (tensor.dtype == DType::bf16) return to_f32(static_cast<const bf16*>(tensor.data)[offset]);
  if (tensor.dtype == DType::f16) return to_f32(static_cast<const f16*>(tensor.data)[offset]);
  return static_cast<const float*>(tensor.data)[offset];
}

}  // namespace

Status rope_table(Context& context, const ConstTensor& positions, const Tensor& cos, const Tensor& sin,
                  const RopeTableOptions& options) {
  return checked("rope_table", [&](ShapeCheck& check) -> Status {
    const auto& [theta, sections] = options;
    check_positions(check, positions, sections);
    check.output("cos", cos).dtype({DType::f32}).dims({"tokens", "half"});
    check.output("sin", sin).dtype({DType::f32}).dims({"tokens", "half"});
    check.require(theta > 0 && std::isfinite(theta), "theta is ", theta, ", but must be positive and finite");
    check_sections(check, sections);
    if (!check.ok()) return check.status();

    const int64_t half = check["half"];
    if (check["tokens"] == 0 || half == 0) return {};
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(Arena::size_of<double>(half));
    if (!lease.ok()) return lease.status();
    auto* const frequency = Arena(lease.value()).take<double>(half);
    for (int64_t i = 0; i < half; ++i) {
      frequency[i] = std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
    }
    // A sine and a cosine count as 64 elements of the other operators.
    for_each_row(context, check["tokens"], 64 * half, [&](int64_t token, int) {
      const Row cos_row = row_of(cos, token), sin_row = row_of(sin, token);
      for (int64_t i = 0; i < half; ++i) {
        const int64_t position = position_at(positions, axis_of(options.sections, i), token);
        const double angle = static_cast<double>(position) * frequency[i];
        static_cast<float*>(cos_row.data)[i * cos_row.stride] = static_cast<float>(std::cos(angle));
        static_cast<float*>(sin_row.data)[i * sin_row.stride] = static_cast<float>(std::sin(angle));
      }
    });
    return {};
  });
}

Status rope(Context& context, const ConstTensor& x, const ConstTensor& cos, const ConstTensor& sin, const Tensor& out,
            const RopeOptions& options) {
  return checked("rope", [&](ShapeCheck& check) {
    check.tensor("cos", cos).dtype({DType::f32}).dims({"tokens", "half"});
    check.tensor("sin", sin).dtype({DType::f32}).dims({"tokens", "half"});
    check_heads(check, {"x", &x}, {"out", &out}, {DType::f32, DType::bf16, DType::f16});
    check_pairs(check, "cos", "x");
    check_style(check, options.style);
    if (!check.ok()) return;

    const Rotation rotation = {
        kernels_of(context, x.dtype).rope, x, out, check["half"], options.style, options.inverse};
    for_each_row(context, x.shape[0], x.shape[1] * x.shape[2],
                 [&](int64_t token, int) { rotation.run(token, row_of(cos, token), row_of(sin, token)); });
  });
}

Status rope_cached(Context& context, const ConstTensor& x, const ConstTensor& positions, const ConstTensor& cos_cache,
                   const ConstTensor& sin_cache, const Tensor& out, const RopeCachedOptions& options) {
  return checked("rope_cached", [&](ShapeCheck& check) -> Status {
    check_positions(check, positions, options.sections);
    check.tensor("cos_cache", cos_cache).dtype({DType::f32, x.dtype}).dims({"max_positions", "half"});
    check.tensor("sin_cache", sin_cache).dtype({cos_cache.dtype}).dims({"max_positions", "half"});
    check_heads(check, {"x", &x}, {"out", &out}, {DType::f32, DType::bf16, DType::f16});
    check_pairs(check, "cos_cache", "x");
    check_sections(check, options.sections);
    check_style(check, options.style);
    if (!check.ok()) return check.status();
    const int64_t tokens = check["tokens"], half = check["half"], max_positions = check["max_positions"];
    const bool axes = has_axes(options.sections);
    for (int axis = 0; axis < (axes ? 3 : 1); ++axis) {
      for (int64_t token = 0; token < distinct(positions, positions.rank - 1) && check.ok(); ++token) {
        const int64_t position = position_at(positions, axis, token);
        check.require(
            position >= 0 && position < max_positions, "positions[", [&] { return axes ? text(axis, ", ") : ""; },
            token, "] is ", position, ", but cos_cache has max_positions = ", max_positions);
      }
    }
    if (!check.ok()) return check.status();

    const Rotation rotation = {kernels_of(context, x.dtype).rope, x, out, half, options.style, options.inverse};
    const int64_t elements = x.shape[1] * x.shape[2];
    if (tokens == 0 || elements == 0) return {};
    if (!axes && cos_cache.dtype == DType::f32) {
      for_each_row(context, tokens, elements, [&](int64_t token, int) {
        const int64_t position = index_at(positions, token);
        rotation.run(token, row_of(cos_cache, position), row_of(sin_cache, position));
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
        cos[i] = load_f32(cos_cache, position, i);
        sin[i] = load_f32(sin_cache, position, i);
      }
      rotation.run(token, {cos, 1}, {sin, 1});
    });
    return {};
  });
}

}  // namespace opst
