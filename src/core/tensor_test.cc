#include "opst/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

namespace opst {
namespace {

std::vector<int64_t> shape_of(const ConstTensor& t) { return {t.shape, t.shape + t.rank}; }
std::vector<int64_t> strides_of(const ConstTensor& t) { return {t.strides, t.strides + t.rank}; }
using Sizes = std::vector<int64_t>;

static_assert(std::is_trivially_copyable_v<Tensor> && std::is_trivially_copyable_v<ConstTensor>);
static_assert(std::is_convertible_v<Tensor, ConstTensor> && !std::is_convertible_v<ConstTensor, Tensor>);

TEST(DType, SizesAndNames) {
  const std::pair<const char*, int64_t> expected[] = {{"f32", 4},  {"f64", 8},     {"bf16", 2},   {"f16", 2},
                                                      {"i8", 1},   {"u8", 1},      {"i32", 4},    {"i64", 8},
                                                      {"bool", 1}, {"f8_e4m3", 1}, {"f8_e5m2", 1}};
  int i = 0;
  for (const auto& [name, bytes] : expected) {
    const DType dtype = static_cast<DType>(i++);
    EXPECT_STREQ(to_string(dtype), name);
    EXPECT_EQ(size_bytes(dtype), bytes) << name;
  }
}

TEST(Tensor, ContiguousIsRowMajor) {
  float data[24];
  const Tensor t = Tensor::contiguous(DType::f32, {2, 3, 4}, data);
  EXPECT_EQ(shape_of(t), (Sizes{2, 3, 4}));
  EXPECT_EQ(strides_of(t), (Sizes{12, 4, 1}));
  EXPECT_EQ(t.num_elements(), 24);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.data, data);
  EXPECT_EQ(to_string(t), "f32 [2, 3, 4]");
}

TEST(Tensor, RankLimits) {
  double x = 0;
  const Tensor scalar = Tensor::contiguous(DType::f64, {}, &x);
  EXPECT_EQ(scalar.rank, 0);
  EXPECT_EQ(scalar.num_elements(), 1);
  EXPECT_TRUE(scalar.is_contiguous());
  EXPECT_EQ(to_string(scalar), "f64 []");
  EXPECT_EQ(Tensor::contiguous(DType::f64, {1, 1, 1, 1, 1}, &x).rank, 5);
  const Tensor refused = Tensor::contiguous(DType::f64, {1, 1, 1, 1, 1, 1}, &x);
  EXPECT_EQ(refused.rank, 0);
  EXPECT_EQ(refused.data, nullptr);  // so that every operator refuses it
}

TEST(Tensor, EmptyAndHugeShapesAreHarmless) {
  const Tensor empty = Tensor::contiguous(DType::f32, {2, 0, 3}, nullptr);
  EXPECT_EQ(empty.num_elements(), 0);
  EXPECT_EQ(strides_of(empty), (Sizes{3, 3, 1}));
  EXPECT_TRUE(empty.is_contiguous());
  EXPECT_EQ(empty.narrowed(0, 1, 1).selected(2, 1).data, nullptr);
  const int64_t huge = int64_t{1} << 40;
  const Tensor overflow = Tensor::contiguous(DType::f32, {huge, huge, huge}, nullptr);
  EXPECT_EQ(overflow.strides[0], INT64_MAX);
}

TEST(Tensor, Views) {
  std::vector<int32_t> data(2 * 3 * 4 * 5);
  std::iota(data.begin(), data.end(), 0);
  const Tensor t = Tensor::contiguous(DType::i32, {2, 3, 4, 5}, data.data());
  const auto first = [](const ConstTensor& view) { return *static_cast<const int32_t*>(view.data); };

  const Tensor swapped = t.transposed(1, 2);
  EXPECT_EQ(shape_of(swapped), (Sizes{2, 4, 3, 5}));
  EXPECT_EQ(strides_of(swapped), (Sizes{60, 5, 20, 1}));
  EXPECT_FALSE(swapped.is_contiguous());
  EXPECT_TRUE(swapped.transposed(2, 1).is_contiguous());

  const Tensor part = t.narrowed(2, 1, 2);
  EXPECT_EQ(shape_of(part), (Sizes{2, 3, 2, 5}));
  EXPECT_EQ(first(part), 5);
  EXPECT_FALSE(part.is_contiguous());
  EXPECT_TRUE(t.narrowed(0, 1, 1).is_contiguous());
  EXPECT_EQ(first(t.narrowed(0, 1, 1)), 60);

  const ConstTensor chosen = ConstTensor(t).selected(1, 2);
  EXPECT_EQ(shape_of(chosen), (Sizes{2, 4, 5}));
  EXPECT_EQ(strides_of(chosen), (Sizes{60, 5, 1}));
  EXPECT_EQ(first(chosen), 40);
  EXPECT_EQ(first(t.selected(3, 4).selected(2, 3).selected(1, 2).selected(0, 1)), 119);
}

TEST(Tensor, ContiguityIgnoresStridesOfSingleIndices) {
  float data[6];
  Tensor t = Tensor::contiguous(DType::f32, {2, 1, 3}, data);
  t.strides[1] = 1000;
  EXPECT_TRUE(t.is_contiguous());
  t.strides[0] = 4;
  EXPECT_FALSE(t.is_contiguous());
}

TEST(Tensor, AlignedAtMultiplesOfAnElement) {
  alignas(8) char memory[32];
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::i64}) {
    for (int64_t at = 0; at < 16; ++at) {
      EXPECT_EQ(ConstTensor::contiguous(dtype, {1}, memory + at).is_aligned(), at % size_bytes(dtype) == 0);
    }
  }
}

TEST(Buffer, AlignedAndUsableAtEverySize) {
  const int64_t huge_page = int64_t{2} << 20;
  for (int64_t bytes :
       {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{4097}, huge_page - 1, huge_page, huge_page + 1, 3 * huge_page}) {
    Result<Buffer> buffer = Buffer::allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << bytes;
    EXPECT_EQ(buffer.value().size_bytes(), bytes);
    const auto address = reinterpret_cast<uintptr_t>(buffer.value().data());
    EXPECT_EQ(address % (bytes >= huge_page ? static_cast<uintptr_t>(huge_page) : 64), 0u) << bytes;
    std::memset(buffer.value().data(), 1, static_cast<size_t>(bytes));
  }
}

TEST(Buffer, EmptyNegativeAndImpossibleSizes) {
  EXPECT_EQ(Buffer::allocate(0).value().data(), nullptr);
  const Status negative = Buffer::allocate(-1).status();
  EXPECT_EQ(negative.code(), StatusCode::invalid_argument);
  EXPECT_EQ(negative.message(), "Buffer::allocate: size_bytes is -1, but must be >= 0");
  for (int64_t bytes : {int64_t{1} << 60, INT64_MAX}) {
    EXPECT_EQ(Buffer::allocate(bytes).status().code(), StatusCode::out_of_memory);
  }
}

TEST(Buffer, MovesItsMemory) {
  Buffer a = std::move(Buffer::allocate(100).value());
  void* const data = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(a.size_bytes(), 0);
  Buffer c;
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.tensor(DType::u8, {10, 10}).data, data);
  c = Buffer();
  EXPECT_EQ(c.data(), nullptr);
}

}  // namespace
}  // namespace opst
