// The layer of experts beside its products alone: the same experts, the same rows, permuted in advance, in the same run.
//
//   layer/E128/bf16/T256    E = 128: 8 of 128 experts, hidden 2048, intermediate 768. E8: 2 of 8, 1024, 3584
//   backward/..             gradients of x and of both weights, beside the five products they are (bf16 only)
//   swiglu_quant/..         grouped_matmul_swiglu_quant beside the product, swiglu and dynamic_quant one after the other
//   gradients/..            gradients of grouped products, E = 16 of K = 2048, beside multiply-adds of the same length
//
//   products  time of the grouped products (backward: their gradients) over that of the call
//   routing   time of gating and routing over that of the call
//   unfused   time of the calls one after the other over that of the fused one
//   of_peak   flops over those of multiply-adds (testing/peak.h)
//   q4_k and bf16: rows of bf16; int8: rows of f32 with ActivationType::int8
// OPST_NUM_THREADS sets the threads. Times are the least of several, taken in turns.
#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "opst/moe_layer.h"
#include "opst/rowwise.h"
#include "quant/random_blocks.h"
#include "testing/bench.h"

namespace opst {
namespace {

struct Shape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
};
constexpr Shape kShapes[] = {{"E128", 128, 8, 2048, 768}, {"E8", 8, 2, 1024, 3584}};
enum class Kind { bf16, q4_k, int8 };
constexpr const char* kNames[] = {"bf16", "q4_k", "int8"};

class Memory {
 public:
  Tensor operator()(DType type, std::initializer_list<int64_t> shape) {
    const int64_t elements = Tensor::contiguous(type, shape, nullptr).num_elements();
    buffers_.push_back(std::move(Buffer::allocate(std::max<int64_t>(1, elements) * size_bytes(type)).value()));
    const Tensor t = buffers_.back().tensor(type, shape);
    test::fill(t, test::Fill::uniform, random);
    return t;
  }
  test::Random random{1};

 private:
  std::vector<Buffer> buffers_;
};

// One packed stack [count, n, k].
struct Stack {
  PackedWeight floats;
  PackedIntWeight integers;
  bool is_int = false;

  Stack(Context& context, Kind kind, int64_t count, int64_t n, int64_t k) {
    Memory memory;
    if (kind == Kind::bf16) {
      floats = std::move(PackedWeight::pack_stack(context, memory(DType::bf16, {count, n, k})).value());
    } else if (kind == Kind::q4_k) {
      const std::vector<unsigned char> bytes = test::random_blocks(QuantFormat::q4_k, n, k, memory.random);
      const std::vector<QuantMatrix> matrices(
          static_cast<size_t>(count), {QuantFormat::q4_k, n, k, bytes.data(), static_cast<int64_t>(bytes.size())});
      floats = std::move(PackedWeight::pack_stack(context, matrices).value());
    } else {
      is_int = true;
      const IntMatrix matrix{memory(DType::i8, {n, k}), memory(DType::f32, {n, 1})};
      const std::vector<IntMatrix> matrices(static_cast<size_t>(count), matrix);
      integers = std::move(PackedIntWeight::pack_stack(context, matrices).value());
    }
  }
  GroupedWeight weight() const { return is_int ? GroupedWeight(integers) : GroupedWeight(floats); }
};

double seconds_of(const std::function<Status()>& call, Status& status) {
  const auto begin = std::chrono::steady_clock::now();
  if (status.ok()) status = call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The least times of calls, taken in turns for about a second.
std::vector<double> least_times(const std::vector<std::function<Status()>>& calls, Status& status) {
  std::vector<double> best(calls.size(), std::numeric_limits<double>::infinity());
  double total = 0;
  for (int round = 0; status.ok() && (round < 3 || (total < 1 && round < 200)); ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const double seconds = seconds_of(calls[i], status);
      total += seconds;
      if (round > 0) best[i] = std::min(best[i], seconds);  // the first one touches new memory
    }
  }
  return best;
}

void report(benchmark::State& state, const std::vector<double>& times, const Status& status, double flops) {
  if (!status.ok()) return state.SkipWithError(status.message().c_str());
  for (auto _ : state) state.SetIterationTime(times[0]);
  state.counters["products"] = times[1] / times[0];
  state.counters["routing"] = times[2] / times[0];
  state.counters["GFLOP/s"] = flops / times[0] / 1e9;
}

// Tensors of a layer and of its products alone.
struct Tensors {
  Memory memory;
  Tensor x, logits, ids, weights, rows, slots, counts, expanded, hidden, out_rows, out;

  Tensors(const Shape& s, DType type, int64_t tokens)
      : x(memory(type, {tokens, s.hidden})),
        logits(memory(DType::f32, {tokens, s.experts})),
        ids(memory(DType::i32, {tokens, s.top_k})),
        weights(memory(DType::f32, {tokens, s.top_k})),
        rows(memory(DType::i32, {tokens, s.top_k})),
        slots(memory(DType::i32, {tokens * s.top_k})),
        counts(memory(DType::i64, {s.experts})),
        expanded(memory(type, {tokens * s.top_k, s.hidden})),
        hidden(memory(type, {tokens * s.top_k, s.intermediate})),
        out_rows(memory(type, {tokens * s.top_k, s.hidden})),
        out(memory(type, {tokens, s.hidden})) {}
  Status route(Context& context) const {
    Status s = moe_gating(context, {.logits = logits}, {ids, weights}, {.renormalise = true});
    if (s.ok()) s = moe_routing(context, ids, logits.shape[1], {rows, slots, counts});
    return s;
  }
  GroupList groups() const { return {counts, GroupListType::counts}; }
};

void run_layer(benchmark::State& state, const Shape& s, Kind kind, int64_t tokens) {
  Result<Context> created = Context::create();
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  const Stack gate_up(context, kind, s.experts, 2 * s.intermediate, s.hidden);
  const Stack down(context, kind, s.experts, s.hidden, s.intermediate);
  const bool int8 = kind == Kind::int8;
  Tensors t(s, int8 ? DType::f32 : DType::bf16, tokens);
  const Tensor qx = t.memory(DType::i8, {tokens * s.top_k, s.hidden}), qs = t.memory(DType::f32, {tokens * s.top_k}),
               qh = t.memory(DType::i8, {tokens * s.top_k, s.intermediate}),
               hs = t.memory(DType::f32, {tokens * s.top_k});
  Status status = t.route(context);
  if (status.ok()) status = moe_permute(context, t.x, t.slots, s.top_k, t.expanded);
  if (status.ok() && int8) status = dynamic_quant(context, t.expanded, qx, qs);
  const MoeLayerOptions options{.top_k = s.top_k,
                                .gating = {.renormalise = true},
                                .activations = int8 ? ActivationType::int8 : ActivationType::exact};
  const MoeLayerInputs in{
      .x = t.x, .logits = t.logits, .experts = {.gate_up = gate_up.weight(), .down = down.weight()}};
  const std::vector<double> times = least_times(
      {[&] { return moe_layer_forward(context, in, {.out = t.out}, options); },
       [&] {
         if (int8) {
           const Status first = grouped_matmul_swiglu_quant(context, qx, qs, gate_up.weight(), t.groups(), qh, hs);
           return first.ok() ? grouped_matmul(context, qh, down.weight(), t.groups(), t.out_rows, {.x_scales = hs})
                             : first;
         }
         const Status first = grouped_matmul(context, t.expanded, gate_up.weight(), t.groups(), t.hidden,
                                             {.activation = Activation::swiglu});
         return first.ok() ? grouped_matmul(context, t.hidden, down.weight(), t.groups(), t.out_rows) : first;
       },
       [&] { return t.route(context); }},
      status);
  report(state, times, status,
         6.0 * static_cast<double>(tokens * s.top_k) * static_cast<double>(s.hidden * s.intermediate));
}

void run_backward(benchmark::State& state, const Shape& s, int64_t tokens) {
  Result<Context> created = Context::create();
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  Tensors t(s, DType::bf16, tokens);
  const int64_t rows = tokens * s.top_k;
  const Tensor gate_up = t.memory(DType::bf16, {s.experts, 2 * s.intermediate, s.hidden}),
               down = t.memory(DType::bf16, {s.experts, s.hidden, s.intermediate}),
               grad_gate_up = t.memory(DType::bf16, {s.experts, 2 * s.intermediate, s.hidden}),
               grad_down = t.memory(DType::bf16, {s.experts, s.hidden, s.intermediate}),
               gu = t.memory(DType::bf16, {rows, 2 * s.intermediate}), g = t.memory(DType::bf16, {tokens, s.hidden});
  Status status = t.route(context);
  if (status.ok()) status = moe_permute(context, t.x, t.slots, s.top_k, t.expanded);
  const MoeLayerInputs in{.x = t.x, .logits = t.logits, .experts = {.gate_up = gate_up, .down = down}};
  const MoeLayerOptions options{.top_k = s.top_k, .gating = {.renormalise = true}};
  const std::vector<double> times = least_times(
      {[&] {
         return moe_layer_backward(context, g, in, {.x = t.out, .gate_up = grad_gate_up, .down = grad_down}, options);
       },
       [&] {
         Status all = grouped_matmul(context, t.expanded, gate_up, t.groups(), gu);
         if (all.ok()) {
           all = grouped_matmul_backward(context, t.out_rows, t.hidden, {}, t.groups(), {.weight = grad_down});
         }
         const Tensor dh = gu.narrowed(1, 0, s.intermediate);
         if (all.ok()) all = grouped_matmul_backward(context, t.out_rows, {}, down, t.groups(), {.x = dh});
         if (all.ok()) {
           all = grouped_matmul_backward(context, gu, t.expanded, gate_up, t.groups(),
                                         {.x = t.out_rows, .weight = grad_gate_up});
         }
         return all;
       },
       [&] { return t.route(context); }},
      status);
  report(state, times, status, 16.0 * static_cast<double>(rows) * static_cast<double>(s.hidden * s.intermediate));
}

void run_swiglu_quant(benchmark::State& state, const Shape& s, int64_t tokens) {
  Result<Context> created = Context::create();
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  const Stack gate_up(context, Kind::int8, s.experts, 2 * s.intermediate, s.hidden);
  Tensors t(s, DType::f32, tokens);
  const int64_t rows = tokens * s.top_k;
  const Tensor x = t.memory(DType::i8, {rows, s.hidden}), x_scales = t.memory(DType::f32, {rows}),
               both = t.memory(DType::f32, {rows, 2 * s.intermediate}),
               out = t.memory(DType::i8, {rows, s.intermediate}), out_scales = t.memory(DType::f32, {rows});
  Status status = t.route(context);
  if (status.ok()) status = moe_permute(context, t.x, t.slots, s.top_k, t.expanded);
  if (status.ok()) status = dynamic_quant(context, t.expanded, x, x_scales);
  const std::vector<double> times = least_times(
      {[&] { return grouped_matmul_swiglu_quant(context, x, x_scales, gate_up.weight(), t.groups(), out, out_scales); },
       [&] {
         Status all = grouped_matmul(context, x, gate_up.weight(), t.groups(), both, {.x_scales = x_scales});
         if (all.ok()) all = swiglu(context, both, t.hidden);
         return all.ok() ? dynamic_quant(context, t.hidden, out, out_scales) : all;
       }},
      status);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());
  for (auto _ : state) state.SetIterationTime(times[0]);
  state.counters["unfused"] = times[1] / times[0];
}

void run_gradient(benchmark::State& state, DType type, int64_t n, int64_t rows_each, bool of_weight) {
  constexpr int64_t kExperts = 16, kK = 2048;
  Result<Context> created = Context::create();
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  Memory memory;
  const int64_t rows = kExperts * rows_each;
  const Tensor x = memory(type, {rows, kK}), weight = memory(type, {kExperts, n, kK}), g = memory(type, {rows, n}),
               grad_x = memory(type, {rows, kK}), grad_weight = memory(type, {kExperts, n, kK});
  std::vector<int64_t> counts(kExperts, rows_each);
  const GroupList groups{ConstTensor::contiguous(DType::i64, {kExperts}, counts.data()), GroupListType::counts};
  const MatmulGradients gradients = of_weight ? MatmulGradients{.weight = grad_weight} : MatmulGradients{.x = grad_x};
  Status status;
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(kK);
  const test::Fraction f = test::measure_fraction(context, test::peak_kind(type), flops, [&] {
    status = grouped_matmul_backward(context, g, of_weight ? x : ConstTensor(), of_weight ? ConstTensor() : weight,
                                     groups, gradients);
  });
  if (!status.ok()) return state.SkipWithError(status.message().c_str());
  for (auto _ : state) state.SetIterationTime(f.call_seconds);
  test::report(state, f);
}

void register_gradients() {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const int64_t n : {int64_t{1024}, int64_t{4096}}) {
      for (const int64_t rows : {int64_t{64}, int64_t{128}, int64_t{512}}) {
        for (const bool of_weight : {false, true}) {
          const std::string name = std::string("gradients/") + to_string(type) + "/n" + std::to_string(n) + "/rows" +
                                   std::to_string(rows) + (of_weight ? "/weight" : "/x");
          test::register_bench(name, [=](benchmark::State& s) { run_gradient(s, type, n, rows, of_weight); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  for (const opst::Shape& shape : opst::kShapes) {
    for (const int64_t tokens : {int64_t{1}, int64_t{16}, int64_t{256}, int64_t{2048}}) {
      for (const opst::Kind kind : {opst::Kind::bf16, opst::Kind::q4_k, opst::Kind::int8}) {
        const std::string name = std::string("layer/") + shape.name + "/" + opst::kNames[static_cast<int>(kind)] +
                                 "/T" + std::to_string(tokens);
        opst::test::register_bench(name, [=, &shape](benchmark::State& s) { opst::run_layer(s, shape, kind, tokens); });
      }
      if (tokens < 256) continue;
      opst::test::register_bench(std::string("swiglu_quant/") + shape.name + "/T" + std::to_string(tokens),
                                 [=, &shape](benchmark::State& s) { opst::run_swiglu_quant(s, shape, tokens); });
      opst::test::register_bench(std::string("backward/") + shape.name + "/bf16/T" + std::to_string(tokens),
                                 [=, &shape](benchmark::State& s) { opst::run_backward(s, shape, tokens); });
    }
  }
  opst::register_gradients();
  return opst::test::run_benches(argc, argv);
}
