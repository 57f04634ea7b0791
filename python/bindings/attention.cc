#include "opst/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <type_traits>

#include "opst/attention_backward.h"
#include "opst/lightning_indexer.h"
#include "view.h"

namespace opst::python {

namespace {

// Inputs and options of one call; forward, backward and plan read the same ones.
struct AttentionCall {
  AttentionCall(const View& query, const View& key, const View& value) : kept{query, key, value} {
    inputs.query = query.input();
    inputs.key = key.input();
    inputs.value = value.input();
  }

  AttentionInputs inputs;
  AttentionOptions options;
  std::vector<View> kept;  // whose memory the inputs are
};

template <class T>
T parse(const std::string& text, const char* name, std::initializer_list<std::pair<const char*, T>> words) {
  std::string known;
  for (const auto& [word, meaning] : words) {
    if (text == word) return meaning;
    known += (known.empty() ? "" : ", ") + std::string(word);
  }
  raise(PyExc_ValueError, std::string(name) + " is \"" + text + "\", must be one of " + known);
}

// The tensor that a member of AttentionInputs, or of its block mask or its lists, names.
template <auto kField, class Inputs>
auto& tensor_of(Inputs& inputs) {
  if constexpr (std::is_same_v<decltype(kField), ConstTensor BlockMask::*>) {
    return inputs.block_mask.*kField;
  } else if constexpr (std::is_same_v<decltype(kField), ConstTensor SparseIndices::*>) {
    return inputs.sparse_indices.*kField;
  } else {
    return inputs.*kField;
  }
}

// An optional tensor: set from a View or None.
template <auto kField>
void set_input(AttentionCall& call, nb::object view) {
  if (view.is_none()) {
    tensor_of<kField>(call.inputs) = {};
    return;
  }
  call.kept.push_back(nb::cast<const View&>(view));
  tensor_of<kField>(call.inputs) = call.kept.back().input();
}

template <auto kField>
void option(nb::class_<AttentionCall>& type, const char* name) {
  using Value = std::remove_reference_t<decltype(std::declval<AttentionOptions>().*kField)>;
  type.def_prop_rw(
      name, [](const AttentionCall& call) { return call.options.*kField; },
      [](AttentionCall& call, Value value) { call.options.*kField = value; });
}

template <auto kField>
void dropout_option(nb::class_<AttentionCall>& type, const char* name) {
  using Value = std::remove_reference_t<decltype(std::declval<DropoutOptions>().*kField)>;
  type.def_prop_rw(
      name, [](const AttentionCall& call) { return call.options.dropout.*kField; },
      [](AttentionCall& call, Value value) { call.options.dropout.*kField = value; });
}

template <auto kField>
void block_mask_size(nb::class_<AttentionCall>& type, const char* name) {
  type.def_prop_rw(
      name, [](const AttentionCall& call) { return call.inputs.block_mask.*kField; },
      [](AttentionCall& call, int64_t value) { call.inputs.block_mask.*kField = value; });
}

std::string plan(const AttentionCall& call, const Context& context) {
  return to_string(plan_attention(value_or_raise(attention_problem(call.inputs, call.options)), context.machine()));
}

// Whether torch gives the result of these tensors in the query's order of dimensions (its flash kernel does), where
// `out` has that order. Elsewhere torch's result is row after row, and nothing depends on the order of a query that is.
bool has_strides_of_torch(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, bool grouped) {
  if (q.strides[3] != 1) return false;
  bool row_major = true;
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    row_major = row_major && (out.shape[i] == 1 || out.strides[i] == stride);
    stride *= out.shape[i];
  }
  if (row_major) return true;
  return q.shape[0] == k.shape[0] && k.shape[0] == v.shape[0] && k.shape[1] == v.shape[1] &&
         (grouped || q.shape[1] == k.shape[1]) && k.strides[3] == 1 && v.strides[3] == 1;
}

// Attention without options in one step, as a short call takes no longer than the objects of the general way. Tensors
// are DLPack capsules. False, and nothing done, where the operator would refuse the call.
bool attend_plain(Context& context, nb::handle query, nb::handle key, nb::handle value, nb::handle out, bool causal,
                  std::optional<double> softmax_scale, bool grouped) {
  const std::optional<Tensor> q = tensor_of_capsule(query), k = tensor_of_capsule(key), v = tensor_of_capsule(value),
                              o = tensor_of_capsule(out);
  if (!q || !k || !v || !o || q->dtype != k->dtype || q->dtype != v->dtype) return false;
  if (q->rank != 4 || k->rank != 4 || v->rank != 4 || o->rank != 4) return false;
  if (!grouped && q->shape[1] != k->shape[1]) return false;
  if (!has_strides_of_torch(*q, *k, *v, *o, grouped)) return false;
  AttentionOptions options;
  options.softmax_scale = softmax_scale;
  options.causal = causal, options.alignment = CausalAlignment::top_left;
  Status status;
  {
    const nb::gil_scoped_release released;
    status = flash_attention_forward(context, {.query = *q, .key = *k, .value = *v}, {.out = *o}, options);
  }
  if (status.code() == StatusCode::invalid_argument) return false;
  raise_if_failed(status);
  return true;
}

void bind_indexer(nb::module_& module) {
  module.def(
      "lightning_indexer",
      [](Context& context, const View& query, const View& key, const View& weights, const View& indices,
         const View* values, const View* block_table, const View* kv_lengths, const View* query_lengths,
         const View* cu_seqlens_q, const View* cu_seqlens_k, bool causal, int64_t block_q, int64_t block_kv) {
        const LightningIndexerInputs in = {.query = query.input(),
                                           .key = key.input(),
                                           .weights = weights.input(),
                                           .block_table = input_or_empty(block_table),
                                           .kv_lengths = input_or_empty(kv_lengths),
                                           .query_lengths = input_or_empty(query_lengths),
                                           .cu_seqlens_q = input_or_empty(cu_seqlens_q),
                                           .cu_seqlens_k = input_or_empty(cu_seqlens_k)};
        const LightningIndexerOutputs out = {.indices = indices.output("indices"),
                                             .values = output_or_empty(values, "values")};
        const LightningIndexerOptions options = {.causal = causal, .block_q = block_q, .block_kv = block_kv};
        run([&] { return lightning_indexer(context, in, out, options); });
      },
      nb::arg("context"), nb::arg("query"), nb::arg("key"), nb::arg("weights"), nb::arg("indices"),
      nb::arg("values").none(), nb::arg("block_table").none(), nb::arg("kv_lengths").none(),
      nb::arg("query_lengths").none(), nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_k").none(),
      nb::arg("causal"), nb::arg("block_q"), nb::arg("block_kv"));
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<AttentionCall> type(module, "AttentionCall", "Inputs and options of attention (opst/attention.h).");
  type.def(nb::init<const View&, const View&, const View&>(), nb::arg("query"), nb::arg("key"), nb::arg("value"));

  const auto input = [&]<auto kField>(const char* name) {
    type.def_prop_rw(
        name, [](const AttentionCall& call) { return tensor_of<kField>(call.inputs).data != nullptr; },
        &set_input<kField>, nb::for_setter(nb::arg("view").none()));
  };
  input.operator()<&AttentionInputs::block_table>("block_table");
  input.operator()<&AttentionInputs::kv_lengths>("kv_lengths");
  input.operator()<&AttentionInputs::key_scales>("key_scales");
  input.operator()<&AttentionInputs::value_scales>("value_scales");
  input.operator()<&AttentionInputs::key_offsets>("key_offsets");
  input.operator()<&AttentionInputs::value_offsets>("value_offsets");
  input.operator()<&AttentionInputs::cu_seqlens_q>("cu_seqlens_q");
  input.operator()<&AttentionInputs::cu_seqlens_k>("cu_seqlens_k");
  input.operator()<&AttentionInputs::prefix>("prefix");
  input.operator()<&AttentionInputs::mask>("mask");
  input.operator()<&AttentionInputs::bias>("bias");
  input.operator()<&AttentionInputs::alibi_slopes>("alibi_slopes");
  input.operator()<&AttentionInputs::sinks>("sinks");
  input.operator()<&AttentionInputs::drop_mask>("drop_mask");
  input.operator()<&AttentionInputs::tree_mask>("tree_mask");
  input.operator()<&BlockMask::row_offsets>("block_mask_row_offsets");
  input.operator()<&BlockMask::columns>("block_mask_columns");
  block_mask_size<&BlockMask::block_q>(type, "block_mask_block_q");
  block_mask_size<&BlockMask::block_kv>(type, "block_mask_block_kv");
  input.operator()<&AttentionInputs::query_rope>("query_rope");
  input.operator()<&AttentionInputs::key_rope>("key_rope");
  input.operator()<&SparseIndices::indices>("sparse_indices");
  type.def_prop_rw(
      "sparse_block_size", [](const AttentionCall& call) { return call.inputs.sparse_indices.block_size; },
      [](AttentionCall& call, int64_t value) { call.inputs.sparse_indices.block_size = value; });

  option<&AttentionOptions::softmax_scale>(type, "softmax_scale");
  option<&AttentionOptions::causal>(type, "causal");
  option<&AttentionOptions::block_q>(type, "block_q");
  option<&AttentionOptions::block_kv>(type, "block_kv");
  option<&AttentionOptions::window_left>(type, "window_left");
  option<&AttentionOptions::window_right>(type, "window_right");
  option<&AttentionOptions::softcap>(type, "softcap");
  option<&AttentionOptions::bias_scale>(type, "bias_scale");
  option<&AttentionOptions::alibi_query_start>(type, "alibi_query_start");
  option<&AttentionOptions::alibi_key_start>(type, "alibi_key_start");
  option<&AttentionOptions::shared_prefix>(type, "shared_prefix");
  dropout_option<&DropoutOptions::keep_prob>(type, "keep_prob");
  dropout_option<&DropoutOptions::seed>(type, "seed");
  dropout_option<&DropoutOptions::offset>(type, "offset");
  dropout_option<&DropoutOptions::first_query>(type, "first_query");
  dropout_option<&DropoutOptions::first_key>(type, "first_key");
  dropout_option<&DropoutOptions::first_head>(type, "first_head");
  dropout_option<&DropoutOptions::total_heads>(type, "total_heads");
  type.def_prop_rw(
      "alignment",
      [](const AttentionCall& call) {
        return call.options.alignment == CausalAlignment::top_left ? "top_left" : "bottom_right";
      },
      [](AttentionCall& call, const std::string& text) {
        call.options.alignment = parse<CausalAlignment>(
            text, "alignment",
            {{"top_left", CausalAlignment::top_left}, {"bottom_right", CausalAlignment::bottom_right}});
      });
  type.def_prop_rw(
      "alibi_form",
      [](const AttentionCall& call) { return call.options.alibi_form == AlibiForm::linear ? "linear" : "square_root"; },
      [](AttentionCall& call, const std::string& text) {
        call.options.alibi_form = parse<AlibiForm>(
            text, "alibi_form", {{"linear", AlibiForm::linear}, {"square_root", AlibiForm::square_root}});
      });
  type.def_prop_rw(
      "path", [](const AttentionCall& call) { return to_string(call.options.path); },
      [](AttentionCall& call, const std::string& text) {
        call.options.path = parse<AttentionPath>(text, "path",
                                                 {{"automatic", AttentionPath::automatic},
                                                  {"standard", AttentionPath::standard},
                                                  {"flash", AttentionPath::flash}});
      });
  type.def_prop_rw(
      "page_layout", [](const AttentionCall& call) { return to_string(call.options.page_layout); },
      [](AttentionCall& call, const std::string& text) { call.options.page_layout = parse_layout(text); });

  type.def(
      "forward",
      [](const AttentionCall& call, Context& context, const View& out, const View* lse, const View* max,
         const View* sum) {
        const AttentionOutputs outputs = {.out = out.output("out"),
                                          .softmax_lse = output_or_empty(lse, "softmax_lse"),
                                          .softmax_max = output_or_empty(max, "softmax_max"),
                                          .softmax_sum = output_or_empty(sum, "softmax_sum")};
        run([&] { return flash_attention_forward(context, call.inputs, outputs, call.options); });
      },
      nb::arg("context"), nb::arg("out"), nb::arg("softmax_lse").none() = nb::none(),
      nb::arg("softmax_max").none() = nb::none(), nb::arg("softmax_sum").none() = nb::none());
  type.def(
      "backward",
      [](const AttentionCall& call, Context& context, const View& out, const View& grad_out, const View* lse,
         const View* max, const View* sum, const View* grad_lse, const View* grad_query, const View* grad_key,
         const View* grad_value, const View* grad_bias, const View* grad_sinks, const View* grad_query_rope,
         const View* grad_key_rope) {
        const AttentionSaved saved = {.out = out.input(),
                                      .softmax_lse = input_or_empty(lse),
                                      .softmax_max = input_or_empty(max),
                                      .softmax_sum = input_or_empty(sum),
                                      .grad_out = grad_out.input(),
                                      .grad_lse = input_or_empty(grad_lse)};
        const AttentionGradients gradients = {.grad_query = output_or_empty(grad_query, "grad_query"),
                                              .grad_key = output_or_empty(grad_key, "grad_key"),
                                              .grad_value = output_or_empty(grad_value, "grad_value"),
                                              .grad_bias = output_or_empty(grad_bias, "grad_bias"),
                                              .grad_sinks = output_or_empty(grad_sinks, "grad_sinks"),
                                              .grad_query_rope = output_or_empty(grad_query_rope, "grad_query_rope"),
                                              .grad_key_rope = output_or_empty(grad_key_rope, "grad_key_rope")};
        run([&] { return flash_attention_backward(context, call.inputs, saved, gradients, call.options); });
      },
      nb::arg("context"), nb::arg("out"), nb::arg("grad_out"), nb::arg("softmax_lse").none() = nb::none(),
      nb::arg("softmax_max").none() = nb::none(), nb::arg("softmax_sum").none() = nb::none(),
      nb::arg("grad_lse").none() = nb::none(), nb::arg("grad_query").none() = nb::none(),
      nb::arg("grad_key").none() = nb::none(), nb::arg("grad_value").none() = nb::none(),
      nb::arg("grad_bias").none() = nb::none(), nb::arg("grad_sinks").none() = nb::none(),
      nb::arg("grad_query_rope").none() = nb::none(), nb::arg("grad_key_rope").none() = nb::none());
  type.def("plan", &plan, nb::arg("context"));

  module.def("attend_plain", &attend_plain, nb::arg("context"), nb::arg("query"), nb::arg("key"), nb::arg("value"),
             nb::arg("out"), nb::arg("causal"), nb::arg("softmax_scale").none(), nb::arg("grouped"));
  module.def(
      "merge_attention",
      [](Context& context, const View& parts, const View* lse_parts, const View* max_parts, const View* sum_parts,
         const View& out, const View* lse, const View* max, const View* sum, bool accumulate) {
        const AttentionParts in = {.out = parts.input(),
                                   .softmax_lse = input_or_empty(lse_parts),
                                   .softmax_max = input_or_empty(max_parts),
                                   .softmax_sum = input_or_empty(sum_parts)};
        const AttentionOutputs outputs = {.out = out.output("out"),
                                          .softmax_lse = output_or_empty(lse, "softmax_lse"),
                                          .softmax_max = output_or_empty(max, "softmax_max"),
                                          .softmax_sum = output_or_empty(sum, "softmax_sum")};
        run([&] { return merge_attention(context, in, outputs, accumulate); });
      },
      nb::arg("context"), nb::arg("out_parts"), nb::arg("lse_parts").none(), nb::arg("max_parts").none(),
      nb::arg("sum_parts").none(), nb::arg("out"), nb::arg("softmax_lse").none(), nb::arg("softmax_max").none(),
      nb::arg("softmax_sum").none(), nb::arg("accumulate") = false);
  bind_indexer(module);
  module.attr("UNBOUNDED") = kUnbounded;
}

}  // namespace opst::python
