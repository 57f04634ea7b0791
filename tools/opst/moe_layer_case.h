// The one call of `opst bench|check moe`: moe_layer_forward of a MoeCase, which stands for all of its steps, and
// moe_layer_backward.
#pragma once

#include <vector>

#include "moe_case.h"
#include "opst/moe_layer.h"

namespace opst::tools {

class MoeLayerCase {
 public:
  // gradients: with what backward() takes and gives, for weights of a float type.
  MoeLayerCase(const MoeCase& data, bool gradients);

  void forward(Context& context) const;
  void backward(Context& context) const;
  // The grouped products among backward(), of rows that the case's steps have permuted and multiplied before.
  void multiply_backward(Context& context) const;
  double backward_flops() const { return data_.flops() * 16 / 6; }  // eight products of the size of down's

  Tensor out;
  // [E, n, k] and [1, n, k], and what backward() gives: those of a shared expert where there is one.
  Tensor grad_out, gate_up, down, shared_gate_up, shared_down;
  MoeLayerGradients gradients;

 private:
  // Memory of the products of some experts, apart.
  struct Products {
    Tensor both, grad_rows;
  };
  Tensor tensor(DType type, std::initializer_list<int64_t> shape);
  Tensor stack(const RandomWeights& weights, int64_t count, const MatmulShape& shape);
  void multiply_gradients(Context& context, const Tensor& x, const Tensor& hidden, const Tensor& grad_rows,
                          const Products& memory, bool shared) const;

  const MoeCase& data_;
  std::vector<Buffer> memory_;
  Tensor grad_slots_;
  Products routed_, shared_;
};

}  // namespace opst::tools
