// Products, and the integer formats of weights.
#include "opst/matmul.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "given.h"
#include "opst/grouped_matmul.h"
#include "opst/quant.h"
#include "view.h"

namespace opst::python {

Activation parse_activation(const std::string& name) {
  for (const Activation a : {Activation::none, Activation::silu, Activation::gelu_erf, Activation::gelu_tanh,
                             Activation::swiglu, Activation::swiglu_swapped}) {
    if (name == to_string(a)) return a;
  }
  raise(PyExc_ValueError,
        "activation is \"" + name + "\", must be one of none, silu, gelu_erf, gelu_tanh, swiglu, swiglu_swapped");
}

QuantMatrix quant_matrix(const View& bytes, const std::string& format, int64_t rows, int64_t cols) {
  const std::optional<QuantFormat> parsed = parse_quant_format(format);
  if (!parsed) raise(PyExc_ValueError, "format is \"" + format + "\", which is no block format");
  const ConstTensor t = bytes.input();
  if (t.dtype != DType::u8 || !t.is_contiguous()) {
    raise(PyExc_ValueError, "the blocks must be contiguous u8, not " + to_string(t));
  }
  return {*parsed, rows, cols, t.data, t.num_elements()};
}

IntMatrix int_matrix(const View& q, const View& scales, const View* zeros) {
  return {.q = q.input(), .scales = scales.input(), .zeros = input_or_empty(zeros)};
}

namespace {

// The matrices of a file's mixture, one behind another: the bytes in as many equal parts.
std::vector<QuantMatrix> quant_matrices(const View& bytes, const std::string& format, int64_t count, int64_t rows,
                                        int64_t cols) {
  const QuantMatrix all = quant_matrix(bytes, format, rows, cols);
  if (count < 0 || (count == 0 ? all.size_bytes != 0 : all.size_bytes % count != 0)) {
    raise(PyExc_ValueError, "the blocks have " + std::to_string(all.size_bytes) + " bytes, which are not those of " +
                                std::to_string(count) + " matrices");
  }
  std::vector<QuantMatrix> parts(static_cast<size_t>(count), all);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].size_bytes = all.size_bytes / count;
    parts[i].data = static_cast<const char*>(all.data) + static_cast<int64_t>(i) * parts[i].size_bytes;
  }
  return parts;
}

// Element e of each tensor [E, ..].
std::vector<IntMatrix> int_matrices(const View& q, const View& scales, const View* zeros) {
  const IntMatrix all = int_matrix(q, scales, zeros);
  for (const auto& [name, tensor] : {std::pair{"q", all.q}, {"scales", all.scales}, {"zeros", all.zeros}}) {
    if (tensor.rank == 0 && std::string(name) == "zeros" && zeros == nullptr) continue;
    if (tensor.rank != 3 || tensor.shape[0] != all.q.shape[0]) {
      raise(PyExc_ValueError, std::string(name) + " must have rank 3, one matrix for each of " +
                                  (all.q.rank == 3 ? std::to_string(all.q.shape[0]) + " weights" : "the weights") +
                                  ", not " + to_string(tensor));
    }
  }
  std::vector<IntMatrix> parts;
  for (int64_t e = 0; e < all.q.shape[0]; ++e) {
    IntMatrix& part = parts.emplace_back(IntMatrix{.q = all.q.selected(0, e), .scales = all.scales.selected(0, e)});
    if (zeros != nullptr) part.zeros = all.zeros.selected(0, e);
  }
  return parts;
}

ConstTensor as_weight(const View& weight) { return weight.input(); }
const PackedWeight& as_weight(const PackedWeight& weight) { return weight; }

// What is done with the arguments of a product: it is computed, or its plan is told and why.
constexpr auto multiply = [](Context& context, const ConstTensor& x, const auto& weight, const Tensor& out,
                             const auto& options) { run([&] { return matmul(context, x, weight, out, options); }); };
constexpr auto tell_plan = [](Context& context, const ConstTensor& x, const auto& weight, const Tensor& out,
                              const auto& options) {
  const MatmulProblem problem = value_or_raise(matmul_problem(x, weight, out, options));
  const MatmulPlan plan = plan_matmul(problem, context.machine(), context.num_threads());
  return to_string(plan) + "; " + plan.reason;
};

template <class Weight, class Use>
void bind_product(nb::module_& module, const char* name, const Use& use) {
  using nb::arg;
  module.def(
      name,
      [use](Context& context, const View& x, const Weight& weight, const View& out, const View* bias,
            const std::string& activation, const View* residual, bool int8_activations, bool batch_invariant,
            const View* out_scales) {
        const MatmulOptions options = {.bias = input_or_empty(bias),
                                       .activation = parse_activation(activation),
                                       .residual = input_or_empty(residual),
                                       .activations = int8_activations ? ActivationType::int8 : ActivationType::exact,
                                       .batch_invariant = batch_invariant,
                                       .out_scales = output_or_empty(out_scales, "out_scales")};
        return use(context, x.input(), as_weight(weight), out.output("out"), options);
      },
      arg("context"), arg("x"), arg("weight"), arg("out"), arg("bias").none(), arg("activation"),
      arg("residual").none(), arg("int8_activations"), arg("batch_invariant"), arg("out_scales").none());
}

template <class Use>
void bind_integers(nb::module_& module, const char* name, const Use& use) {
  using nb::arg;
  module.def(
      name,
      [use](Context& context, const View& x, const PackedIntWeight& weight, const View& out, const View* x_scales,
            const View* bias, const std::string& activation, const View* residual, const View* out_scales) {
        const IntMatmulOptions options = {.x_scales = input_or_empty(x_scales),
                                          .bias = input_or_empty(bias),
                                          .activation = parse_activation(activation),
                                          .residual = input_or_empty(residual),
                                          .out_scales = output_or_empty(out_scales, "out_scales")};
        return use(context, x.input(), weight, out.output("out"), options);
      },
      arg("context"), arg("x"), arg("weight"), arg("out"), arg("x_scales").none(), arg("bias").none(),
      arg("activation"), arg("residual").none(), arg("out_scales").none());
}

GroupedWeight as_grouped(const View& weight) { return weight.input(); }
template <class Packed>
GroupedWeight as_grouped(const Packed& weight) {
  return weight;
}

template <class Weight>
void bind_grouped(nb::module_& module, const char* name) {
  using nb::arg;
  module.def(
      name,
      [](Context& context, const View& x, const Weight& weight, const View& list, bool counts, const View& out,
         const View* bias, const std::string& activation, const View* residual, bool int8_activations,
         bool batch_invariant, const View* x_scales, const View* out_scales, const View* smooth_scales) {
        const GroupedMatmulOptions options = {
            .bias = input_or_empty(bias),
            .activation = parse_activation(activation),
            .residual = input_or_empty(residual),
            .activations = int8_activations ? ActivationType::int8 : ActivationType::exact,
            .batch_invariant = batch_invariant,
            .x_scales = input_or_empty(x_scales),
            .out_scales = output_or_empty(out_scales, "out_scales"),
            .smooth_scales = input_or_empty(smooth_scales)};
        const GroupList groups = {list.input(), counts ? GroupListType::counts : GroupListType::ends};
        run([&, y = out.output("out")] {
          return grouped_matmul(context, x.input(), as_grouped(weight), groups, y, options);
        });
      },
      arg("context"), arg("x"), arg("weight"), arg("group_list"), arg("counts"), arg("out"), arg("bias").none(),
      arg("activation"), arg("residual").none(), arg("int8_activations"), arg("batch_invariant"),
      arg("x_scales").none(), arg("out_scales").none(), arg("smooth_scales").none());
}

void bind_grouped_matmul(nb::module_& module) {
  using nb::arg;
  bind_grouped<View>(module, "grouped_matmul");
  bind_grouped<PackedWeight>(module, "grouped_matmul_packed");
  bind_grouped<PackedIntWeight>(module, "grouped_matmul_int");
  module.def(
      "grouped_matmul_swiglu_quant",
      [](Context& context, const View& x, const View& x_scales, const PackedIntWeight& weight, const View& list,
         bool counts, const View& out, const View& out_scales, const View* bias, const View* smooth_scales) {
        const GroupList groups = {list.input(), counts ? GroupListType::counts : GroupListType::ends};
        run([&, y = out.output("out"), s = out_scales.output("out_scales"),
             o = GroupedSwigluQuantOptions{.bias = input_or_empty(bias),
                                           .smooth_scales = input_or_empty(smooth_scales)}] {
          return grouped_matmul_swiglu_quant(context, x.input(), x_scales.input(), weight, groups, y, s, o);
        });
      },
      arg("context"), arg("x"), arg("x_scales"), arg("weight"), arg("group_list"), arg("counts"), arg("out"),
      arg("out_scales"), arg("bias").none(), arg("smooth_scales").none());
  module.def(
      "grouped_matmul_backward",
      [](Context& context, const View& grad_out, const View* x, const View* weight, const View& list, bool counts,
         const View* grad_x, const View* grad_weight, const View* grad_bias) {
        const GroupList groups = {list.input(), counts ? GroupListType::counts : GroupListType::ends};
        const MatmulGradients g = {.x = output_or_empty(grad_x, "grad_x"),
                                   .weight = output_or_empty(grad_weight, "grad_weight"),
                                   .bias = output_or_empty(grad_bias, "grad_bias")};
        run([&] {
          return grouped_matmul_backward(context, grad_out.input(), input_or_empty(x), input_or_empty(weight), groups,
                                         g);
        });
      },
      arg("context"), arg("grad_out"), arg("x").none(), arg("weight").none(), arg("group_list"), arg("counts"),
      arg("grad_x").none(), arg("grad_weight").none(), arg("grad_bias").none());
}

}  // namespace

void bind_matmul(nb::module_& module) {
  bind_grouped_matmul(module);
  using nb::arg;
  nb::class_<PackedWeight>(module, "PackedWeight", "A weight [n, k], repacked for the multiply kernels.")
      .def_static(
          "pack",
          [](Context& context, const View& weight) {
            return value_or_raise(PackedWeight::pack(context, weight.input()));
          },
          arg("context"), arg("weight"))
      .def_static(
          "pack_blocks",
          [](Context& context, const View& bytes, const std::string& format, int64_t rows, int64_t cols) {
            return value_or_raise(PackedWeight::pack(context, quant_matrix(bytes, format, rows, cols)));
          },
          arg("context"), arg("bytes"), arg("format"), arg("rows"), arg("cols"))
      .def_static(
          "pack_parts",
          [](Context& context, const std::vector<View>& bytes, const std::string& format,
             const std::vector<int64_t>& rows, int64_t cols) {
            std::vector<QuantMatrix> parts;
            for (size_t i = 0; i < bytes.size(); ++i) parts.push_back(quant_matrix(bytes[i], format, rows.at(i), cols));
            return value_or_raise(PackedWeight::pack(context, parts));
          },
          arg("context"), arg("bytes"), arg("format"), arg("rows"), arg("cols"))
      .def_static(
          "pack_stack",
          [](Context& context, const View& weights) {
            return value_or_raise(PackedWeight::pack_stack(context, weights.input()));
          },
          arg("context"), arg("weights"))
      .def_static(
          "pack_blocks_stack",
          [](Context& context, const View& bytes, const std::string& format, int64_t count, int64_t rows,
             int64_t cols) {
            const std::vector<QuantMatrix> parts = quant_matrices(bytes, format, count, rows, cols);
            return value_or_raise(PackedWeight::pack_stack(context, parts));
          },
          arg("context"), arg("bytes"), arg("format"), arg("count"), arg("rows"), arg("cols"))
      .def_prop_ro("count", &PackedWeight::count)
      .def_prop_ro("format", [](const PackedWeight& w) { return to_string(w.format()); })
      .def_prop_ro("n", &PackedWeight::n)
      .def_prop_ro("k", &PackedWeight::k)
      .def_prop_ro("size_bytes", &PackedWeight::size_bytes);
  nb::class_<PackedIntWeight>(module, "PackedIntWeight", "An int8 or int4 weight [n, k] with scales, repacked.")
      .def_static(
          "pack",
          [](Context& context, const View& q, const View& scales, const View* zeros) {
            return value_or_raise(PackedIntWeight::pack(context, int_matrix(q, scales, zeros)));
          },
          arg("context"), arg("q"), arg("scales"), arg("zeros").none() = nb::none())
      .def_static(
          "pack_plain",
          [](Context& context, const View& q) { return value_or_raise(PackedIntWeight::pack(context, q.input())); },
          arg("context"), arg("q"))
      .def_static(
          "pack_stack",
          [](Context& context, const View& q, const View& scales, const View* zeros) {
            return value_or_raise(PackedIntWeight::pack_stack(context, int_matrices(q, scales, zeros)));
          },
          arg("context"), arg("q"), arg("scales"), arg("zeros").none() = nb::none())
      .def_prop_ro("count", &PackedIntWeight::count)
      .def_prop_ro("n", &PackedIntWeight::n)
      .def_prop_ro("k", &PackedIntWeight::k)
      .def_prop_ro("groups", &PackedIntWeight::groups)
      .def_prop_ro("bits", &PackedIntWeight::bits)
      .def_prop_ro("size_bytes", &PackedIntWeight::size_bytes);

  bind_product<View>(module, "matmul", multiply);
  bind_product<View>(module, "plan_matmul", tell_plan);
  bind_product<PackedWeight>(module, "matmul_packed", multiply);
  bind_product<PackedWeight>(module, "plan_matmul_packed", tell_plan);
  bind_integers(module, "matmul_int", multiply);
  bind_integers(module, "plan_matmul_int", tell_plan);
  module.def(
      "lookup_packed_rows",
      [](Context& context, const PackedWeight& weight, const View& rows, const View& out) {
        run([&, y = out.output("out")] { return lookup_rows(context, weight, rows.input(), y); });
      },
      arg("context"), arg("weight"), arg("rows"), arg("out"));
  module.def(
      "read_ahead",
      [](Context& context, const PackedWeight& weight, const std::string& activation) {
        read_ahead(context, weight, parse_activation(activation));
      },
      arg("context"), arg("weight"), arg("activation"));
  module.def(
      "matmul_backward",
      [](Context& context, const View& grad_out, const View& x, const View& weight, const View* grad_x,
         const View* grad_weight, const View* grad_bias) {
        const MatmulGradients g = {.x = output_or_empty(grad_x, "grad_x"),
                                   .weight = output_or_empty(grad_weight, "grad_weight"),
                                   .bias = output_or_empty(grad_bias, "grad_bias")};
        run([&] { return matmul_backward(context, grad_out.input(), x.input(), weight.input(), g); });
      },
      arg("context"), arg("grad_out"), arg("x"), arg("weight"), arg("grad_x").none(), arg("grad_weight").none(),
      arg("grad_bias").none());

  module.def(
      "dequantize_blocks",
      [](Context& context, const View& bytes, const std::string& format, int64_t rows, int64_t cols, const View& out) {
        run([&, m = quant_matrix(bytes, format, rows, cols), y = out.output("out")] {
          return dequantize(context, m, y);
        });
      },
      arg("context"), arg("bytes"), arg("format"), arg("rows"), arg("cols"), arg("out"));
  module.def(
      "dequantize_rows",
      [](Context& context, const View& bytes, const std::string& format, int64_t rows, int64_t cols,
         const View& indices, const View& out) {
        run([&, m = quant_matrix(bytes, format, rows, cols), y = out.output("out")] {
          return dequantize_rows(context, m, indices.input(), y);
        });
      },
      arg("context"), arg("bytes"), arg("format"), arg("rows"), arg("cols"), arg("indices"), arg("out"));
  module.def(
      "dequantize",
      [](Context& context, const View& q, const View& scales, const View* zeros, const View& out) {
        run([&, y = out.output("out")] { return dequantize(context, int_matrix(q, scales, zeros), y); });
      },
      arg("context"), arg("q"), arg("scales"), arg("zeros").none(), arg("out"));
  module.def(
      "quantize",
      [](Context& context, const View& x, const View& q, const View& scales, const View* zeros, bool scales_given) {
        // Given scales are only read, though the core takes them as what it may write.
        const auto scaled = [&](const View& view, const char* name) {
          return scales_given ? view.tensor() : view.output(name);
        };
        QuantizeOptions o{.scales_given = scales_given};
        if (zeros != nullptr) o.zeros = scaled(*zeros, "zeros");
        run([&, i = q.output("q"), s = scaled(scales, "scales")] { return quantize(context, x.input(), i, s, o); });
      },
      arg("context"), arg("x"), arg("q"), arg("scales"), arg("zeros").none(), arg("scales_given"));
  module.def(
      "dynamic_quant",
      [](Context& context, const View& x, const View& q, const View& scales, const View* smooth_scales) {
        run([&, i = q.output("q"), s = scales.output("scales"),
             o = DynamicQuantOptions{.smooth_scales = input_or_empty(smooth_scales)}] {
          return dynamic_quant(context, x.input(), i, s, o);
        });
      },
      arg("context"), arg("x"), arg("q"), arg("scales"), arg("smooth_scales").none());
}

}  // namespace opst::python
