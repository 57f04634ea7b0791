// libFuzzer target of the operators: draws one, its tensors (any shape, dtype and strides, extreme ones too) and its
// options. A refused call has written nothing. An accepted one wrote its outputs alone, the same bits on one thread,
// and the values that contiguous copies give at the generic level.
#include "testing/operator_fuzz.h"

#include <utility>
#include <vector>

#include "opst/grouped_matmul.h"
#include "opst/kv_cache.h"
#include "opst/matmul.h"
#include "opst/moe_layer.h"
#include "opst/quant.h"
#include "opst/rowwise.h"
#include "testing/attention_fuzz.h"
#include "testing/mc2_fuzz.h"

namespace opst::test {
namespace {

FuzzedCall draw_matmul(Choices& c, Operands& t) {
  const int64_t m = c.pick<int64_t>({1, 2, 3, 17, 40}), n = 2 * c.integer(1, 30),
                k = c.pick<int64_t>({1, 7, 32, 64, 130});
  const DType x = c.float_dtype(), w = x == DType::f64 ? x : c.pick({x, DType::f32, DType::bf16, DType::f16});
  MatmulOptions options;
  options.activation = c.pick({Activation::none, Activation::silu, Activation::gelu_erf, Activation::gelu_tanh,
                               Activation::swiglu, Activation::swiglu_swapped, static_cast<Activation>(99)});
  options.activations = c.pick({ActivationType::exact, ActivationType::int8});
  options.batch_invariant = c.coin();
  const int64_t columns = options.activation >= Activation::swiglu ? n / 2 : n;
  t.input(x, {m, k});
  t.input(w, {n, k});
  c.coin() ? t.absent() : t.input(x, {n});
  c.coin() ? t.absent() : t.input(x, {m, columns});
  t.output(c.pick({x, x, x, DType::i8}), {m, columns});
  c.rarely(4) ? t.output(DType::f32, {m}) : t.absent();
  const bool packed = c.coin();
  return {[=](Context& context, const Views& v) {
            MatmulOptions o = options;
            o.bias = v[2], o.residual = v[3], o.out_scales = v[5];
            if (!packed) return matmul(context, v[0], ConstTensor(v[1]), v[4], o);
            const Result<PackedWeight> weight = PackedWeight::pack(context, v[1]);
            return weight.ok() ? matmul(context, v[0], weight.value(), v[4], o) : weight.status();
          },
          t.all()[4].view.dtype == DType::i8 ? std::optional(0.03) : std::nullopt};
}

FuzzedCall draw_matmul_backward(Choices& c, Operands& t) {
  const int64_t m = c.integer(1, 30), n = c.integer(1, 30), k = c.integer(1, 40);
  const DType x = c.float_dtype();
  t.input(x, {m, n});
  t.input(x, {m, k});
  t.input(x, {n, k});
  c.rarely(4) ? t.absent() : t.output(x, {m, k});
  c.rarely(4) ? t.absent() : t.output(x, {n, k});
  c.rarely(4) ? t.absent() : t.output(x, {n});
  return {[](Context& context, const Views& v) {
    return matmul_backward(context, v[0], v[1], v[2], {v[3], v[4], v[5]});
  }};
}

// Lists of counts or ends, which may be none.
FuzzedCall draw_grouped(Choices& c, Operands& t) {
  const int64_t groups = c.pick<int64_t>({1, 2, 5}), m = c.pick<int64_t>({4 * groups, 20}), n = c.integer(1, 30),
                k = c.pick<int64_t>({1, 7, 32, 70});
  const DType x = c.float_dtype();
  t.input(c.pick({DType::i64, DType::i32}), {groups}, c.rarely(16) ? -1 : 0, c.rarely(16) ? 30 : 4);
  const auto type = c.rarely(4) ? GroupListType::ends : GroupListType::counts;
  t.input(x, {m, k});
  t.input(x, {groups, n, k});
  if (c.rarely(3)) {
    t.input(x, {m, n});
    t.output(x, {m, k});
    c.coin() ? t.output(x, {groups, n, k}) : t.absent();
    c.coin() ? t.output(x, {groups, n}) : t.absent();
    return {[=](Context& context, const Views& v) {
      return grouped_matmul_backward(context, v[3], v[1], v[2], {v[0], type}, {v[4], v[5], v[6]});
    }};
  }
  c.coin() ? t.absent() : t.input(x, {groups, n});
  c.coin() ? t.absent() : t.input(x, {m, n});
  t.output(x, {m, n});
  const bool packed = c.coin();
  return {[=](Context& context, const Views& v) {
    const GroupedMatmulOptions options{.bias = v[3], .activation = Activation::silu, .residual = v[4]};
    if (!packed) return grouped_matmul(context, v[1], v[2], {v[0], type}, v[5], options);
    const Result<PackedWeight> weight = PackedWeight::pack_stack(context, v[2]);
    return weight.ok() ? grouped_matmul(context, v[1], weight.value(), {v[0], type}, v[5], options) : weight.status();
  }};
}

QuantMatrix blocks_of(const Tensor& bytes, QuantFormat format, int64_t rows, int64_t cols) {
  return {format, rows, cols, bytes.data, bytes.rank == 1 ? bytes.shape[0] : 0};
}

// Blocks of random bits make numbers of any size, infinities and NaN.
FuzzedCall draw_blocks(Choices& c, Operands& t) {
  const auto format = static_cast<QuantFormat>(c.rarely(64) ? 200 : c.integer(0, kNumQuantFormats - 1));
  const bool known = static_cast<int>(format) < kNumQuantFormats;
  const int64_t n = c.integer(1, 20), k = c.integer(1, 2) * (known ? std::max<int64_t>(block_values(format), 32) : 32);
  const int64_t bytes = known ? n * (k / block_values(format)) * block_bytes(format) : 100;
  t.input(DType::u8, {bytes}, 0, 60);
  const int64_t m = c.pick<int64_t>({1, 2, 9});
  t.input(DType::i64, {m}, 0, c.rarely(16) ? n : n - 1);
  const int what = c.pick({0, 1, 2, 3});
  t.input(DType::f32, {m, k});
  t.output(DType::f32, what == 0 ? std::vector{n, k} : what == 3 ? std::vector{m, n} : std::vector{m, k});
  const int64_t rows = c.size(n), cols = c.size(k);
  const bool contiguous = t.all()[0].view.rank == 1 && t.all()[0].view.strides[0] == 1;
  return {[=](Context& context, const Views& v) -> Status {
            if (!contiguous) return Status::invalid_argument("blocks follow one another");
            const QuantMatrix matrix = blocks_of(v[0], format, rows, cols);
            if (what == 0) return dequantize(context, matrix, v[3]);
            if (what == 1) return dequantize_rows(context, matrix, v[1], v[3]);
            const Result<PackedWeight> weight = PackedWeight::pack(context, matrix);
            if (!weight.ok()) return weight.status();
            if (what == 2) return lookup_rows(context, weight.value(), v[1], v[3]);
            return matmul(context, v[2], weight.value(), v[3], {.batch_invariant = true});
          },
          what < 3 ? std::optional(0.0) : std::nullopt};
}

FuzzedCall draw_integers(Choices& c, Operands& t) {
  const int64_t m = c.integer(1, 20), n = c.integer(1, 20), groups = c.pick<int64_t>({1, 2, 4}),
                k = groups * 2 * c.integer(1, 20);
  const bool int4 = c.coin();
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16});
  const int what = c.pick({0, 1, 2, 3, 4});
  const auto q_of = [&](int64_t rows, bool out) {
    const std::vector<int64_t> shape = {rows, int4 ? k / 2 : k};
    const DType type = int4 ? DType::u8 : DType::i8;
    out ? t.output(type, shape) : t.input(type, shape, int4 ? 0 : -128, int4 ? 255 : 127);
  };
  if (what == 0) {  // quantize
    t.input(x, {m, k});
    q_of(m, true);
    t.output(DType::f32, {m, groups});
    c.coin() ? t.output(DType::i8, {m, groups}) : t.absent();
    return {[](Context& context, const Views& v) { return quantize(context, v[0], v[1], v[2], {.zeros = v[3]}); }, 0.0};
  }
  if (what == 1) {
    t.input(x, {m, k});
    q_of(m, true);
    t.output(DType::f32, {m});
    c.coin() ? t.input(DType::f32, {k}) : t.absent();
    return {[](Context& context, const Views& v) { return dynamic_quant(context, v[0], v[1], v[2], {v[3]}); }, 0.0};
  }
  q_of(what == 2 ? m : n, false);
  t.input(DType::f32, {what == 2 ? m : n, groups});
  c.coin() ? t.input(DType::i8, {what == 2 ? m : n, groups}, -5, 5) : t.absent();
  if (what == 2) {
    t.output(x, {m, k});
    return {[](Context& context, const Views& v) {
              return dequantize(context, IntMatrix{v[0], v[1], v[2]}, v[3]);
            },
            0.0};
  }
  const bool integers = what == 3;
  t.input(integers ? DType::i8 : x, {m, k}, -128, 127);
  integers&& c.coin() ? t.input(DType::f32, {m}) : t.absent();
  c.coin() ? t.input(c.pick({DType::f32, DType::i32}), {n}) : t.absent();
  t.output(integers ? c.pick({DType::f32, DType::i32}) : x, {m, n});
  return {[](Context& context, const Views& v) {
    const Result<PackedIntWeight> weight = PackedIntWeight::pack(context, {v[0], v[1], v[2]});
    if (!weight.ok()) return weight.status();
    return matmul(context, v[3], weight.value(), v[6], {.x_scales = v[4], .bias = v[5]});
  }};
}

FuzzedCall draw_rowwise(Choices& c, Operands& t) {
  std::vector<int64_t> shape;
  for (int64_t rank = c.integer(1, 4); rank > 1; --rank) shape.push_back(c.integer(1, 4));
  const int64_t features = 2 * c.integer(1, 60);
  shape.push_back(features);
  std::vector<int64_t> rows(shape.begin(), shape.end() - 1), halves = rows;
  halves.push_back(features / 2);
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16}), w = c.pick({x, DType::f32});
  const double eps = c.pick({1e-5, 0.0, -1.0, std::numeric_limits<double>::quiet_NaN()});
  const int what = c.pick({0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  for (int i = 0; i < 2; ++i) t.input(x, shape);
  t.input(w, {features});
  t.output(x, what == 8 ? halves : shape);
  const bool more = c.coin();
  more ? t.output(what == 1 || what == 2 ? x : DType::f32, what == 1 || what == 2 ? shape : rows) : t.absent();
  what == 3 || what == 5 ? t.output(w, {features}) : t.absent();
  const float scale = c.pick({1.0f, 0.125f, std::numeric_limits<float>::infinity()});
  // A row of equal elements has a variance of 0, or of what the rounding of its mean leaves: 1 / 0, or a large number.
  const bool any_values = (what == 4 || what == 5) && eps == 0;
  return {[=](Context& context, const Views& v) -> Status {
            switch (what) {
              case 0:
                return rms_norm(context, v[0], v[2], v[3], {eps, v[4]});
              case 1:
                return add_rms_norm(context, v[0], v[1], v[2], v[3], v[4], {eps, {}});
              case 2:
                return swiglu_backward(context, v[0], v[1], v[0], v[3], v[4]);
              case 3:
                return rms_norm_backward(context, v[0], v[1], v[2], {v[3], v[5], {}}, {eps, {}});
              case 4:
                return layer_norm(context, v[0], v[3], {eps, v[2], {}, v[4], {}});
              case 5:
                return layer_norm_backward(context, v[0], v[1], {v[3], v[5], {}}, {.eps = eps, .weight = v[2]});
              case 6:
                return softmax(context, v[0], v[3], {scale});
              case 7:
                return softmax_backward(context, v[0], v[1], v[3], {scale});
              case 8:
                return swiglu(context, v[0], v[3], {more});
              default:
                return add(context, v[0], v[1], v[3]);
            }
          },
          any_values ? std::optional(std::numeric_limits<double>::infinity()) : std::nullopt};
}

FuzzedCall draw_rope(Choices& c, Operands& t) {
  const int64_t tokens = c.integer(1, 20), heads = c.integer(1, 3), half = c.integer(1, 20), rest = c.integer(0, 3);
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16});
  const RopeStyle style = c.pick({RopeStyle::halves, RopeStyle::pairs, static_cast<RopeStyle>(9)});
  const bool inverse = c.coin();
  const int what = c.pick({0, 1, 2});
  const int64_t positions = c.integer(1, 30);
  t.input(DType::i64, {tokens}, 0, what == 0 ? 100000 : positions - (c.rarely(16) ? 0 : 1));
  if (what == 0) {
    t.output(DType::f32, {tokens, half});
    t.output(DType::f32, {tokens, half});
    const double theta = c.pick({10000.0, 500.0, 0.0, -1.0});
    return {[=](Context& context, const Views& v) { return rope_table(context, v[0], v[1], v[2], {theta, {}}); }, 1e-6};
  }
  const int64_t rows = what == 1 ? tokens : positions;
  t.input(DType::f32, {rows, half});
  t.input(DType::f32, {rows, half});
  t.input(x, {tokens, heads, 2 * half + rest});
  t.output(x, {tokens, heads, 2 * half + rest});
  return {[=](Context& context, const Views& v) {
    return what == 1 ? rope(context, v[3], v[1], v[2], v[4], {style, inverse})
                     : rope_cached(context, v[3], v[0], v[1], v[2], v[4], {style, inverse, {}});
  }};
}

// Caches are inputs that a call writes into: compared whole.
FuzzedCall draw_cache(Choices& c, Operands& t) {
  PageSizes s;
  s.num_blocks = c.integer(1, 6), s.num_kv_heads = c.integer(1, 3), s.head_dim = 2 * c.integer(1, 16);
  s.value_head_dim = c.coin() ? s.head_dim : 2 * c.integer(1, 16);
  const auto layout = [&] { return c.pick({PageLayout::norm, PageLayout::panel32, static_cast<PageLayout>(7)}); };
  const PageLayout from = layout(), to = layout();
  s.block_size = from == PageLayout::norm && c.coin() ? c.integer(1, 20) : 32;
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16}),
              drawn = c.pick({x, DType::f32, DType::bf16, DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2});
  const int64_t tokens = c.integer(1, 20), slots = s.num_blocks * s.block_size;
  const auto pages = [&](PageLayout l, DType dtype, bool out) {
    for (const bool key : {true, false}) {
      char dummy = 0;
      const Tensor p = key ? key_pages(l, dtype, s, &dummy) : value_pages(l, dtype, s, &dummy);
      const std::vector<int64_t> shape(p.shape, p.shape + p.rank);
      out ? t.output(dtype, shape) : t.input(dtype, shape);
    }
  };
  const int what = c.pick({0, 1, 2, 3});
  // A rotation is rounded otherwise at another level: one step of a number of eight bits or less is too much then.
  const DType cache = what == 1 && size_bytes(drawn) == 1 ? x : drawn;
  const bool integers = cache == DType::i8 || cache == DType::u8;
  // The last operands of a call on a cache in `from`.
  const auto scales = [&](bool out) {
    for (int side = 0; side < 2; ++side) {
      if (!integers) continue;
      char dummy = 0;
      const Tensor p = side == 0 ? key_scale_pages(from, s, 1, &dummy) : value_scale_pages(from, s, 1, &dummy);
      const std::vector<int64_t> shape(p.shape, p.shape + p.rank);
      // Gather refuses negative ones, and half of all drawn numbers are.
      const std::vector<int64_t> twos(static_cast<size_t>(p.num_elements()), 2);
      out ? t.output(DType::f32, shape) : what == 3 ? t.integers(DType::f32, shape, twos) : t.input(DType::f32, shape);
    }
  };
  const auto scales_at = [=](const Views& v, size_t first) {
    return integers ? PageScales{v[first], v[first + 1]} : PageScales{};
  };
  if (what == 2) {
    pages(from, cache, false);
    pages(to, x, true);
    scales(false);
    return {[=](Context& context, const Views& v) {
              return convert_pages(context, v[0], v[1], v[2], v[3], {from, to, scales_at(v, 4)});
            },
            0.0};
  }
  if (what == 3) {
    const int64_t batch = c.integer(1, 3), columns = c.integer(1, 3);
    std::vector<int64_t> lengths;
    int64_t sum = 0;
    for (int64_t b = 0; b < batch; ++b) sum += lengths.emplace_back(c.integer(0, columns * s.block_size));
    pages(from, cache, false);
    t.input(c.pick({DType::i32, DType::i64}), {batch, columns}, c.rarely(16) ? -1 : 0, s.num_blocks - 1);
    t.integers(c.pick({DType::i32, DType::i64}), {batch}, lengths);
    t.output(x, {sum, s.num_kv_heads, s.head_dim});
    t.output(x, {sum, s.num_kv_heads, s.value_head_dim});
    scales(false);
    const bool zero_fill = c.coin();
    return {[=](Context& context, const Views& v) {
              GatherOptions options;
              options.layout = from, options.zero_fill = zero_fill, options.scales = scales_at(v, 6);
              return gather_pa_kv_cache(context, v[0], v[1], v[2], v[3], v[4], v[5], options);
            },
            0.0};
  }
  t.input(x, {tokens, s.num_kv_heads, s.head_dim});
  t.input(x, {tokens, s.num_kv_heads, s.value_head_dim});
  t.input(c.pick({DType::i32, DType::i64}), {tokens}, -1, slots - (c.rarely(16) ? 0 : 1));
  pages(from, cache, true);
  if (what == 0) {
    scales(true);
    return {[=](Context& context, const Views& v) {
              return scatter_pa_kv_cache(context, v[0], v[1], v[2], v[3], v[4], {from, scales_at(v, 5)});
            },
            0.0};
  }
  const int64_t half = c.integer(1, s.head_dim / 2), heads = c.integer(1, 3);
  t.input(x, {tokens, heads, s.head_dim});
  for (int i = 0; i < 2; ++i) t.input(DType::f32, {tokens, half});
  for (int i = 0; i < 2; ++i) c.coin() ? t.input(DType::f32, {s.head_dim}) : t.absent();
  t.output(x, {tokens, heads, s.head_dim});
  return {[=](Context& context, const Views& v) {
    const RopeScatterInputs in = {v[5], v[0], v[1], v[6], v[7], v[2], v[8], v[9]};
    return rope_scatter_pa_kv_cache(context, in, v[10], v[3], v[4], {from});
  }};
}

FuzzedCall draw_gating(Choices& c, Operands& t) {
  const int64_t tokens = c.integer(1, 9), groups = c.pick({1, 2, 3}), experts = groups * c.integer(1, 40);
  const MoeGatingOptions options = {
      .scores = c.pick({GateScores::softmax, GateScores::sigmoid, static_cast<GateScores>(7)}),
      .renormalise = c.coin(),
      .routed_scaling_factor = c.pick({1.0f, 2.5f, std::numeric_limits<float>::infinity()}),
      .num_groups = c.size(groups),
      .kept_groups = c.size(c.integer(1, groups)),
      .group_score = c.pick({GroupScore::max, GroupScore::top2_sum}),
      .nan_is_error = c.coin()};
  const int64_t top_k = c.integer(0, experts / groups);
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16}), w = c.pick({x, DType::f32});
  const DType index = c.pick({DType::i32, DType::i64});
  t.input(x, {tokens, experts});
  if (c.coin()) {
    t.input(index, {tokens, top_k}, -1, experts - (c.rarely(16) ? 0 : 1));
    t.input(w, {tokens, top_k});
    c.coin() ? t.input(DType::f32, {tokens, experts}) : t.absent();
    t.output(x, {tokens, experts});
    return {[=](Context& context, const Views& v) {
      return moe_gating_backward(context, {v[0], v[1], v[2], v[3]}, v[4], options);
    }};
  }
  const bool biased = c.coin();
  biased ? t.input(w, {experts}) : t.absent();
  c.coin() ? t.input(DType::boolean, {tokens}) : t.absent();
  t.output(index, {tokens, top_k});
  t.output(w, {tokens, top_k});
  c.coin() ? t.output(DType::f32, {tokens, experts}) : t.absent();
  // Scores that are rounded otherwise at another level may choose another expert.
  const bool any_values = biased || (groups > 1 && options.group_score == GroupScore::top2_sum);
  return {[=](Context& context, const Views& v) {
            return moe_gating(context, {v[0], v[1], v[2]}, {v[3], v[4], v[5]}, options);
          },
          any_values ? std::optional(std::numeric_limits<double>::infinity()) : std::nullopt};
}

FuzzedCall draw_routing(Choices& c, Operands& t) {
  const int64_t tokens = c.integer(1, 40), top_k = c.integer(1, 4), experts = c.integer(1, 9);
  const DType index = c.pick({DType::i32, DType::i64}), other = c.pick({DType::i32, DType::i64});
  if (c.rarely(4)) {
    t.integers(index, {3}, {0, c.integer(0, 1), c.integer(0, 2)});
    t.output(other, {experts});
    return {[=](Context& context, const Views& v) { return moe_compute_expert_tokens(context, v[0], v[1]); }, 0.0};
  }
  const MoeRoutingOptions options = {.capacity = c.pick<int64_t>({kDropless, 1, 3, 0}),
                                     .expert_begin = c.coin() ? c.integer(0, experts) : 0,
                                     .expert_end = c.coin() ? c.size(experts) : -1,
                                     .cumulative_ends = c.coin()};
  const int64_t range = (options.expert_end < 0 ? experts : options.expert_end) - options.expert_begin;
  const int64_t rows = options.capacity > 0 && range < 100 ? range * options.capacity : c.integer(0, tokens * top_k);
  t.input(index, {tokens, top_k}, -1, experts - (c.rarely(16) ? 0 : 1));
  t.output(other, {tokens, top_k});
  c.coin() ? t.output(index, {rows}) : t.absent();
  c.coin() ? t.output(DType::i64, {range}) : t.absent();
  const int64_t num_experts = c.size(experts);
  return {[=](Context& context, const Views& v) {
            return moe_routing(context, v[0], num_experts, {v[1], v[2], v[3]}, options);
          },
          0.0};
}

FuzzedCall draw_moe_rows(Choices& c, Operands& t) {
  const int64_t tokens = c.integer(1, 9), top_k = c.integer(1, 4), experts = c.integer(1, 4), rows = c.integer(1, 40);
  const int64_t features = c.integer(1, 150);
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16}), w = c.pick({x, DType::f32});
  const DType index = c.pick({DType::i32, DType::i64});
  const int64_t more = c.rarely(16) ? 1 : 0;
  if (c.rarely(4)) {
    t.input(x, {tokens, features});
    t.input(index, {rows}, -1, tokens * top_k - 1 + more);
    t.output(x, {rows, features});
    return {[=](Context& context, const Views& v) { return moe_permute(context, v[0], v[1], top_k, v[2]); }, 0.0};
  }
  const bool backward = c.coin();
  t.input(x, {rows, features});
  std::vector<int64_t> distinct_rows;
  for (int64_t i = 0; i < tokens * top_k; ++i) distinct_rows.push_back(i < rows ? i : -1);
  backward ? t.integers(index, {tokens, top_k}, distinct_rows) : t.input(index, {tokens, top_k}, -1, rows - 1 + more);
  c.coin() ? t.input(w, {tokens, top_k}) : t.absent();
  for (int i = 0; i < 2; ++i) c.coin() ? t.input(x, {tokens, features}) : t.absent();
  const bool biased = c.coin();
  biased ? t.input(x, {experts, features}) : t.absent();
  biased ? t.input(index, {tokens, top_k}, -1, experts - 1 + more) : t.absent();
  if (!backward) {
    t.output(x, {tokens, features});
    return {[=](Context& context, const Views& v) {
      return moe_finalize(context, {v[0], v[1], v[2], v[3], v[4], v[5], v[6]}, v[7]);
    }};
  }
  t.input(x, {tokens, features});
  c.coin() ? t.output(x, {rows, features}) : t.absent();
  c.coin() ? t.output(w, {tokens, top_k}) : t.absent();
  c.coin() ? t.output(x, {experts, features}) : t.absent();
  return {[=](Context& context, const Views& v) {
    return moe_finalize_backward(context, v[7], {v[0], v[1], v[2], v[3], v[4], v[5], v[6]}, {v[8], v[9], v[10]});
  }};
}

FuzzedCall draw_layer(Choices& c, Operands& t) {
  const int64_t tokens = c.integer(1, 9), top_k = c.integer(1, 3), experts = c.integer(1, 5), k = c.integer(1, 40);
  const int64_t n = c.integer(1, 9), begin = c.rarely(8) ? 1 : 0;
  const DType x = c.pick({DType::f32, DType::bf16, DType::f16});
  t.input(x, {tokens, k});
  t.input(c.pick({DType::i32, DType::i64}), {tokens, top_k}, -1, experts - (c.rarely(16) ? 0 : 1));
  t.input(c.pick({DType::f32, x}), {tokens, top_k});
  t.input(x, {experts - begin, 2 * n, k});
  t.input(x, {experts - begin, k, n});
  t.output(x, {tokens, k});
  const bool backward = c.coin();
  if (backward) t.input(x, {tokens, k});
  const MoeLayerOptions options{.num_experts = c.size(experts), .expert_begin = begin, .expert_end = c.size(experts)};
  return {[=](Context& context, const Views& v) {
            const MoeLayerInputs in{
                .x = v[0], .topk_ids = v[1], .topk_weights = v[2], .experts = {.gate_up = v[3], .down = v[4]}};
            if (backward) return moe_layer_backward(context, v[6], in, {.x = v[5]}, options);
            return moe_layer_forward(context, in, {.out = v[5]}, options);
          },
          std::numeric_limits<double>::infinity()};  // a sum of any values, rounded on its way through two products
}

FuzzedCall draw_moe(Choices& c, Operands& t) {
  const int what = c.pick({0, 1, 2, 3});
  if (what == 3) return draw_layer(c, t);
  return what == 0 ? draw_gating(c, t) : what == 1 ? draw_routing(c, t) : draw_moe_rows(c, t);
}

FuzzedCall draw_call(Choices& c, Operands& t) {
  switch (c.byte() % 12) {
    case 0:
    case 1:
      return draw_forward(c, t);
    case 2:
      return draw_backward(c, t);
    case 3:
      return draw_merge(c, t);
    case 4:
      return c.coin() ? draw_matmul(c, t) : draw_grouped(c, t);
    case 5:
      return draw_matmul_backward(c, t);
    case 6:
      return draw_blocks(c, t);
    case 7:
      return draw_integers(c, t);
    case 8:
      return c.coin() ? draw_rowwise(c, t) : draw_rope(c, t);
    case 10:
      return draw_indexer(c, t);
    case 11:
      return c.rarely(3) ? draw_mc2(c, t) : draw_moe(c, t);
    default:
      return draw_cache(c, t);
  }
}

}  // namespace

bool fuzz_operator(const uint8_t* data, size_t size, PlantedFault fault) {
  Choices choose(data, size);
  Operands operands(choose);
  const FuzzedCall fuzzed = draw_call(choose, operands);
  return answers(fuzzed, operands, fault);
}

}  // namespace opst::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  opst::test::fuzz_operator(data, size, opst::test::PlantedFault::none);
  return 0;
}
