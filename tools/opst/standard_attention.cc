#include "standard_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "opst/matmul.h"
#include "opst/rowwise.h"

namespace opst::tools {

namespace {

constexpr int64_t kRowsOfThread = 512;  // two tasks of a product

// One matrix [rows, columns] of each tensor [batch, heads, rows, columns] at a time.
template <class Step>
Status for_each_head(const ConstTensor& query, const Step& step) {
  for (int64_t b = 0; b < query.shape[0]; ++b) {
    for (int64_t h = 0; h < query.shape[1]; ++h) {
      const auto of = [&](const auto& tensor) { return tensor.selected(0, b).selected(0, h); };
      if (Status status = step(of); !status.ok()) return status;
    }
  }
  return {};
}

// matmul copies its x into scratch memory, which for a whole matrix of scores would be another one: rows at a time.
Status weigh(Context& context, const ConstTensor& scores, const ConstTensor& columns, const Tensor& out) {
  const int64_t rows = scores.shape[0], most = kRowsOfThread * context.num_threads();
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    const Status status =
        matmul(context, scores.narrowed(0, first, count), columns.transposed(0, 1), out.narrowed(0, first, count));
    if (!status.ok()) return status;
  }
  return {};
}

// The system hands out memory when it is first written: on so many threads, which then hold it.
void touch(const Buffer& buffer, int threads) {
  auto* bytes = static_cast<char*>(buffer.data());
  const int64_t size = buffer.size_bytes();
  std::vector<std::jthread> workers;
  for (int i = 0; i < threads; ++i) {
    const int64_t first = size / threads * i, end = i + 1 == threads ? size : size / threads * (i + 1);
    workers.emplace_back([=] { std::memset(bytes + first, 0, static_cast<size_t>(end - first)); });
  }
}

}  // namespace

Status StandardAttention::make(const Context& context, std::initializer_list<int64_t> shape, Tensor& tensor) {
  tensor = Tensor::contiguous(inputs_.query.dtype, shape, nullptr);
  Result<Buffer> buffer = Buffer::allocate(tensor.num_elements() * opst::size_bytes(tensor.dtype));
  if (!buffer.ok()) return buffer.status();
  touch(buffer.value(), context.num_threads());
  tensor.data = buffer.value().data();
  buffers_.push_back(std::move(buffer.value()));
  return {};
}

Result<StandardAttention> StandardAttention::create(const Context& context, const AttentionCase& data, bool train) {
  const AttentionProblem& p = data.problem();
  StandardAttention made;
  made.inputs_ = data.inputs();
  made.scale_ = static_cast<float>(1 / std::sqrt(static_cast<double>(p.head_dim)));
  Status status = made.make(context, {p.batch, p.num_heads, p.query_len, p.value_head_dim}, made.out_);
  const auto also = [&](std::initializer_list<int64_t> shape, Tensor& tensor) {
    if (status.ok()) status = made.make(context, shape, tensor);
  };
  also({p.batch, p.num_heads, p.query_len, p.kv_len}, made.scores_);
  made.weights_ = made.scores_;
  if (train) {
    also({p.batch, p.num_heads, p.query_len, p.kv_len}, made.weights_);
    also({p.batch, p.num_heads, p.query_len, p.kv_len}, made.grad_weights_);
    also({p.batch, p.num_heads, p.query_len, p.head_dim}, made.gradients_.grad_query);
    also({p.batch, p.num_heads, p.kv_len, p.head_dim}, made.gradients_.grad_key);
    also({p.batch, p.num_heads, p.kv_len, p.value_head_dim}, made.gradients_.grad_value);
  }
  if (!status.ok()) return status;
  return made;
}

int64_t StandardAttention::size_bytes() const {
  int64_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.size_bytes();
  return total;
}

Status StandardAttention::forward(Context& context) const {
  const ConstTensor &q = inputs_.query, &k = inputs_.key, &v = inputs_.value;
  Status status = for_each_head(q, [&](const auto& of) { return matmul(context, of(q), of(k), of(scores_)); });
  if (status.ok()) status = softmax(context, scores_, weights_, {.scale = scale_});
  if (!status.ok()) return status;
  return for_each_head(q, [&](const auto& of) { return weigh(context, of(weights_), of(v), of(out_)); });
}

// Products of a transposed matrix are written as those of its columns: matmul reads a weight that lies [k, n] in place.
Status StandardAttention::backward(Context& context, const ConstTensor& grad_out) const {
  const ConstTensor &q = inputs_.query, &k = inputs_.key, &v = inputs_.value;
  const AttentionGradients& g = gradients_;
  const auto columns = [](const auto& matrix) { return matrix.transposed(0, 1); };
  Status status = for_each_head(q, [&](const auto& of) {
    return matmul(context, columns(of(grad_out)), columns(of(weights_)), columns(of(g.grad_value)));
  });
  if (!status.ok()) return status;
  status = for_each_head(q, [&](const auto& of) { return matmul(context, of(grad_out), of(v), of(grad_weights_)); });
  if (status.ok()) status = softmax_backward(context, grad_weights_, weights_, scores_, {.scale = scale_});
  if (!status.ok()) return status;
  status = for_each_head(q, [&](const auto& of) { return weigh(context, of(scores_), of(k), of(g.grad_query)); });
  if (!status.ok()) return status;
  return for_each_head(q, [&](const auto& of) {
    return matmul(context, columns(of(q)), columns(of(scores_)), columns(of(g.grad_key)));
  });
}

}  // namespace opst::tools
