// What the tests of the C interface share: views as C tensors, a context, both phases of a call in memory between
// forbidden pages.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "opst/opst.h"
#include "opst/tensor.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

inline opst_tensor c_view(const ConstTensor& tensor) {
  opst_tensor c = {static_cast<opst_dtype>(tensor.dtype), tensor.rank, {}, {}, const_cast<void*>(tensor.data)};
  for (int i = 0; i < tensor.rank; ++i) c.shape[i] = tensor.shape[i], c.strides[i] = tensor.strides[i];
  return c;
}

class CContext {
 public:
  explicit CContext(int threads = 1) {
    opst_context_options options = OPST_CONTEXT_OPTIONS;
    options.num_threads = threads;
    EXPECT_EQ(opst_context_create(&options, &context_), OPST_OK) << opst_last_error();
  }
  ~CContext() { opst_context_destroy(context_); }
  CContext(const CContext&) = delete;
  CContext& operator=(const CContext&) = delete;
  operator opst_context*() const { return context_; }

 private:
  opst_context* context_ = nullptr;
};

// A tensor with memory of its own, filled with NaN or at random, that lies between forbidden pages.
struct Numbers {
  Numbers(DType dtype, std::initializer_list<int64_t> shape)
      : memory(Tensor::contiguous(dtype, shape, nullptr).num_elements() * size_bytes(dtype)),
        tensor(memory.tensor(dtype, shape)),
        c(c_view(tensor)) {}
  Numbers(DType dtype, std::initializer_list<int64_t> shape, Random& random, Fill kind = Fill::normal)
      : Numbers(dtype, shape) {
    fill(tensor, kind, random);
  }
  // Integers.
  Numbers(DType dtype, std::initializer_list<int64_t> shape, const std::vector<int64_t>& values)
      : Numbers(dtype, shape) {
    for (size_t i = 0; i < values.size(); ++i) set(tensor, static_cast<int64_t>(i), static_cast<double>(values[i]));
  }
  // Another view of the memory.
  void see_as(const Tensor& view) {
    tensor = view;
    c = c_view(view);
  }

  GuardedBuffer memory;
  Tensor tensor;
  opst_tensor c;
};

using RunPhase = opst_status (*)(void*, int64_t, opst_executor*);

// plan(&workspace_bytes, &executor), then `run` in a workspace of exactly so many bytes, full of NaN.
template <class Plan>
opst_status two_phases(const Plan& plan, RunPhase run) {
  int64_t bytes = -1;
  opst_executor* executor = nullptr;
  const opst_status planned = plan(&bytes, &executor);
  if (planned != OPST_OK) {
    EXPECT_EQ(bytes, 0);
    EXPECT_EQ(executor, nullptr);
    return planned;
  }
  EXPECT_GE(bytes, 0);
  EXPECT_EQ(bytes % OPST_WORKSPACE_ALIGNMENT, 0);
  EXPECT_NE(executor, nullptr);
  const GuardedBuffer workspace(bytes);
  const opst_status status = run(bytes > 0 ? workspace.data() : nullptr, bytes, executor);
  opst_executor_destroy(executor);
  return status;
}

// The doubles of a reference as a tensor.
struct Doubles {
  Doubles(std::vector<double> numbers, const ConstTensor& shape) : values(std::move(numbers)) {
    tensor = shape;
    tensor.dtype = DType::f64;
    int64_t stride = 1;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      tensor.strides[i] = stride;
      stride *= tensor.shape[i];
    }
    tensor.data = values.data();
  }
  std::vector<double> values;
  ConstTensor tensor;
};

}  // namespace opst::test
