// View: a tensor that lives in Python, as the library sees it. No bytes are copied, in either direction.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include "opst/context.h"
#include "opst/kv_cache.h"
#include "opst/matmul.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst::python {

namespace nb = nanobind;

// Shape, strides and dtype of any object with DLPack or the buffer protocol; holds the object while it lives.
class View {
 public:
  // dtype: the meaning of 16-bit or 8-bit elements that the producer cannot name ("bf16" or "f16" in uint16, "bool" in
  // uint8). Throws TypeError for what is no array of the host's memory, ValueError for a dtype or rank that no operator
  // takes.
  View(nb::handle object, const std::optional<std::string>& dtype);

  // As an input, and as an output: ValueError where the producer says that it is read-only.
  ConstTensor input() const { return tensor_; }
  Tensor output(const char* name) const;

  const Tensor& tensor() const { return tensor_; }
  bool read_only() const { return read_only_; }

  View transposed(int a, int b) const;
  // Dimension dim of n * size elements as two, [n, size].
  View split(int dim, int64_t n) const;
  // The same with another dimension of size 1 in front.
  View unsqueezed() const;

 private:
  int checked_dim(int dim) const;

  nb::ndarray<nb::ro> owner_;
  Tensor tensor_;
  bool read_only_ = false;
};

// The tensor that a DLPack capsule holds, valid while the capsule is; nothing where it is not in the host's memory, or
// of a dtype or rank that no operator takes. Cheaper than a View, which holds the object: 0.35 us for the four of a
// call.
std::optional<Tensor> tensor_of_capsule(nb::handle capsule);

// ValueError, MemoryError or RuntimeError with the status's text.
void raise_if_failed(const Status& status);
[[noreturn]] void raise(PyObject* type, const std::string& message);

template <class T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise_if_failed(result.status());
  return std::move(result.value());
}

// Runs `call`, which gives a Status, without the interpreter's lock.
template <class F>
void run(F&& call) {
  Status status;
  {
    const nb::gil_scoped_release released;
    status = call();
  }
  raise_if_failed(status);
}

inline ConstTensor input_or_empty(const View* view) { return view != nullptr ? view->input() : ConstTensor{}; }
inline Tensor output_or_empty(const View* view, const char* name) {
  return view != nullptr ? view->output(name) : Tensor{};
}

// "none", "silu", "swiglu" ..
Activation parse_activation(const std::string& name);
// "norm" or "panel32".
PageLayout parse_layout(const std::string& name);
// "halves" or "pairs".
RopeStyle parse_style(const std::string& name);

// What each room adds to the module.
void bind_view(nb::module_& module);
void bind_context(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_block_patterns(nb::module_& module);
void bind_rowwise(nb::module_& module);
void bind_matmul(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_moe(nb::module_& module);
void bind_mc2(nb::module_& module);
void bind_model(nb::module_& module);

}  // namespace opst::python
