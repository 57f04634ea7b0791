// libFuzzer target of graphs: builds a graph out of random calls, right and wrong ones, binds and runs it.
//
//   refused    no byte of an output is written
//   accepted   the values of the same graph on contiguous copies at the generic level on one thread, where every result
//              is an output, so that nothing shares memory and nothing is written in place
#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opst/graph.h"
#include "testing/fuzz_call.h"

namespace opst::test {
namespace {

constexpr int64_t kWidth = 16, kRows = 9, kHeads = 2;

// What a graph may be bound to, beside the drawn operands.
struct Weights {
  PackedWeight square, wide;  // [16, 16], [32, 16]
  Status status;

  explicit Weights(Context& context) {
    std::vector<float> numbers(2 * kWidth * kWidth);
    Random random(1);
    const Tensor all = Tensor::contiguous(DType::f32, {2 * kWidth, kWidth}, numbers.data());
    fill(all, Fill::normal, random);
    for (float& x : numbers) x *= 0.25f;
    Result<PackedWeight> a = PackedWeight::pack(context, all.narrowed(0, 0, kWidth));
    Result<PackedWeight> b = PackedWeight::pack(context, all);
    status = a.ok() ? b.status() : a.status();
    if (!status.ok()) return;
    square = std::move(a.value()), wide = std::move(b.value());
  }
};

// One graph out of the choices; the same choices build the same graph.
class Builder {
 public:
  Builder(Choices choose, Graph& graph) : c_(choose), g_(graph) {}

  void build() {
    rows_ = c_.rarely(4) ? Dim(kRows) : g_.dim("rows", c_.rarely(32) ? c_.size(kRows) : kRows);
    for (const char* name : {"x0", "x1"}) add(g_.input(name, DType::f32, {rows_, kWidth}));
    while (x_.size() < 2) x_.emplace_back();  // refused: calls with no value follow
    norm_ = g_.input("norm", DType::f32, {kWidth});
    square_ = g_.weight("square", kWidth, kWidth);
    wide_ = g_.weight("wide", 2 * kWidth, kWidth);
    for (int64_t n = c_.integer(1, 14); n > 0; --n) add_node(static_cast<int>(n));
    last_ = results_.empty() ? x_[0] : results_.back();
    second_ = results_.empty() ? x_[1] : results_[static_cast<size_t>(c_.byte()) % results_.size()];
  }

  Dim rows() const { return rows_; }
  Value last() const { return last_; }
  Value second() const { return second_; }
  // [rows, 16] each; those that are views can be no outputs.
  const std::vector<Value>& results() const { return results_; }
  bool is_view(Value v) const { return std::find(views_.begin(), views_.end(), v) != views_.end(); }

 private:
  void add(Value v) {
    if (v.exists()) x_.push_back(v);
  }
  void result(Value v) {
    add(v);
    if (v.exists() && g_.shape(v).rank == 2 && g_.shape(v).dims[1] == Dim(kWidth)) results_.push_back(v);
  }
  // Mostly one that fits: [rows, 16].
  Value any() {
    if (c_.rarely(100)) return c_.coin() ? Value() : norm_;
    if (c_.rarely(20) || results_.empty()) return x_[c_.byte() % x_.size()];
    return results_[results_.size() - 1 - c_.byte() % std::min<size_t>(results_.size(), 3)];
  }
  // Appended to, not added up: g++ 12 warns without reason of "n" + std::to_string(n) (-Wrestrict).
  std::string name(int n) { return c_.rarely(200) ? std::string() : std::string("n").append(std::to_string(n)); }

  void add_node(int n) {
    switch (c_.byte() % 11) {
      case 0:
        return result(
            g_.matmul(name(n), any(), square_, {.activation = c_.pick({Activation::none, Activation::silu})}));
      case 1:
        return result(g_.matmul(name(n), any(), square_, {.residual = any()}));
      case 2:
        return result(g_.matmul(name(n), any(), wide_, {.activation = Activation::swiglu}));
      case 3: {
        const Value both = g_.matmul(name(n), any(), wide_);
        add(both);
        return result(g_.swiglu(name(n).append("s"), both, SwigluOptions{c_.coin()}));
      }
      case 4:
        return result(g_.rms_norm(name(n), any(), c_.rarely(50) ? square_ : norm_));
      case 5: {
        const Graph::NormedSum sum = g_.add_rms_norm(name(n), any(), any(), norm_);
        result(sum.sum);
        return result(sum.out);
      }
      case 6:
        return result(g_.softmax(name(n), any()));
      case 7:
        return result(g_.add(name(n), any(), any()));
      case 8:
        return result(g_.swiglu(name(n), any(), any()));
      case 9: {
        const Value both = g_.matmul(name(n), any(), wide_);
        const int64_t first = c_.rarely(30) ? c_.size(40) : c_.pick<int64_t>({0, 5, kWidth});
        return add(g_.columns(both, first, {rows_, kWidth / kHeads, kHeads}));
      }
      default: {
        const auto heads = [&] { return g_.view(any(), {rows_, kHeads, c_.rarely(50) ? 3 : kWidth / kHeads}); };
        const Value attended = g_.attention(name(n), heads(), heads(), heads(), {.causal = c_.coin()});
        const Value flat = g_.view(attended, {rows_, kWidth});
        if (flat.exists()) views_.push_back(flat);
        return result(flat);
      }
    }
  }

  Choices c_;
  Graph& g_;
  Dim rows_;
  std::vector<Value> x_, results_, views_;
  Value norm_, square_, wide_, last_, second_;
};

// The operands: x0, x1, norm, and two outputs. `apart`: every result has memory of its own.
Status build_and_run(Context& context, const Views& v, const Choices& choose, int64_t rows, bool apart) {
  const Weights weights(context);
  if (!weights.status.ok()) return weights.status;
  Result<Graph> made = Graph::create("g");
  if (!made.ok()) return made.status();
  Graph& graph = made.value();
  Builder builder(choose, graph);
  builder.build();
  graph.output("y", builder.last());
  const bool two = builder.second() != builder.last();
  if (two) graph.output("z", builder.second());
  std::vector<Buffer> buffers;
  std::vector<Value> others;
  if (apart) {
    for (const Value r : builder.results()) {
      if (r == builder.last() || r == builder.second() || builder.is_view(r)) continue;
      if (std::find(others.begin(), others.end(), r) != others.end()) continue;
      others.push_back(r);
      graph.output(std::string("other").append(std::to_string(others.size())), r);
    }
  }
  Status status = graph.setup(context.machine());
  const auto bind = [&](auto value, const auto& to) {
    if (status.ok()) status = graph.bind(value, to);
  };
  bind("x0", ConstTensor(v[0]));
  bind("x1", ConstTensor(v[1]));
  if (graph.find("norm").exists()) bind("norm", ConstTensor(v[2]));
  bind("square", weights.square);
  bind("wide", weights.wide);
  bind("y", v[3]);
  if (two) bind("z", v[4]);
  for (const Value other : others) {
    Result<Buffer> buffer = Buffer::allocate(kRows * kWidth * 4);
    if (!buffer.ok()) return buffer.status();
    buffers.push_back(std::move(buffer.value()));
    bind(other, buffers.back().tensor(DType::f32, {kRows, kWidth}));
  }
  if (status.ok()) status = graph.set(builder.rows(), rows);
  if (!status.ok() && rows == kRows && builder.rows() == Dim(kRows)) status = {};  // a number is not set
  if (!status.ok()) return status;
  return graph.execute(context);
}

}  // namespace

bool fuzz_graph(const uint8_t* data, size_t size, PlantedFault fault) {
  Choices choose(data, size);
  Operands operands(choose);
  operands.input(DType::f32, {kRows, kWidth});
  operands.input(DType::f32, {kRows, kWidth});
  operands.input(DType::f32, {kWidth});
  operands.contiguous_output(DType::f32, {kRows, kWidth});
  operands.contiguous_output(DType::f32, {kRows, kWidth});
  const int64_t rows = choose.rarely(16) ? choose.size(0) : choose.integer(1, kRows);
  const Choices rest = choose;
  const auto run = [=](bool apart) {
    return [=](Context& context, const Views& v) { return build_and_run(context, v, rest, rows, apart); };
  };
  // Norms of a chain of nodes may enlarge a difference of the last bit.
  return answers({.call = run(false), .tolerance = 1e-2, .plain = run(true)}, operands, fault);
}

}  // namespace opst::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  opst::test::fuzz_graph(data, size, opst::test::PlantedFault::none);
  return 0;
}
