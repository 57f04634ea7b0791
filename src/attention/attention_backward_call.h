// The backward pass of a DrawnCall: what it needs besides the inputs, gradients prefilled with NaN behind guard pages,
// and their judgement by the reference.
//
//   DrawnCall call(d, random);
//   BackwardCallData data(call, random);
//   BackwardCallData::Outcome r = data.run(context);      // forward and backward
//   EXPECT_EQ(data.judge(r, context, worst_ratio), "");
#pragma once

#include "attention/attention_draw.h"
#include "attention/backward_reference.h"
#include "opst/attention_backward.h"

namespace opst::test {

// How a caller may ask for gradients.
struct BackwardForm {
  DType grad_out_dtype = DType::f32;
  bool wide_gradients = false;  // f32 whatever the inputs are
  Strides grad_out_strides = Strides::bnsd, gradient_strides = Strides::bnsd;
  bool from_lse = true;  // else from max and sum
  bool grad_lse = false;
};
inline std::string to_string(const BackwardForm& f) {
  return std::string("grad_out ") + to_string(f.grad_out_dtype) + " " + to_string(f.grad_out_strides) + ", gradients " +
         (f.wide_gradients ? "wide " : "") + to_string(f.gradient_strides) + (f.from_lse ? ", lse" : ", max and sum") +
         (f.grad_lse ? ", grad_lse" : "");
}
inline BackwardForm draw_form(const Draw& d, Random& random) {
  BackwardForm f;
  f.grad_out_dtype = d.query_dtype == DType::f64 ? DType::f64 : random.pick({d.out_dtype, d.query_dtype, d.out_dtype});
  f.wide_gradients = d.query_dtype != DType::f64 && random.chance(0.3);
  const auto strides = [&] {
    if (random.chance(0.5)) return Strides::bnsd;
    return random.pick({Strides::bsnd, Strides::transposed, Strides::padded, Strides::shifted});
  };
  f.grad_out_strides = random.chance(0.1) ? Strides::broadcast_heads : strides();
  f.gradient_strides = strides();
  f.from_lse = random.chance(0.5);
  f.grad_lse = random.chance(0.3);
  return f;
}

class BackwardCallData {
 public:
  BackwardCallData(const DrawnCall& call, const BackwardForm& form, Random& random) : call_(call), form_(form) {
    const DrawnCall::Outputs shapes = call.make_outputs();
    grad_out_ = view_like(shapes.tensors.out, form.grad_out_dtype, form.grad_out_strides);
    fill(grad_out_.tensor, random.chance(0.9) ? Fill::normal : Fill::ones, random);
    if (form.grad_lse) {
      grad_lse_ = view_like(shapes.tensors.softmax_lse, shapes.tensors.softmax_lse.dtype, Strides::bnsd);
      fill(grad_lse_.tensor, Fill::normal, random);
    }
  }

  Tensor grad_out() const { return grad_out_.tensor; }
  Tensor grad_lse() const { return grad_lse_.tensor; }

  struct Outcome {
    Status status;
    DrawnCall::Outputs forward;
    std::unique_ptr<View> memory[5];
    AttentionGradients tensors;

    std::string differs_from(const Outcome& other) const {
      const AttentionGradients &a = tensors, &b = other.tensors;
      for (const auto& [mine, theirs, name] :
           {std::tuple(&a.grad_query, &b.grad_query, "grad_query"), std::tuple(&a.grad_key, &b.grad_key, "grad_key"),
            std::tuple(&a.grad_value, &b.grad_value, "grad_value"), std::tuple(&a.grad_bias, &b.grad_bias, "grad_bias"),
            std::tuple(&a.grad_sinks, &b.grad_sinks, "grad_sinks")}) {
        if (mine->data == nullptr) continue;
        const Comparison c = compare_bits(*mine, *theirs, {.name = name});
        if (!c.ok) return c.message;
      }
      return "";
    }
  };

  AttentionSaved saved(const DrawnCall::Outputs& forward) const {
    AttentionSaved s;
    s.out = forward.tensors.out;
    if (form_.from_lse) {
      s.softmax_lse = forward.tensors.softmax_lse;
    } else {
      s.softmax_max = forward.tensors.softmax_max;
      s.softmax_sum = forward.tensors.softmax_sum;
    }
    s.grad_out = grad_out_.tensor;
    s.grad_lse = grad_lse_.tensor;
    return s;
  }

  Outcome run(const Context& context) const {
    Outcome r;
    r.forward = call_.make_outputs();
    auto& mutable_context = const_cast<Context&>(context);
    const AttentionOptions& options = call_.drawn().options;
    r.status = flash_attention_forward(mutable_context, call_.inputs, r.forward.tensors, options);
    if (!r.status.ok()) return r;
    run_backward(mutable_context, r);
    return r;
  }
  // From what an earlier forward call wrote.
  void run_backward(Context& context, Outcome& r) const {
    const AttentionInputs& in = call_.inputs;
    const DType real = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;
    const auto like = [&](int index, const ConstTensor& t, DType dtype, Strides strides) {
      Owned owned = view_like(t, form_.wide_gradients ? real : dtype, strides);
      r.memory[index] = std::move(owned.memory);
      return owned.tensor;
    };
    r.tensors.grad_query = like(0, in.query, in.query.dtype, form_.gradient_strides);
    r.tensors.grad_key = like(1, in.key, in.key.dtype, form_.gradient_strides);
    r.tensors.grad_value = like(2, in.value, in.value.dtype, form_.gradient_strides);
    if (in.bias.data != nullptr) r.tensors.grad_bias = like(3, in.bias, real, form_.gradient_strides);
    if (in.sinks.data != nullptr) r.tensors.grad_sinks = like(4, in.sinks, real, Strides::bnsd);
    r.status = flash_attention_backward(context, in, saved(r.forward), r.tensors, call_.drawn().options);
  }

  // The unit of error: what plain code achieves with the coarsest of the types that the values pass through.
  DType storage(const Context& context) const {
    const Draw& d = call_.drawn();
    if (d.query_dtype == DType::f64) return DType::f64;
    // Forward's own product counts: O comes from it.
    const bool bf16 = d.query_dtype == DType::bf16 && d.kv_dtype == DType::bf16;
    const Machine& m = context.machine();
    if (bf16 && m.isa >= Isa::avx512_bf16 && m.bf16_product == Bf16Product::dot) return DType::bf16;
    return d.out_dtype;
  }

  std::string judge(const Outcome& r, const Context& context, double& worst_ratio) {
    const Draw& d = call_.drawn();
    const std::string about = to_string(d) + "\n  " + to_string(form_) + "\n  " + to_string(context.machine()) + ", " +
                              std::to_string(context.num_threads()) + " threads";
    if (!r.status.ok()) return r.status.message() + "\n  " + about;
    for (const auto& view : r.memory) {
      if (view != nullptr && !view->gaps_intact()) return "a gradient was written beside its elements\n  " + about;
    }
    const AttentionInputs& in = call_.oracle_inputs;
    using attention::ReferenceGradients;
    if (!has_reference_) {
      reference_ = attention::reference_gradients(in, grad_out_.tensor, grad_lse_.tensor, d.options);
      magnitude_ = attention::reference_gradients(in, grad_out_.tensor, grad_lse_.tensor, d.options, true);
      for (const DrawnCall::Row& row : call_.rows(400)) {
        const double scale = attention::reference_row(in, d.options, row.b, row.h, row.i).score_scale;
        if (std::isfinite(scale)) score_scale_ = std::max(score_scale_, scale);
      }
      has_reference_ = true;
    }
    const DType type = storage(context);
    ReferenceGradients& naive = naive_[static_cast<size_t>(type)];
    if (naive.query.empty()) {
      naive = attention::naive_gradients(in, grad_out_.tensor, grad_lse_.tensor, d.options, type);
    }
    const AttentionGradients& g = r.tensors;
    for (const auto& [got, part, name] : {std::tuple(&g.grad_query, &ReferenceGradients::query, "grad_query"),
                                          std::tuple(&g.grad_key, &ReferenceGradients::key, "grad_key"),
                                          std::tuple(&g.grad_value, &ReferenceGradients::value, "grad_value"),
                                          std::tuple(&g.grad_bias, &ReferenceGradients::bias, "grad_bias"),
                                          std::tuple(&g.grad_sinks, &ReferenceGradients::sinks, "grad_sinks")}) {
      if (got->data == nullptr) continue;
      const std::string message =
          judge(*got, reference_.*part, naive.*part, magnitude_.*part, type, name, about, worst_ratio);
      if (!message.empty()) return message;
    }
    return "";
  }

 private:
  struct Owned {
    std::unique_ptr<View> memory;
    Tensor tensor;
  };
  // A tensor of t's shape in memory of its own.
  static Owned view_like(const ConstTensor& t, DType dtype, Strides strides) {
    int64_t shape[4] = {1, 1, 1, 1};
    for (int d = 0; d < t.rank; ++d) shape[4 - t.rank + d] = t.shape[d];
    Owned owned;
    owned.memory = std::make_unique<View>(dtype, shape[0], shape[1], shape[2], shape[3], strides, Guard::before);
    owned.tensor = owned.memory->tensor();
    for (int d = t.rank; d < 4; ++d) owned.tensor = owned.tensor.selected(0, 0);
    return owned;
  }

  std::string judge(const Tensor& got, const std::vector<double>& reference, const std::vector<double>& naive,
                    const std::vector<double>& magnitude, DType type, const char* name, const std::string& about,
                    double& worst_ratio) const {
    const Draw& d = call_.drawn();
    const auto shaped = [&](std::vector<double>& values) {
      ConstTensor t = attention::reference::packed_shape(got);
      t.dtype = DType::f64;
      t.data = values.data();
      return t;
    };
    std::vector<double> ref = reference, plain = naive, values = to_doubles(got);
    double largest = 0;
    for (size_t i = 0; i < ref.size(); ++i) {
      plain[i] = attention::reference::rounded_to(got.dtype, plain[i]);
      if (std::isfinite(magnitude[i])) largest = std::max(largest, magnitude[i]);
      // An infinite product may meet its negative in one order of a sum and not in another.
      if (d.non_finite) {
        for (double* x : {&ref[i], &values[i]}) *x = std::isfinite(*x) ? *x : std::numeric_limits<double>::quiet_NaN();
      }
    }
    Tensor judged = Tensor::contiguous(got.dtype, {}, nullptr);
    std::vector<char> bytes(values.size() * static_cast<size_t>(size_bytes(got.dtype)) + 1);
    judged.rank = got.rank;
    const ConstTensor packed = attention::reference::packed_shape(got);
    std::copy(packed.shape, packed.shape + kMaxRank, judged.shape);
    std::copy(packed.strides, packed.strides + kMaxRank, judged.strides);
    judged.data = bytes.data();
    for (size_t i = 0; i < values.size(); ++i) set(judged, static_cast<int64_t>(i), values[i]);

    CompareOptions options{.name = name, .about = about};
    const bool f64 = d.query_dtype == DType::f64;
    // P is as wrong, relatively, as scores and statistics are absolutely; and sums round.
    const double eps = f64 ? 0x1p-52 : 0x1p-23;
    options.extra = 2 * eps * (4 + score_scale_) * largest;
    // O was rounded before delta was taken from it; exponentials of the pairwise product; dS.
    if (type == DType::bf16) options.extra += 0x1p-9 * largest;
    if (type == DType::f16) options.extra += 0x1p-12 * largest;
    options.extra += static_cast<double>(d.longest_keys() + d.longest_query()) * (f64 ? 0x1p-1070 : 0x1p-110);
    if (got.dtype == DType::f16) options.extra += 0x1p-25;
    const Comparison c = compare(judged, shaped(ref), shaped(plain), options);
    worst_ratio = std::max(worst_ratio, c.max_error_ratio);
    return c.ok ? "" : c.message;
  }

  const DrawnCall& call_;
  const BackwardForm form_;
  Owned grad_out_, grad_lse_;
  bool has_reference_ = false;
  attention::ReferenceGradients reference_, magnitude_;
  attention::ReferenceGradients naive_[4];  // by storage
  double score_scale_ = 0;
};

// For a test to change what an input holds.
inline Tensor mutable_view(const ConstTensor& t) {
  Tensor w = Tensor::contiguous(t.dtype, {}, const_cast<void*>(t.data));
  w.rank = t.rank;
  std::copy(t.shape, t.shape + kMaxRank, w.shape);
  std::copy(t.strides, t.strides + kMaxRank, w.strides);
  return w;
}

// Draws that have a backward pass: pages are norm ones.
inline Draw draw_for_backward(Random& random) {
  Draw d = draw(random);
  if (d.keys == Keys::panel_pages) d.keys = Keys::norm_pages;
  return d;
}

}  // namespace opst::test
