// The backward pass of a DrawnCall: what it needs besides the inputs, gradients prefilled with NaN behind guard pages,
// and their judgement by the reference.
//
//   DrawnCall call(d, random);
//   BackwardCallData data(call, random);
//   BackwardCallData::Outcome r = data.run(context);      // forward and backward
//   EXPECT_EQ(data.judge(r, context, worst_ratio), "");
#pragma once

#include "attention/tests/drawn_call.h"
#include "opst/attention_backward.h"

namespace opst::test {

// How a caller may ask for gradients.
struct BackwardForm {
  DType grad_out_dtype = DType::f32;
  bool wide_gradients = false;  // f32 whatever the inputs are
  Strides grad_out_strides = Strides::bnsd, gradient_strides = Strides::bnsd;
  bool from_lse = true;         // else from max and sum
  bool all_statistics = false;  // from lse beside max and sum
  bool grad_lse = false;
};
inline std::string to_string(const BackwardForm& f) {
  return std::string("grad_out ") + to_string(f.grad_out_dtype) + " " + to_string(f.grad_out_strides) + ", gradients " +
         (f.wide_gradients ? "wide " : "") + to_string(f.gradient_strides) + (f.from_lse ? ", lse" : ", max and sum") +
         (f.all_statistics ? ", all statistics" : "") + (f.grad_lse ? ", grad_lse" : "");
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
  f.all_statistics = random.chance(0.1);
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
    std::unique_ptr<View> memory[7];
    AttentionGradients tensors;

    std::string differs_from(const Outcome& other) const {
      for (const attention::NamedGradient& g : attention::kNamedGradients) {
        const Tensor &mine = tensors.*g.written, &theirs = other.tensors.*g.written;
        if (mine.data == nullptr) continue;
        const Comparison c = compare_bits(mine, theirs, {.name = g.name});
        if (!c.ok) return c.message;
      }
      return "";
    }
  };

  AttentionSaved saved(const DrawnCall::Outputs& forward) const {
    AttentionSaved s;
    s.out = forward.tensors.out;
    if (form_.from_lse || form_.all_statistics) s.softmax_lse = forward.tensors.softmax_lse;
    if (!form_.from_lse || form_.all_statistics) {
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
    if (in.query_rope.data != nullptr) {
      r.tensors.grad_query_rope = like(5, in.query_rope, in.query.dtype, form_.gradient_strides);
      r.tensors.grad_key_rope = like(6, in.key_rope, in.key.dtype, form_.gradient_strides);
    }
    // With lists a bias has no gradient.
    if (in.bias.data != nullptr && !in.sparse_indices)
      r.tensors.grad_bias = like(3, in.bias, real, form_.gradient_strides);
    if (in.sinks.data != nullptr) r.tensors.grad_sinks = like(4, in.sinks, real, Strides::bnsd);
    r.status = flash_attention_backward(context, in, saved(r.forward), r.tensors, call_.drawn().options);
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
    const DType type = gradient_storage(d.query_dtype, d.kv_dtype, d.out_dtype, context.machine());
    ReferenceGradients& naive = naive_[static_cast<size_t>(type)];
    if (naive.query.empty()) {
      naive = attention::naive_gradients(in, grad_out_.tensor, grad_lse_.tensor, d.options, type);
    }
    const JudgedGradients judged{.about = about,
                                 .query_dtype = d.query_dtype,
                                 .storage = type,
                                 .lengths = d.longest_keys() + d.longest_query(),
                                 .score_scale = score_scale_,
                                 .non_finite = d.non_finite,
                                 .reference = reference_,
                                 .naive = naive,
                                 .magnitude = magnitude_};
    for (const JudgedGradients::Verdict& v : judged.judge(r.tensors)) {
      worst_ratio = std::max(worst_ratio, v.comparison.max_error_ratio);
      if (!v.comparison.ok) return v.comparison.message;
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

  const DrawnCall& call_;
  const BackwardForm form_;
  Owned grad_out_, grad_lse_;
  bool has_reference_ = false;
  attention::ReferenceGradients reference_, magnitude_;
  attention::ReferenceGradients naive_[4];  // by storage
  double score_scale_ = 0;
};

// Draws that have a backward pass: pages are norm ones. No infinity is a value and, in its key, makes a score of -inf: its
// weight is 0, and 0 times infinity is NaN in forward's output and so in delta, which the reference sums without the key.
inline Draw draw_for_backward(Random& random) {
  Draw d = draw_all(random, false);
  if (d.keys == Keys::panel_pages) d.keys = Keys::norm_pages;
  d.options.page_layout = PageLayout::norm;
  d.non_finite = d.non_finite && !d.values_of_keys;
  return d;
}

}  // namespace opst::test
