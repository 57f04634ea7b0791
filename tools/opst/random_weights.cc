#include "random_weights.h"

#include <algorithm>
#include <cstring>

#include "matmul_case.h"
#include "opst/quant.h"
#include "testing/elements.h"

namespace opst::tools {

namespace {

// As many copies of the first as are asked for, or all.
template <class Matrix>
std::vector<Matrix> repeated(const std::vector<Matrix>& matrices, int64_t copies) {
  return copies == 0 ? matrices : std::vector<Matrix>(static_cast<size_t>(copies), matrices.front());
}

template <class Weight, class Matrix>
Weight packed(Context& context, const std::vector<Matrix>& matrices, bool stack, int64_t copies) {
  if (!stack) return value_or_fail(Weight::pack(context, matrices.front()));
  const std::vector<Matrix> all = repeated(matrices, copies);
  return value_or_fail(Weight::pack_stack(context, std::span<const Matrix>(all)));
}

// Row r becomes row r + by of what is read: another matrix, at the speed of copying.
void turn_rows(const void* from, void* to, int64_t rows, int64_t row_bytes, int64_t by) {
  const auto first = static_cast<size_t>(by % std::max<int64_t>(1, rows) * row_bytes),
             all = static_cast<size_t>(rows * row_bytes);
  std::memcpy(to, static_cast<const char*>(from) + first, all - first);
  std::memcpy(static_cast<char*>(to) + all - first, from, first);
}

}  // namespace

RandomWeights::RandomWeights(const std::string& dtype, int64_t count, int64_t n, int64_t k, test::Random& random)
    : n_(n), k_(k) {
  const auto allocate = [&](int64_t bytes) -> Buffer& {
    memory_.push_back(value_or_fail(Buffer::allocate(bytes)));
    return memory_.back();
  };
  for (int64_t e = 0; e < count; ++e) {
    if (is_integers(dtype)) {
      const bool bytes = dtype == "i8";
      const Tensor q = allocate(n * k / (bytes ? 1 : 2)).tensor(bytes ? DType::i8 : DType::u8, {n, bytes ? k : k / 2});
      const Tensor scales = allocate(n * size_bytes(DType::f32)).tensor(DType::f32, {n, 1});
      ints_.push_back({.q = q, .scales = scales});
      if (e > 0) {
        turn_rows(ints_[0].q.data, q.data, n, q.shape[1], e);
        turn_rows(ints_[0].scales.data, scales.data, n, size_bytes(DType::f32), e);
        continue;
      }
      for (int64_t i = 0; i < q.num_elements(); ++i) {
        static_cast<int8_t*>(q.data)[i] = static_cast<int8_t>(random.integer(-127, 127));
      }
      for (int64_t i = 0; i < n; ++i) test::set(scales, i, random.uniform(0.5, 1) / 127);
      continue;
    }
    const QuantFormat format = parse_quant_format(dtype).value();
    const int64_t row = k / block_values(format) * block_bytes(format);
    Buffer& bytes = allocate(n * row);
    blocks_.push_back({format, n, k, bytes.data(), bytes.size_bytes()});
    if (e > 0) {
      turn_rows(blocks_[0].data, bytes.data(), n, row, e);
    } else if (block_values(format) == 1) {
      test::fill(bytes.tensor(format == QuantFormat::f32 ? DType::f32 : x_dtype_of(dtype), {n, k}), test::Fill::normal,
                 random);
    } else {  // blocks of bytes whose halves are finite and small
      for (int64_t i = 0; i < bytes.size_bytes(); ++i) {
        static_cast<unsigned char*>(bytes.data())[i] = static_cast<unsigned char>(random.bits() & 0x3f);
      }
    }
  }
}

PackedWeight RandomWeights::pack(Context& context, bool stack, int64_t copies) const {
  return packed<PackedWeight>(context, blocks_, stack, copies);
}

PackedIntWeight RandomWeights::pack_integers(Context& context, bool stack, int64_t copies) const {
  return packed<PackedIntWeight>(context, ints_, stack, copies);
}

std::vector<double> RandomWeights::values(Context& context, int64_t e) const {
  const auto i = static_cast<size_t>(e);
  if (integers()) {  // not rounded to f32: products of integers are exact, and so is what they are compared with
    std::vector<double> exact;
    const auto* const bytes = static_cast<const uint8_t*>(ints_[i].q.data);
    const bool halves = ints_[i].q.dtype == DType::u8;
    for (int64_t t = 0; t < n_ * k_; ++t) {
      const int byte = bytes[halves ? t / 2 : t], bits = halves ? (t % 2 == 0 ? byte & 15 : byte >> 4) : byte;
      const int steps = halves ? 16 : 256, q = bits < steps / 2 ? bits : bits - steps;
      exact.push_back(q * test::get(ints_[i].scales, t / k_));
    }
    return exact;
  }
  const Buffer floats = value_or_fail(Buffer::allocate(n_ * k_ * size_bytes(DType::f32)));
  const Tensor out = floats.tensor(DType::f32, {n_, k_});
  const Status status = dequantize(context, blocks_[i], out);
  if (!status.ok()) run_error(status.message());
  return test::to_doubles(out);
}

Buffer RandomWeights::unpacked() const {
  const int64_t bytes = matrix_bytes();
  Buffer all = value_or_fail(Buffer::allocate(bytes * static_cast<int64_t>(blocks_.size())));
  auto* to = static_cast<char*>(all.data());
  for (const QuantMatrix& matrix : blocks_) {
    std::memcpy(to, matrix.data, static_cast<size_t>(bytes));
    to += bytes;
  }
  return all;
}

int64_t RandomWeights::matrix_bytes() const {
  return integers() ? ints_.front().q.num_elements() : blocks_.front().size_bytes;
}

}  // namespace opst::tools
