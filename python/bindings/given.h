// Arguments by name, of operators that take many of them: the Python side passes dictionaries.
#pragma once

#include <nanobind/stl/vector.h>

#include <variant>
#include <vector>

#include "opst/grouped_matmul.h"
#include "opst/moe_layer.h"
#include "view.h"

namespace opst::python {

// Weights of several ranks, one behind another: what matmul_all_to_all takes.
struct PackedParts {
  using Parts = std::variant<std::vector<PackedWeight>, std::vector<PackedIntWeight>>;
  explicit PackedParts(Parts all) : parts(std::move(all)) {}
  PackedParts(PackedParts&&) = default;  // no copies: a packed weight has none

  Parts parts;
};

// Views and packed weights, or options, by name. Who is absent was not given.
class Given {
 public:
  explicit Given(const nb::dict& values) : values_(values) {}

  ConstTensor input(const char* name) const { return input_or_empty(view(name)); }
  Tensor output(const char* name) const { return output_or_empty(view(name), name); }
  GroupedWeight weight(const char* name) const {
    if (!values_.contains(name)) return ConstTensor();
    const nb::object value = values_[name];
    if (nb::isinstance<PackedWeight>(value)) return nb::cast<const PackedWeight&>(value);
    if (nb::isinstance<PackedIntWeight>(value)) return nb::cast<const PackedIntWeight&>(value);
    if (nb::isinstance<PackedParts>(value)) {
      return std::visit([](const auto& parts) { return GroupedWeight(parts); },
                        nb::cast<const PackedParts&>(value).parts);
    }
    return input(name);
  }
  template <class T>
  T option(const char* name) const {
    return nb::cast<T>(values_[name]);
  }

 private:
  const View* view(const char* name) const {
    return values_.contains(name) ? nb::cast<const View*>(values_[name]) : nullptr;
  }

  const nb::dict& values_;
};

// moe.cc
MoeLayerInputs layer_inputs(const Given& in);
MoeLayerOptions layer_options(const Given& o);

// matmul.cc: a file's matrix as bytes (u8 of any shape, contiguous), and integers with their scales.
QuantMatrix quant_matrix(const View& bytes, const std::string& format, int64_t rows, int64_t cols);
IntMatrix int_matrix(const View& q, const View& scales, const View* zeros);

}  // namespace opst::python
