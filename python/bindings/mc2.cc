// Ranks and the operators between them. An operator takes its arguments by name (given.h), and waits and computes
// without the interpreter's lock: ranks may be threads of one process.
#include "opst/mc2.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "given.h"
#include "opst/expert_parallel.h"
#include "opst/sequence_parallel.h"

namespace opst::python {

namespace {

// A communicator in Python: a call holds it, so that close() meanwhile ends it behind the call.
struct Rank {
  std::shared_ptr<Communicator> held;

  std::shared_ptr<Communicator> get() const {
    if (held == nullptr) raise(PyExc_ValueError, "the communicator is closed");
    return held;
  }
};

std::vector<int64_t> sizes(const Given& options, const char* name) {
  return options.option<std::vector<int64_t>>(name);
}
ActivationType activations(const Given& options) {
  return options.option<bool>("int8_activations") ? ActivationType::int8 : ActivationType::exact;
}

// ---- Operators: of a context and a rank, what they read, options, what they write

using Operator = void(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out);
using Product = Status(Context&, Communicator&, const ConstTensor&, const GroupedWeight&, const Tensor&,
                       const Mc2Options&);

template <Product& product>
void product_of_ranks(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> rows = sizes(o, "rows"), inputs = sizes(o, "inputs");
  const Mc2Options options = {.bias = in.input("bias"),
                              .x_scales = in.input("x_scales"),
                              .residual = in.input("residual"),
                              .activations = activations(o),
                              .rows = rows,
                              .inputs = inputs,
                              .exchanged = out.output("exchanged"),
                              .tile_rows = o.option<int64_t>("tile_rows")};
  run([&, x = in.input("x"), weights = in.weight("weights"), y = out.output("out")] {
    return product(context, ranks, x, weights, y, options);
  });
}

using Exchange = Status(Context&, Communicator&, const ConstTensor&, const Tensor&, const HeadShardOptions&);
template <Exchange& exchange>
void exchange_of_heads(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> rows = sizes(o, "rows"), heads = sizes(o, "heads");
  const HeadShardOptions options = {.rows = rows, .heads = heads, .tile_rows = o.option<int64_t>("tile_rows")};
  run([&, x = in.input("x"), y = out.output("out")] { return exchange(context, ranks, x, y, options); });
}

RingAttentionOptions ring_options(const Given& o, const std::vector<int64_t>& rows) {
  const auto order = o.option<std::string>("order");
  if (order != "contiguous" && order != "zigzag") {
    raise(PyExc_ValueError, "order is \"" + order + "\", must be one of contiguous, zigzag");
  }
  return {.softmax_scale = o.option<std::optional<double>>("softmax_scale"),
          .causal = o.option<bool>("causal"),
          .window_left = o.option<std::optional<int64_t>>("window_left").value_or(kUnbounded),
          .window_right = o.option<std::optional<int64_t>>("window_right").value_or(kUnbounded),
          .softcap = o.option<double>("softcap"),
          .order = order == "zigzag" ? SequenceOrder::zigzag : SequenceOrder::contiguous,
          .rows = rows,
          .tile_rows = o.option<int64_t>("tile_rows")};
}
RingAttentionInputs ring_inputs(const Given& in) { return {in.input("query"), in.input("key"), in.input("value")}; }

void ring_forward(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> rows = sizes(o, "rows");
  const AttentionOutputs outputs = {.out = out.output("out"), .softmax_lse = out.output("softmax_lse")};
  run([&, inputs = ring_inputs(in), options = ring_options(o, rows)] {
    return ring_attention_forward(context, ranks, inputs, outputs, options);
  });
}
void ring_backward(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> rows = sizes(o, "rows");
  const AttentionSaved saved = {
      .out = in.input("attention_out"), .softmax_lse = in.input("softmax_lse"), .grad_out = in.input("grad_out")};
  const AttentionGradients gradients = {.grad_query = out.output("grad_query"),
                                        .grad_key = out.output("grad_key"),
                                        .grad_value = out.output("grad_value")};
  run([&, inputs = ring_inputs(in), options = ring_options(o, rows)] {
    return ring_attention_backward(context, ranks, inputs, saved, gradients, options);
  });
}

// ---- Experts

MoeDispatchOutputs dispatched(const Given& out) {
  return {out.output("rows"), out.output("expert_tokens"), out.output("rank_tokens")};
}
MoeCombineInputs combined(const Given& in) {
  return {in.input("rows"), in.input("topk_ids"), in.input("topk_weights"), in.input("residual")};
}

void dispatch(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> experts = sizes(o, "experts");
  const ExpertShardOptions options = {experts, o.option<int64_t>("tile_rows")};
  run([&, x = in.input("x"), ids = in.input("topk_ids"), num_experts = o.option<int64_t>("num_experts"),
       outputs = dispatched(out)] { return moe_dispatch(context, ranks, x, ids, num_experts, outputs, options); });
}
void combine(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> experts = sizes(o, "experts");
  const ExpertShardOptions options = {experts, o.option<int64_t>("tile_rows")};
  run([&, inputs = combined(in), num_experts = o.option<int64_t>("num_experts"), y = out.output("out")] {
    return moe_combine(context, ranks, inputs, num_experts, y, options);
  });
}

using Grouped = Status(Context&, Communicator&, const ConstTensor&, const ConstTensor&, const GroupedWeight&,
                       const Tensor&, const GroupedExchangeOptions&);
template <Grouped& product>
void grouped_of_ranks(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> experts = sizes(o, "experts");
  const GroupedExchangeOptions options = {.shards = {experts, o.option<int64_t>("tile_rows")},
                                          .bias = in.input("bias"),
                                          .activation = parse_activation(o.option<std::string>("activation")),
                                          .activations = activations(o),
                                          .x_scales = in.input("x_scales"),
                                          .exchanged = out.output("exchanged")};
  run([&, x = in.input("x"), counts = in.input("send_counts"), weight = in.weight("weight"), y = out.output("out")] {
    return product(context, ranks, x, counts, weight, y, options);
  });
}

void layer(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> experts = sizes(o, "experts");
  const ExpertShardOptions shards = {experts, o.option<int64_t>("tile_rows")};
  const MoeLayerOutputs outputs = {.out = out.output("out"), .expert_tokens = out.output("expert_tokens")};
  run([&, inputs = layer_inputs(in), options = layer_options(o)] {
    return moe_layer_forward(context, ranks, inputs, outputs, options, shards);
  });
}

AttentionFfnOptions kinds_of_ranks(const Given& o, const std::vector<int64_t>& experts) {
  return {.attention_ranks = static_cast<int>(o.option<int32_t>("attention_ranks")),
          .num_experts = o.option<int64_t>("num_experts"),
          .experts = experts,
          .tile_rows = o.option<int64_t>("tile_rows")};
}
void to_ffn(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> experts = sizes(o, "experts");
  const AttentionToFfnInputs inputs = {in.input("x"), in.input("topk_ids"), in.weight("weight"), in.input("bias")};
  run([&, outputs = dispatched(out), options = kinds_of_ranks(o, experts)] {
    return attention_to_ffn(context, ranks, inputs, outputs, options);
  });
}
void to_attention(Context& context, Communicator& ranks, const Given& in, const Given& o, const Given& out) {
  const std::vector<int64_t> experts = sizes(o, "experts");
  const FfnToAttentionInputs inputs = {combined(in), in.weight("weight"), in.input("bias")};
  run([&, y = out.output("out"), options = kinds_of_ranks(o, experts)] {
    return ffn_to_attention(context, ranks, inputs, y, options);
  });
}

void bind_operator(nb::module_& module, const char* name, Operator* call) {
  using nb::arg;
  module.def(
      name,
      [call](Context& context, const Rank& rank, const nb::dict& inputs, const nb::dict& options,
             const nb::dict& outputs) {
        const std::shared_ptr<Communicator> ranks = rank.get();
        call(context, *ranks, Given(inputs), Given(options), Given(outputs));
      },
      arg("context"), arg("communicator"), arg("inputs"), arg("options"), arg("outputs"));
}

// ---- Ranks

nb::dict stats_of(const CommunicatorStats& stats) {
  nb::dict found;
  found["calls"] = stats.calls;
  found["tiles_sent"] = stats.tiles_sent;
  found["bytes_sent"] = stats.bytes_sent;
  found["direct_tiles"] = stats.direct_tiles;
  found["tile_bytes"] = stats.tile_bytes;
  found["peak_staging_bytes"] = stats.peak_staging_bytes;
  return found;
}
nb::dict options_of(const CommunicatorOptions& options) {
  nb::dict found;
  found["timeout_seconds"] = options.timeout_seconds;
  found["staging_bytes"] = options.staging_bytes;
  found["shared_bytes"] = options.shared_bytes;
  found["direct_stores"] = options.direct_stores;
  return found;
}

// Bytes that other ranks can store into; the array holds the rank whose memory they are.
nb::ndarray<nb::numpy, uint8_t> shared_bytes(const Rank& rank, int64_t size_bytes) {
  auto* const holder = new std::shared_ptr<Communicator>(rank.get());
  const nb::capsule owner(holder, [](void* p) noexcept { delete static_cast<std::shared_ptr<Communicator>*>(p); });
  void* const data = value_or_raise((*holder)->allocate_shared(size_bytes));
  const size_t shape[] = {static_cast<size_t>(size_bytes)};
  return {data, 1, shape, owner};
}

void bind_ranks(nb::module_& module) {
  using nb::arg;
  nb::class_<Rank>(module, "Communicator", "One rank's place among the ranks that call the operators of mc2 together.")
      .def_prop_ro("rank", [](const Rank& r) { return r.get()->rank(); })
      .def_prop_ro("world_size", [](const Rank& r) { return r.get()->world_size(); })
      .def_prop_ro("options", [](const Rank& r) { return options_of(r.get()->options()); })
      .def_prop_ro(
          "status",
          [](const Rank& r) -> std::optional<std::string> {
            const Status status = r.get()->status();
            return status.ok() ? std::nullopt : std::optional(status.message());
          },
          "None while the communicator is sound; else the message of the call that failed.")
      .def_prop_ro("closed", [](const Rank& r) { return r.held == nullptr; })
      .def(
          "stats", [](const Rank& r) { return stats_of(r.get()->stats()); },
          "Counts since the communicator was made, and bytes of the last call's tiles.")
      .def("shared_bytes", &shared_bytes, arg("size_bytes"))
      .def(
          "close", [](Rank& r) { r.held.reset(); }, "Tells the other ranks that this one is gone.")
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](Rank& r, const nb::args&) { r.held.reset(); })
      .def("__repr__", [](const Rank& r) {
        if (r.held == nullptr) return std::string("Communicator(closed)");
        return "Communicator(rank " + std::to_string(r.held->rank()) + " of " + std::to_string(r.held->world_size()) +
               (r.held->status().ok() ? ")" : ", failed: " + r.held->status().message() + ")");
      });
  nb::class_<RankMemory>(module, "RankMemory", "Memory that ranks share which are processes of one machine.")
      .def_prop_ro("ticket", &RankMemory::ticket);
  module.def(
      "rank_memory",
      [](int world_size, int64_t staging_bytes, int64_t shared_bytes) {
        return value_or_raise(
            RankMemory::create(world_size, {.staging_bytes = staging_bytes, .shared_bytes = shared_bytes}));
      },
      arg("world_size"), arg("staging_bytes"), arg("shared_bytes"));
  module.def(
      "join_ranks",
      [](const std::string& ticket, int rank, double timeout_seconds, bool direct_stores) {
        return Rank{std::make_shared<Communicator>(value_or_raise(
            Communicator::join(ticket, rank, {.timeout_seconds = timeout_seconds, .direct_stores = direct_stores})))};
      },
      arg("ticket"), arg("rank"), arg("timeout_seconds"), arg("direct_stores"));
  module.def(
      "thread_ranks",
      [](int world_size, double timeout_seconds, int64_t staging_bytes, bool direct_stores) {
        const CommunicatorOptions options = {
            .timeout_seconds = timeout_seconds, .staging_bytes = staging_bytes, .direct_stores = direct_stores};
        std::vector<Rank> ranks;
        for (Communicator& one : value_or_raise(Communicator::create_threads(world_size, options))) {
          ranks.push_back({std::make_shared<Communicator>(std::move(one))});
        }
        return ranks;
      },
      arg("world_size"), arg("timeout_seconds"), arg("staging_bytes"), arg("direct_stores"));
}

void bind_parts(nb::module_& module) {
  using nb::arg;
  const auto count = [](const PackedParts& p) {
    return std::visit([](const auto& parts) { return parts.size(); }, p.parts);
  };
  nb::class_<PackedParts>(module, "PackedParts", "Weights of several ranks: what mc2.pack_columns gives.")
      .def("__len__", count)
      .def("n", [count](const PackedParts& p, size_t index) {
        if (index >= count(p)) raise(PyExc_IndexError, "there is no part " + std::to_string(index));
        return std::visit([&](const auto& parts) { return parts[index].n(); }, p.parts);
      });
  module.def(
      "pack_each",
      [](Context& context, const std::vector<View>& weights) {
        std::vector<PackedWeight> parts;
        for (const View& weight : weights) parts.push_back(value_or_raise(PackedWeight::pack(context, weight.input())));
        return PackedParts{std::move(parts)};
      },
      arg("context"), arg("weights"));
  module.def(
      "pack_columns",
      [](Context& context, const View& weight, int parts) {
        return PackedParts{value_or_raise(pack_columns(context, weight.input(), parts))};
      },
      arg("context"), arg("weight"), arg("parts"));
  module.def(
      "pack_columns_blocks",
      [](Context& context, const View& bytes, const std::string& format, int64_t rows, int64_t cols, int parts) {
        return PackedParts{value_or_raise(pack_columns(context, quant_matrix(bytes, format, rows, cols), parts))};
      },
      arg("context"), arg("bytes"), arg("format"), arg("rows"), arg("cols"), arg("parts"));
  module.def(
      "pack_columns_int",
      [](Context& context, const View& q, const View& scales, const View* zeros, int parts) {
        return PackedParts{value_or_raise(pack_columns(context, int_matrix(q, scales, zeros), parts))};
      },
      arg("context"), arg("q"), arg("scales"), arg("zeros").none(), arg("parts"));
  module.def("share_of", &share_of, arg("n"), arg("parts"), arg("index"));
}

}  // namespace

void bind_mc2(nb::module_& module) {
  bind_ranks(module);
  bind_parts(module);
  bind_operator(module, "matmul_all_to_all", product_of_ranks<matmul_all_to_all>);
  bind_operator(module, "all_to_all_matmul", product_of_ranks<all_to_all_matmul>);
  bind_operator(module, "all_gather_matmul", product_of_ranks<all_gather_matmul>);
  bind_operator(module, "matmul_reduce_scatter", product_of_ranks<matmul_reduce_scatter>);
  bind_operator(module, "matmul_all_reduce", product_of_ranks<matmul_all_reduce>);
  bind_operator(module, "sequence_to_heads", exchange_of_heads<sequence_to_heads>);
  bind_operator(module, "heads_to_sequence", exchange_of_heads<heads_to_sequence>);
  bind_operator(module, "ring_attention_forward", ring_forward);
  bind_operator(module, "ring_attention_backward", ring_backward);
  bind_operator(module, "moe_dispatch", dispatch);
  bind_operator(module, "moe_combine", combine);
  bind_operator(module, "all_to_allv_grouped_matmul", grouped_of_ranks<all_to_allv_grouped_matmul>);
  bind_operator(module, "grouped_matmul_all_to_allv", grouped_of_ranks<grouped_matmul_all_to_allv>);
  bind_operator(module, "moe_layer_of_ranks", layer);
  bind_operator(module, "attention_to_ffn", to_ffn);
  bind_operator(module, "ffn_to_attention", to_attention);
}

}  // namespace opst::python
