#include "testing/naive_attention.h"

#include <algorithm>
#include <cstring>

#include "core/int_math.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "testing/naive_loops.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, test, NaiveTable, kNaiveTable, naive_table)

namespace test {
namespace {

const NaiveLoops& loops_for(Isa isa, DType dtype) {
  if (dtype == DType::f64) return naive_table(Isa::generic).f64;
  const NaiveTable& table = naive_table(isa);
  return dtype == DType::bf16 ? table.bf16 : dtype == DType::f16 ? table.f16 : table.f32;
}

int64_t work_size(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

struct Sizes {
  explicit Sizes(const NaiveProblem& p)
      : batch(p.query.shape[0]),
        heads(p.query.shape[1]),
        queries(p.query.shape[2]),
        dim(p.query.shape[3]),
        kv_heads(p.key.shape[1]),
        keys(p.key.shape[2]),
        value_dim(p.value.shape[3]),
        size(size_bytes(p.query.dtype)) {}
  int64_t batch, heads, queries, dim, kv_heads, keys, value_dim, size;

  int64_t rows() const { return batch * heads * queries; }
  int64_t matrix_bytes() const { return rows() * keys * size; }
  // The (batch, KV head) pair of a row.
  int64_t kv_head(int64_t row) const {
    const int64_t b = row / (heads * queries), h = row / queries % heads;
    return b * kv_heads + h / (heads / kv_heads);
  }
};

const char* at(const void* base, int64_t offset) { return static_cast<const char*>(base) + offset; }
char* at(void* base, int64_t offset) { return static_cast<char*>(base) + offset; }

// [.., keys, dim] -> [.., dim, keys]
void transpose(Context& context, const ConstTensor& from, const Buffer& to) {
  const int64_t keys = from.shape[2], dim = from.shape[3], size = size_bytes(from.dtype);
  context.impl().pool.parallel_for(from.shape[0] * from.shape[1] * dim, [&](int64_t column, int) {
    const int64_t head = column / dim, d = column % dim;
    const char* source = at(from.data, (head * keys * dim + d) * size);
    char* target = at(to.data(), column * keys * size);
    for (int64_t j = 0; j < keys; ++j) {
      std::memcpy(target + j * size, source + j * dim * size, static_cast<size_t>(size));
    }
  });
}

Buffer memory(int64_t bytes) {
  Result<Buffer> buffer = Buffer::allocate(bytes);
  return buffer.ok() ? std::move(buffer.value()) : Buffer();
}

}  // namespace

int64_t NaiveAttention::bytes(const NaiveProblem& problem, bool backward) {
  const Sizes s(problem);
  const int64_t columns = s.batch * s.kv_heads * s.keys * (s.dim + (backward ? s.value_dim : 0)) * s.size;
  return columns + (backward ? 3 : 2) * s.matrix_bytes();
}

NaiveAttention::NaiveAttention(const NaiveProblem& problem, bool backward) : problem_(problem) {
  const Sizes s(problem);
  key_columns_ = memory(s.batch * s.kv_heads * s.keys * s.dim * s.size);
  if (backward) value_columns_ = memory(s.batch * s.kv_heads * s.keys * s.value_dim * s.size);
  if (backward) grads_ = memory(s.matrix_bytes());
  probabilities_ = memory(s.matrix_bytes());
  if (key_columns_.data() != nullptr && probabilities_.data() != nullptr && (!backward || grads_.data() != nullptr)) {
    scores_ = memory(s.matrix_bytes());
  }
}

void NaiveAttention::forward(Context& context) {
  const Sizes s(problem_);
  const NaiveLoops& loops = loops_for(context.machine().isa, problem_.query.dtype);
  ThreadPool& pool = context.impl().pool;
  const int64_t row_bytes = s.keys * s.size;
  const Buffer work = memory(context.num_threads() * s.keys * work_size(problem_.query.dtype));
  const auto work_of = [&](int worker) { return at(work.data(), worker * s.keys * work_size(problem_.query.dtype)); };
  transpose(context, problem_.key, key_columns_);
  pool.parallel_for(s.rows(), [&](int64_t row, int worker) {
    const float* mask = problem_.mask == nullptr ? nullptr : problem_.mask + row % s.queries * s.keys;
    loops.multiply(at(problem_.query.data, row * s.dim * s.size),
                   at(key_columns_.data(), s.kv_head(row) * s.keys * s.dim * s.size), s.dim, s.keys, problem_.scale,
                   mask, work_of(worker), at(scores_.data(), row * row_bytes));
  });
  pool.parallel_for(s.rows(), [&](int64_t row, int worker) {
    loops.softmax(at(scores_.data(), row * row_bytes), s.keys, work_of(worker),
                  at(probabilities_.data(), row * row_bytes));
  });
  pool.parallel_for(s.rows(), [&](int64_t row, int worker) {
    loops.weigh(at(probabilities_.data(), row * row_bytes),
                at(problem_.value.data, s.kv_head(row) * s.keys * s.value_dim * s.size), s.keys, s.value_dim,
                work_of(worker), at(problem_.out.data, row * s.value_dim * s.size));
  });
}

void NaiveAttention::backward(Context& context, const NaiveGradients& g) {
  const Sizes s(problem_);
  const DType dtype = problem_.query.dtype;
  const NaiveLoops& loops = loops_for(context.machine().isa, dtype);
  ThreadPool& pool = context.impl().pool;
  const int64_t row_bytes = s.keys * s.size;
  const Buffer work = memory(context.num_threads() * s.keys * work_size(dtype));
  const auto work_of = [&](int worker) { return at(work.data(), worker * s.keys * work_size(dtype)); };
  transpose(context, problem_.value, value_columns_);
  pool.parallel_for(s.rows(), [&](int64_t row, int worker) {
    loops.multiply(at(g.grad_out.data, row * s.value_dim * s.size),
                   at(value_columns_.data(), s.kv_head(row) * s.keys * s.value_dim * s.size), s.value_dim, s.keys, 1,
                   nullptr, work_of(worker), at(grads_.data(), row * row_bytes));
  });
  pool.parallel_for(s.rows(), [&](int64_t row, int worker) {
    loops.softmax_grad(at(probabilities_.data(), row * row_bytes), at(grads_.data(), row * row_bytes), s.keys,
                       problem_.scale, work_of(worker), at(scores_.data(), row * row_bytes));
  });
  pool.parallel_for(s.rows(), [&](int64_t row, int worker) {
    loops.weigh(at(scores_.data(), row * row_bytes), at(problem_.key.data, s.kv_head(row) * s.keys * s.dim * s.size),
                s.keys, s.dim, work_of(worker), at(g.grad_query.data, row * s.dim * s.size));
  });
  // dK and dV: a task owns some keys of a (batch, KV head) pair, and goes over the rows of its query heads.
  constexpr int64_t kKeys = 64;
  const int64_t group = s.heads / s.kv_heads, pieces = ceil_div(s.keys, kKeys);
  const Buffer sums = memory(context.num_threads() * kKeys * 768 * work_size(dtype));
  const auto gather = [&](const Buffer& weights, const ConstTensor& rows, int64_t dim, const Tensor& to) {
    pool.parallel_for(s.batch * s.kv_heads * pieces, [&](int64_t task, int worker) {
      const int64_t head = task / pieces, first = task % pieces * kKeys, count = std::min(kKeys, s.keys - first);
      void* sum = at(sums.data(), worker * kKeys * 768 * work_size(dtype));
      std::memset(sum, 0, static_cast<size_t>(count * dim * work_size(dtype)));
      for (int64_t row = head * group * s.queries; row < (head + 1) * group * s.queries; ++row) {
        loops.add_outer(at(weights.data(), row * row_bytes + first * s.size), at(rows.data, row * dim * s.size), count,
                        dim, sum);
      }
      loops.round(sum, count * dim, at(to.data, (head * s.keys + first) * dim * s.size));
    });
  };
  gather(scores_, problem_.query, s.dim, g.grad_key);
  gather(probabilities_, g.grad_out, s.value_dim, g.grad_value);
}

}  // namespace test
}  // namespace opst
