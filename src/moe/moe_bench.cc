// What surrounds the products of the experts, beside them: 64K tokens and 4096, 8 of 128 experts, rows of 2048 features,
// on one thread.
//
//   of_layer  time of the call over the time that the layer's products (gate, up and down, 768 wide) take at the
//             machine's peak for the dtype, measured by bursts of multiply-adds around each call (testing/peak.h)
//   ns/token
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "opst/moe.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

constexpr int64_t kTopK = 8, kExperts = 128, kFeatures = 2048, kHidden = 768;

// The tensors of a layer's way there and back, routed.
struct Layer {
  DType dtype;
  int64_t tokens;
  std::vector<Buffer> memory;
  test::Random random{1};
  Tensor logits, grad, bias, ids, weights, grad_weights, rows, slots, counts, x, expanded, out;

  Tensor tensor(DType type, std::initializer_list<int64_t> shape) {
    const int64_t elements = Tensor::contiguous(type, shape, nullptr).num_elements();
    memory.push_back(std::move(Buffer::allocate(elements * size_bytes(type)).value()));
    const Tensor t = memory.back().tensor(type, shape);
    test::fill(t, test::Fill::normal, random);
    return t;
  }
  Layer(DType type, int64_t count, bool has_rows)
      : dtype(type),
        tokens(count),
        logits(tensor(DType::f32, {tokens, kExperts})),
        grad(tensor(DType::f32, {tokens, kExperts})),
        bias(tensor(DType::f32, {kExperts})),
        ids(tensor(DType::i32, {tokens, kTopK})),
        weights(tensor(DType::f32, {tokens, kTopK})),
        grad_weights(tensor(DType::f32, {tokens, kTopK})),
        rows(tensor(DType::i32, {tokens, kTopK})),
        slots(tensor(DType::i32, {tokens * kTopK})),
        counts(tensor(DType::i64, {kExperts})),
        x(tensor(dtype, {has_rows ? tokens : 0, kFeatures})),
        expanded(tensor(dtype, {has_rows ? tokens * kTopK : 0, kFeatures})),
        out(tensor(dtype, {has_rows ? tokens : 0, kFeatures})) {}
  Status prepare(Context& context) const {
    Status s = moe_gating(context, {.logits = logits}, {ids, weights}, {.renormalise = true});
    if (s.ok()) s = moe_routing(context, ids, kExperts, {rows, slots, counts});
    return s;
  }
};

struct Operation {
  const char* name;
  bool has_rows;  // reads or writes rows of features
  std::function<Status(Context&, const Layer&)> call;
};
const std::vector<Operation>& operations() {
  static const std::vector<Operation> kOperations = {
      {"gating/softmax_renormalised", false,
       [](Context& c, const Layer& l) {
         return moe_gating(c, {.logits = l.logits}, {l.ids, l.weights}, {.renormalise = true});
       }},
      {"gating/softmax", false,
       [](Context& c, const Layer& l) {
         return moe_gating(c, {.logits = l.logits}, {l.ids, l.weights});
       }},
      {"gating/sigmoid_bias_groups", false,
       [](Context& c, const Layer& l) {
         return moe_gating(c, {.logits = l.logits, .bias = l.bias}, {l.ids, l.weights},
                           {.scores = GateScores::sigmoid,
                            .renormalise = true,
                            .num_groups = 8,
                            .kept_groups = 4,
                            .group_score = GroupScore::top2_sum});
       }},
      {"gating_backward", false,
       [](Context& c, const Layer& l) {
         return moe_gating_backward(c, {l.logits, l.ids, l.weights}, l.grad, {.renormalise = true});
       }},
      {"routing", false,
       [](Context& c, const Layer& l) {
         return moe_routing(c, l.ids, kExperts, {l.rows, l.slots, l.counts});
       }},
      {"permute", true, [](Context& c, const Layer& l) { return moe_permute(c, l.x, l.slots, kTopK, l.expanded); }},
      {"finalize", true,
       [](Context& c, const Layer& l) {
         return moe_finalize(c, {.expanded = l.expanded, .row_of_slot = l.rows, .topk_weights = l.weights}, l.out);
       }},
      {"finalize_backward", true,
       [](Context& c, const Layer& l) {
         return moe_finalize_backward(c, l.x,
                                      {.expanded = l.expanded, .row_of_slot = l.rows, .topk_weights = l.weights},
                                      {.topk_weights = l.grad_weights});
       }},
  };
  return kOperations;
}

void run(benchmark::State& state, const Operation& operation, DType dtype, int64_t tokens) {
  Result<Context> created = Context::create({.num_threads = 1});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  const Layer layer(dtype, tokens, operation.has_rows);
  Status status = layer.prepare(context);
  const double flops = 2.0 * 3 * static_cast<double>(tokens * kTopK) * static_cast<double>(kFeatures * kHidden);
  for (auto _ : state) {
    const test::Fraction f = test::measure_fraction(context, test::peak_kind(dtype), flops, [&] {
      if (status.ok()) status = operation.call(context, layer);
    });
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(f.call_seconds);
    state.counters["of_layer"] = 1 / f.fraction;
    state.counters["ns/token"] = f.call_seconds * 1e9 / static_cast<double>(tokens);
    state.counters["valid"] = f.valid;
  }
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::DType;
  for (const opst::Operation& operation : opst::operations()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t tokens : {int64_t{4096}, int64_t{65536}}) {
        if (operation.has_rows && tokens > 4096) continue;  // gigabytes
        const std::string name =
            std::string("moe/") + operation.name + "/" + to_string(dtype) + "/" + std::to_string(tokens);
        opst::test::register_bench(
            name, [=, &operation](benchmark::State& state) { opst::run(state, operation, dtype, tokens); });
      }
    }
  }
  return opst::test::run_benches(argc, argv);
}
