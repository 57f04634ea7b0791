#include "opst/rowwise.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "view.h"

namespace opst::python {

namespace {

// None, or (temporal, height, width, interleaved).
RopeSections sections(const std::optional<std::tuple<int64_t, int64_t, int64_t, bool>>& sizes) {
  if (!sizes) return {};
  const auto& [temporal, height, width, interleaved] = *sizes;
  return {.temporal = temporal, .height = height, .width = width, .interleaved = interleaved};
}

NormGradients gradients(const View* x, const View* weight, const View* bias) {
  return {.x = output_or_empty(x, "grad_x"),
          .weight = output_or_empty(weight, "grad_weight"),
          .bias = output_or_empty(bias, "grad_bias")};
}

}  // namespace

RopeStyle parse_style(const std::string& name) {
  for (const RopeStyle style : {RopeStyle::halves, RopeStyle::pairs}) {
    if (name == to_string(style)) return style;
  }
  raise(PyExc_ValueError, "style is \"" + name + "\", must be one of halves, pairs");
}

void bind_rowwise(nb::module_& module) {
  using nb::arg;
  module.def(
      "rms_norm",
      [](Context& context, const View& x, const View& weight, const View& out, double eps, const View* rstd) {
        const RmsNormOptions options = {.eps = eps, .rstd = output_or_empty(rstd, "rstd")};
        run([&, y = out.output("out")] { return rms_norm(context, x.input(), weight.input(), y, options); });
      },
      arg("context"), arg("x"), arg("weight"), arg("out"), arg("eps"), arg("rstd").none());
  module.def(
      "add_rms_norm",
      [](Context& context, const View& a, const View& b, const View& weight, const View& out, const View& sum,
         double eps, const View* rstd) {
        const RmsNormOptions options = {.eps = eps, .rstd = output_or_empty(rstd, "rstd")};
        run([&, y = out.output("out"), s = sum.output("sum")] {
          return add_rms_norm(context, a.input(), b.input(), weight.input(), y, s, options);
        });
      },
      arg("context"), arg("a"), arg("b"), arg("weight"), arg("out"), arg("sum"), arg("eps"), arg("rstd").none());
  module.def(
      "rms_norm_backward",
      [](Context& context, const View& grad_out, const View& x, const View& weight, const View* grad_x,
         const View* grad_weight, double eps, const View* grad_sum) {
        const RmsNormBackwardOptions options = {.eps = eps, .grad_sum = input_or_empty(grad_sum)};
        run([&, g = gradients(grad_x, grad_weight, nullptr)] {
          return rms_norm_backward(context, grad_out.input(), x.input(), weight.input(), g, options);
        });
      },
      arg("context"), arg("grad_out"), arg("x"), arg("weight"), arg("grad_x").none(), arg("grad_weight").none(),
      arg("eps"), arg("grad_sum").none());
  module.def(
      "layer_norm",
      [](Context& context, const View& x, const View* weight, const View* bias, const View& out, double eps,
         const View* mean, const View* rstd) {
        const LayerNormOptions options = {.eps = eps,
                                          .weight = input_or_empty(weight),
                                          .bias = input_or_empty(bias),
                                          .mean = output_or_empty(mean, "mean"),
                                          .rstd = output_or_empty(rstd, "rstd")};
        run([&, y = out.output("out")] { return layer_norm(context, x.input(), y, options); });
      },
      arg("context"), arg("x"), arg("weight").none(), arg("bias").none(), arg("out"), arg("eps"), arg("mean").none(),
      arg("rstd").none());
  module.def(
      "layer_norm_backward",
      [](Context& context, const View& grad_out, const View& x, const View* weight, const View* grad_x,
         const View* grad_weight, const View* grad_bias, double eps) {
        const LayerNormOptions options = {.eps = eps, .weight = input_or_empty(weight)};
        run([&, g = gradients(grad_x, grad_weight, grad_bias)] {
          return layer_norm_backward(context, grad_out.input(), x.input(), g, options);
        });
      },
      arg("context"), arg("grad_out"), arg("x"), arg("weight").none(), arg("grad_x").none(), arg("grad_weight").none(),
      arg("grad_bias").none(), arg("eps"));
  module.def(
      "softmax",
      [](Context& context, const View& x, const View& out, float scale) {
        run([&, y = out.output("out")] { return softmax(context, x.input(), y, {.scale = scale}); });
      },
      arg("context"), arg("x"), arg("out"), arg("scale"));
  module.def(
      "softmax_backward",
      [](Context& context, const View& grad_out, const View& out, const View& grad_x, float scale) {
        run([&, g = grad_x.output("grad_x")] {
          return softmax_backward(context, grad_out.input(), out.input(), g, {.scale = scale});
        });
      },
      arg("context"), arg("grad_out"), arg("out"), arg("grad_x"), arg("scale"));
  module.def(
      "rope_table",
      [](Context& context, const View& positions, const View& cos, const View& sin, double theta,
         const std::optional<std::tuple<int64_t, int64_t, int64_t, bool>>& axes) {
        run([&, c = cos.output("cos"), s = sin.output("sin")] {
          return rope_table(context, positions.input(), c, s, {.theta = theta, .sections = sections(axes)});
        });
      },
      arg("context"), arg("positions"), arg("cos"), arg("sin"), arg("theta"), arg("sections").none());
  module.def(
      "rope",
      [](Context& context, const View& x, const View& cos, const View& sin, const View& out, const std::string& style,
         bool inverse) {
        const RopeOptions options = {.style = parse_style(style), .inverse = inverse};
        run([&, y = out.output("out")] { return rope(context, x.input(), cos.input(), sin.input(), y, options); });
      },
      arg("context"), arg("x"), arg("cos"), arg("sin"), arg("out"), arg("style"), arg("inverse"));
  module.def(
      "rope_cached",
      [](Context& context, const View& x, const View& positions, const View& cos_cache, const View& sin_cache,
         const View& out, const std::string& style, bool inverse,
         const std::optional<std::tuple<int64_t, int64_t, int64_t, bool>>& axes) {
        const RopeCachedOptions options = {.style = parse_style(style), .inverse = inverse, .sections = sections(axes)};
        run([&, y = out.output("out")] {
          return rope_cached(context, x.input(), positions.input(), cos_cache.input(), sin_cache.input(), y, options);
        });
      },
      arg("context"), arg("x"), arg("positions"), arg("cos_cache"), arg("sin_cache"), arg("out"), arg("style"),
      arg("inverse"), arg("sections").none());
  module.def(
      "swiglu",
      [](Context& context, const View& gate, const View& up, const View& out) {
        run([&, y = out.output("out")] { return swiglu(context, gate.input(), up.input(), y); });
      },
      arg("context"), arg("gate"), arg("up"), arg("out"));
  module.def(
      "swiglu_backward",
      [](Context& context, const View& grad_out, const View& gate, const View& up, const View& grad_gate,
         const View& grad_up) {
        run([&, g = grad_gate.output("grad_gate"), u = grad_up.output("grad_up")] {
          return swiglu_backward(context, grad_out.input(), gate.input(), up.input(), g, u);
        });
      },
      arg("context"), arg("grad_out"), arg("gate"), arg("up"), arg("grad_gate"), arg("grad_up"));
  module.def(
      "swiglu_halves",
      [](Context& context, const View& gate_up, const View& out, bool swapped) {
        run([&, y = out.output("out")] { return swiglu(context, gate_up.input(), y, {.swapped = swapped}); });
      },
      arg("context"), arg("gate_up"), arg("out"), arg("swapped"));
  module.def(
      "swiglu_halves_backward",
      [](Context& context, const View& grad_out, const View& gate_up, const View& grad_gate_up, bool swapped) {
        run([&, g = grad_gate_up.output("grad_gate_up")] {
          return swiglu_backward(context, grad_out.input(), gate_up.input(), g, {.swapped = swapped});
        });
      },
      arg("context"), arg("grad_out"), arg("gate_up"), arg("grad_gate_up"), arg("swapped"));
  module.def(
      "add",
      [](Context& context, const View& a, const View& b, const View& out) {
        run([&, y = out.output("out")] { return add(context, a.input(), b.input(), y); });
      },
      arg("context"), arg("a"), arg("b"), arg("out"));
}

}  // namespace opst::python
