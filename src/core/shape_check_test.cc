#include "core/shape_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "core/int_math.h"
#include "testing/extremes.h"

namespace opst {
namespace {

alignas(64) char memory[1 << 16];

ConstTensor view(DType dtype, std::initializer_list<int64_t> shape, int64_t at_byte = 0) {
  return ConstTensor::contiguous(dtype, shape, memory + at_byte);
}

ConstTensor strided(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides, int64_t at_byte = 0) {
  ConstTensor t;
  t.dtype = dtype;
  t.rank = static_cast<int>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) t.shape[i] = shape[i], t.strides[i] = strides[i];
  t.data = memory + at_byte;
  return t;
}

TEST(ShapeCheck, BindsNamesAndAcceptsWhatAgrees) {
  ShapeCheck check("op");
  check.tensor("query", view(DType::f32, {2, 3, 4})).dims({"batch", "len", "head_dim"}).dtype({DType::f32});
  check.tensor("key", view(DType::bf16, {2, 7, 4}))
      .dims({"batch", "kv_len", "head_dim"})
      .dtype({DType::f32, DType::bf16});
  check.tensor("scale", view(DType::f32, {4, 8})).dims({"head_dim", "8"}).unit_inner_stride();
  check.tensor("scalar", view(DType::f32, {})).dims({}).unit_inner_stride();
  check.output("out", view(DType::f32, {2, 3}, 1 << 15)).dims({"batch", "len"});
  check.require(check["kv_len"] == 7, "never seen");
  EXPECT_TRUE(check.ok()) << check.status().message();
  EXPECT_EQ(check["batch"], 2);
  EXPECT_EQ(check["len"], 3);
  EXPECT_EQ(check["kv_len"], 7);
  EXPECT_EQ(check["head_dim"], 4);
  EXPECT_EQ(check["unknown"], 0);
}

// One refused paragraph each, and the whole message.
template <class Paragraph>
void expect_refused(const std::string& message, const Paragraph& paragraph) {
  ShapeCheck check("op");
  paragraph(check);
  EXPECT_FALSE(check.ok());
  EXPECT_EQ(check.status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(check.status().message(), message);
}

TEST(ShapeCheck, DimensionsThatDisagree) {
  expect_refused("op: key dim 3 (head_dim) is 64, but query set head_dim = 128", [](ShapeCheck& check) {
    check.tensor("query", view(DType::f32, {1, 2, 2, 128})).dims({"batch", "num_heads", "query_len", "head_dim"});
    check.tensor("key", view(DType::f32, {1, 2, 5, 64})).dims({"batch", "num_kv_heads", "kv_len", "head_dim"});
  });
  expect_refused("op: square dim 1 (n) is 3, but square set n = 2", [](ShapeCheck& check) {
    check.tensor("square", view(DType::f32, {2, 3})).dims({"n", "n"});
  });
  expect_refused("op: packed dim 1 is 7, but must be 8", [](ShapeCheck& check) {
    check.tensor("packed", view(DType::f32, {2, 7})).dims({"n", "8"});
  });
}

TEST(ShapeCheck, Rank) {
  expect_refused("op: key has rank 2, but [batch, len, head_dim] has rank 3", [](ShapeCheck& check) {
    check.tensor("key", view(DType::f32, {2, 3})).dims({"batch", "len", "head_dim"});
  });
  for (int rank : {-1, 6}) {
    expect_refused("op: key has rank " + std::to_string(rank) + ", but it must be from 0 to 5",
                   [rank](ShapeCheck& check) {
                     ConstTensor t = view(DType::f32, {2, 3});
                     t.rank = rank;
                     check.tensor("key", t).dims({"a", "b"});
                   });
  }
}

TEST(ShapeCheck, LeadingDimensions) {
  ShapeCheck check("op");
  check.tensor("x", view(DType::f32, {2, 3, 4, 5, 6})).leading_dims(4, "k");
  check.tensor("y", view(DType::f32, {2, 3, 4, 5, 7})).leading_dims(5, nullptr);
  check.tensor("sums", view(DType::f32, {2, 3, 4, 5})).leading_dims(4, nullptr);
  check.tensor("row", view(DType::f32, {6})).leading_dims(0, "k");
  EXPECT_TRUE(check.ok()) << check.status().message();
  EXPECT_EQ(check["dim_3"], 5);
  EXPECT_EQ(check["dim_4"], 7);
  EXPECT_EQ(check["k"], 6);
  expect_refused("op: x has rank 3, but [dim_0, k] has rank 2", [](ShapeCheck& c) {
    c.tensor("x", view(DType::f32, {2, 3, 4})).leading_dims(1, "k");
  });
  expect_refused("op: sums dim 1 (dim_1) is 4, but x set dim_1 = 3", [](ShapeCheck& c) {
    c.tensor("x", view(DType::f32, {2, 3, 9})).leading_dims(2, "k");
    c.tensor("sums", view(DType::f32, {2, 4})).leading_dims(2, nullptr);
  });
}

TEST(ShapeCheck, DTypes) {
  expect_refused("op: key is f64, but must be f32, bf16 or f16", [](ShapeCheck& check) {
    check.tensor("key", view(DType::f64, {2})).dtype({DType::f32, DType::bf16, DType::f16});
  });
  expect_refused("op: key is i8, but must be f32",
                 [](ShapeCheck& check) { check.tensor("key", view(DType::i8, {2})).dtype({DType::f32}); });
}

TEST(ShapeCheck, NegativeSizesAndStrides) {
  expect_refused("op: key dim 1 is -3, but must be >= 0", [](ShapeCheck& check) {
    check.tensor("key", strided(DType::f32, {2, -3}, {3, 1}));
  });
  expect_refused("op: key stride 0 is -3, but must be >= 0", [](ShapeCheck& check) {
    check.tensor("key", strided(DType::f32, {2, 3}, {-3, 1}));
  });
}

TEST(ShapeCheck, InnerStride) {
  expect_refused("op: key stride 1 is 2, but must be 1", [](ShapeCheck& check) {
    check.tensor("key", strided(DType::f32, {2, 3}, {6, 2})).unit_inner_stride();
  });
  ShapeCheck check("op");
  check.tensor("one", strided(DType::f32, {2, 1}, {6, 2})).unit_inner_stride();
  EXPECT_TRUE(check.ok());
}

TEST(ShapeCheck, NullData) {
  expect_refused("op: key has null data, but 6 elements: f32 [2, 3]", [](ShapeCheck& check) {
    check.tensor("key", ConstTensor::contiguous(DType::f32, {2, 3}, nullptr));
  });
  ShapeCheck check("op");
  check.tensor("key", ConstTensor::contiguous(DType::f32, {2, 0}, nullptr)).dims({"a", "b"});
  check.output("out", ConstTensor::contiguous(DType::f32, {0, 3}, nullptr)).dims({"b", "c"});
  EXPECT_TRUE(check.ok()) << check.status().message();
}

// Elements between the addresses of their type: undefined behaviour to read, though most processors allow it.
TEST(ShapeCheck, MisalignedData) {
  ConstTensor key = view(DType::f32, {2, 3});
  key.data = static_cast<const char*>(key.data) + 1;
  expect_refused(
      "op: key f32 [2, 3] lies 1 beyond a multiple of 4 bytes, but elements must lie at multiples of their size",
      [&](ShapeCheck& check) { check.tensor("key", key); });
  for (const DType dtype : {DType::f64, DType::i64, DType::f32, DType::i32, DType::bf16, DType::f16, DType::i8}) {
    for (int64_t offset = 0; offset < 8; ++offset) {
      ConstTensor some = view(dtype, {2, 3}), none = view(dtype, {2, 0});
      some.data = none.data = static_cast<const char*>(some.data) + offset;
      ShapeCheck check("op");
      check.tensor("some", some);
      EXPECT_EQ(check.ok(), offset % size_bytes(dtype) == 0) << to_string(dtype) << " " << offset;
      EXPECT_EQ(is_sound(some), check.ok());
      ShapeCheck empty("op");
      empty.output("none", none);
      EXPECT_TRUE(empty.ok()) << empty.status().message();
    }
  }
}

TEST(ShapeCheck, UnknownDType) {
  ConstTensor t = view(DType::f32, {2});
  t.dtype = static_cast<DType>(77);
  expect_refused("op: key has dtype 77, which is no DType", [&](ShapeCheck& check) { check.tensor("key", t); });
  Tensor out = Tensor::contiguous(DType::f32, {2}, memory);
  out.dtype = static_cast<DType>(99);
  expect_refused("op: out has dtype 99, which is no DType", [&](ShapeCheck& check) { check.output("out", out); });
}

TEST(ShapeCheck, SizesBeyondAnyMemory) {
  const int64_t huge = int64_t{1} << 40;
  expect_refused(
      "op: key f32 [1099511627776, 1099511627776] has more bytes than the limit of 2^56, repeated elements counted",
      [&](ShapeCheck& check) {
        check.tensor("key", ConstTensor::contiguous(DType::f32, {huge, huge}, memory));
      });
  // Repeated elements take no memory, but must be countable.
  expect_refused(
      "op: key f32 [1099511627776, 1099511627776] has more bytes than the limit of 2^56, repeated elements counted",
      [&](ShapeCheck& check) {
        check.tensor("key", strided(DType::f32, {huge, huge}, {0, 0}));
      });
  // So must be the sizes of a tensor without elements: operators multiply some of them.
  expect_refused(
      "op: key f32 [1099511627776, 0, 1099511627776] has more bytes than the limit of 2^56, repeated elements counted",
      [&](ShapeCheck& check) {
        check.tensor("key", strided(DType::f32, {huge, 0, huge}, {0, 0, 0}));
      });
  expect_refused("op: key f64 [2] spans more bytes than the limit of 2^56",
                 [&](ShapeCheck& check) { check.tensor("key", strided(DType::f64, {2}, {INT64_MAX})); });
  // The largest that are accepted, and one more.
  ShapeCheck check("op");
  check.tensor("i8", strided(DType::i8, {kMaxBytes - 1}, {0}));
  check.tensor("f64", strided(DType::f64, {2}, {kMaxBytes / 8 - 2}));
  EXPECT_TRUE(check.ok()) << check.status().message();
  check.tensor("f64", strided(DType::f64, {2}, {kMaxBytes / 8 - 1}));
  EXPECT_FALSE(check.ok());
}

// NumPy gives such dimensions stride 0 or what slicing left, x[::-1] of one row a negative one.
TEST(ShapeCheck, StridesThatMeanNothing) {
  for (const int64_t wild : {int64_t{-7}, INT64_MIN, INT64_MAX, int64_t{0}, int64_t{5}}) {
    ShapeCheck check("op");
    check.tensor("one_row", strided(DType::f32, {1, 4, 1}, {wild, 1, wild})).unit_inner_stride();
    check.tensor("no_row", strided(DType::f32, {0, 4}, {wild, wild})).unit_inner_stride();
    check.output("no_column", strided(DType::f32, {3, 0}, {wild, wild})).unit_inner_stride();
    check.output("one_of_out", strided(DType::f32, {1, 4}, {wild, 1}, 64));
    EXPECT_TRUE(check.ok()) << wild << ": " << check.status().message();

    EXPECT_TRUE(strided(DType::f32, {0, 4}, {wild, wild}).is_contiguous());
    EXPECT_TRUE(strided(DType::f32, {1, 4}, {wild, 1}).is_contiguous());
    const ConstTensor row = normal_strides(strided(DType::f32, {3, 1, 4, 1}, {100, wild, 7, wild}));
    EXPECT_EQ(std::vector<int64_t>(row.strides, row.strides + 4), (std::vector<int64_t>{100, 28, 7, 1}));
    const ConstTensor none = normal_strides(strided(DType::f32, {3, 0, 4}, {wild, wild, wild}));
    EXPECT_EQ(std::vector<int64_t>(none.strides, none.strides + 3), (std::vector<int64_t>{0, 0, 1}));
  }
}

// As many tensors as any operator names, and more: attention's backward call with every option names 26.
TEST(ShapeCheck, ManyTensors) {
  ShapeCheck check("op");
  for (int i = 0; i < 32; ++i) check.output("t", view(DType::f32, {4}, 64 * i));
  EXPECT_TRUE(check.ok()) << check.status().message();
}

TEST(IsSound, SaysWhatTheCheckSays) {
  test::Random random(test::seed());
  test::Extremes draw(random);
  int sound = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<int64_t> sizes;
    for (int64_t rank = random.integer(0, 4); rank > 0; --rank) sizes.push_back(draw.size());
    const ConstTensor tensor = draw.output(DType::f32, sizes);
    ShapeCheck check("op");
    check.tensor("x", tensor);
    EXPECT_EQ(is_sound(tensor), check.ok()) << check.status().message();
    sound += check.ok() ? 1 : 0;
  }
  EXPECT_GT(sound, 300);
  EXPECT_LT(sound, 2700);
}

TEST(Size, StopsAtTheLimit) {
  const int64_t sizes[] = {0,
                           1,
                           3,
                           7,
                           int64_t{1} << 20,
                           int64_t{1} << 31,
                           int64_t{1} << 55,
                           kMaxBytes - 1,
                           kMaxBytes,
                           int64_t{1} << 62,
                           INT64_MAX};
  for (const int64_t a : sizes) {
    for (const int64_t b : sizes) {
      const auto exact = [](__int128 x) { return static_cast<int64_t>(std::min<__int128>(x, kMaxBytes)); };
      EXPECT_EQ((Size(a) * b).value(), exact(__int128{a} * b)) << a << " " << b;
      EXPECT_EQ((Size(a) + b).value(), exact(__int128{a} + b)) << a << " " << b;
      if (b == 0) continue;
      const __int128 up = (__int128{a} + b - 1) / b;
      EXPECT_EQ(ceil_div(a, b), static_cast<int64_t>(up));
      EXPECT_EQ(round_up(a, b), static_cast<int64_t>(up * b > INT64_MAX ? __int128{INT64_MAX} / b * b : up * b));
    }
  }
}

TEST(ShapeCheck, Outputs) {
  expect_refused(
      "op: out f32 [2, 3] has strides [0, 1], with which elements share addresses, but every element of an output "
      "needs its own",
      [](ShapeCheck& check) {
        check.output("out", strided(DType::f32, {2, 3}, {0, 1}));
      });
  expect_refused("op: out f32 [2, 3] overlaps query f32 [4, 3] in memory, but an output must not",
                 [](ShapeCheck& check) {
                   check.tensor("key", view(DType::f32, {3}, 1 << 12));
                   check.tensor("query", view(DType::f32, {4, 3}));
                   check.output("out", view(DType::f32, {2, 3}, 24));
                 });
  expect_refused("op: lse f32 [2] overlaps out f32 [2, 3] in memory, but an output must not", [](ShapeCheck& check) {
    check.output("out", view(DType::f32, {2, 3}));
    check.output("lse", view(DType::f32, {2}, 20));
  });
  ShapeCheck check("op");
  check.tensor("a", view(DType::f32, {6}));
  check.tensor("b", view(DType::f32, {6}));  // inputs may share memory
  check.output("out", view(DType::f32, {6}, 24));
  EXPECT_TRUE(check.ok()) << check.status().message();
}

TEST(ShapeCheck, RequireAndFirstFailureStays) {
  expect_refused("op: num_heads = 9 is not a multiple of num_kv_heads = 2", [](ShapeCheck& check) {
    check.require(true, "not this")
        .require(false, "num_heads = 9 is not a multiple of num_kv_heads = 2")
        .require(false, "nor this");
    check.tensor("key", view(DType::f64, {2})).dtype({DType::f32}).dims({"a", "b"}).unit_inner_stride();
    check.output("out", strided(DType::f32, {2}, {0}));
  });
}

TEST(ShapeCheck, LazyMessagesAreMadeOnlyForFailures) {
  expect_refused("op: made now", [](ShapeCheck& check) {
    check.require(true, []() -> std::string {
      ADD_FAILURE() << "made for a condition that holds";
      return "";
    });
    check.require(false, [] { return std::string("made now"); });
  });
}

TEST(ShapeCheck, SizesThatFollowFromAShape) {
  expect_refused("op: pages holds head_dim = 6, but query set head_dim = 8", [](ShapeCheck& check) {
    check.tensor("query", view(DType::f32, {2, 8})).dims({"tokens", "head_dim"});
    check.tensor("pages", view(DType::f32, {4, 3, 2})).dims({"blocks", "pairs", "2"});
    check.holds("pages", "head_dim", 6);
  });
  expect_refused("op: key dim 1 (head_dim) is 8, but pages set head_dim = 6", [](ShapeCheck& check) {
    check.holds("pages", "head_dim", 6).holds("more pages", "head_dim", 6);
    EXPECT_EQ(check["head_dim"], 6);
    check.tensor("key", view(DType::f32, {2, 8})).dims({"tokens", "head_dim"});
    check.holds("key", "tokens", 3);
  });
}

TEST(ShapeCheck, NamesInAnArray) {
  const char* const names[] = {"a", "b", "a"};
  expect_refused("op: t dim 2 (a) is 4, but t set a = 2", [&](ShapeCheck& check) {
    check.tensor("t", view(DType::f32, {2, 3, 4})).dims(names);
  });
  expect_refused("op: t has rank 1, but [a, b] has rank 2",
                 [&](ShapeCheck& check) { check.tensor("t", view(DType::f32, {2})).dims(std::span(names, 2)); });
}

TEST(ShapeCheck, AnotherFunctionsStatus) {
  ShapeCheck check("op");
  check.require(Status());
  EXPECT_TRUE(check.ok());
  check.require(Status::unsupported("no such layout")).require(Status::invalid_argument("nor this"));
  EXPECT_EQ(check.status().code(), StatusCode::unsupported);
  EXPECT_EQ(check.status().message(), "op: no such layout");
}

// Of tensors without memory only dtypes and shapes are compared, and sizes < 0 are names.
TEST(ShapeCheck, DeclaredTensors) {
  class Names : public ShapeCheck::SizeNames {
   public:
    std::string text(int64_t size) const override { return size < 0 ? "rows" : std::to_string(size); }
  } const names;
  const auto declared = [](DType dtype, std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(dtype, shape, nullptr);
  };
  const auto message = [&](const ConstTensor& weight, const ConstTensor& out) {
    ShapeCheck check("op", names);
    check.tensor("x", declared(DType::f32, {-1, 32})).dtype({DType::f32}).dims({"rows", "k"});
    check.tensor("weight", weight).dtype({DType::f32, DType::bf16}).dims({"8", "k"});
    check.output("out", out).dims({"rows"});
    check.holds("out", "blocks", 3).holds("x", "k", 32);
    EXPECT_EQ(check["rows"], -1);
    EXPECT_STREQ(check.setter("k"), "x");
    EXPECT_EQ(check.setter("n"), nullptr);
    return check.status().message();
  };
  const ConstTensor weight = declared(DType::bf16, {8, 32}), out = declared(DType::f32, {-1});
  EXPECT_EQ(message(weight, out), "");
  EXPECT_EQ(message(declared(DType::f32, {8, 31}), out), "op: weight dim 1 (k) is 31, but x set k = 32");
  EXPECT_EQ(message(declared(DType::f32, {8, -1}), out), "op: weight dim 1 (k) is rows, but x set k = 32");
  EXPECT_EQ(message(declared(DType::f32, {-1, 32}), out), "op: weight dim 0 is rows, but must be 8");
  EXPECT_EQ(message(declared(DType::f16, {8, 32}), out), "op: weight is f16, but must be f32 or bf16");
  EXPECT_EQ(message(weight, declared(DType::f32, {4})), "op: out dim 0 (rows) is 4, but x set rows = rows");
  EXPECT_EQ(message(weight, declared(DType::f32, {-1, 4})), "op: out [rows, 4] has rank 2, but [rows] has rank 1");
}

TEST(ShapeCheck, ADtypeThatIsAllowedTwiceIsNamedOnce) {
  const auto message = [](DType given, DType of_x) {
    ShapeCheck check("op");
    const double zeros[4] = {};
    check.tensor("bias", ConstTensor::contiguous(given, {4}, zeros)).dtype({DType::f32, of_x}).dims({"n"});
    return check.status().message();
  };
  EXPECT_EQ(message(DType::f64, DType::f32), "op: bias is f64, but must be f32");
  EXPECT_EQ(message(DType::f64, DType::bf16), "op: bias is f64, but must be f32 or bf16");
}

TEST(ShapeCheck, MoreNamesOrTensorsThanItHolds) {
  std::vector<std::string> names;
  for (int i = 0; i < 40; ++i) names.push_back(std::string("n").append(std::to_string(i)));
  expect_refused("op: t dim 2 (n32) is one name more than a check holds", [&](ShapeCheck& check) {
    for (size_t i = 0; i + 5 <= names.size(); i += 5) {
      check.tensor("t", view(DType::f32, {1, 1, 1, 1, 1}))
          .dims({names[i].c_str(), names[i + 1].c_str(), names[i + 2].c_str(), names[i + 3].c_str(),
                 names[i + 4].c_str()});
    }
  });
  expect_refused("op: n32 is one tensor more than a check holds", [&](ShapeCheck& check) {
    for (const std::string& name : names) check.tensor(name.c_str(), view(DType::f32, {1}));
  });
}

// Ground truth by listing every byte.
std::set<const char*> bytes_of(const ConstTensor& t) {
  std::set<const char*> bytes;
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    int64_t rest = i;
    int64_t offset = 0;
    for (int d = t.rank - 1; d >= 0; --d) {
      offset += rest % t.shape[d] * t.strides[d];
      rest /= t.shape[d];
    }
    for (int64_t b = 0; b < size_bytes(t.dtype); ++b) {
      bytes.insert(static_cast<const char*>(t.data) + offset * size_bytes(t.dtype) + b);
    }
  }
  return bytes;
}

bool share_bytes(const ConstTensor& a, const ConstTensor& b) {
  const auto bytes_a = bytes_of(a);
  for (const char* byte : bytes_of(b)) {
    if (bytes_a.count(byte) != 0) return true;
  }
  return false;
}

TEST(MayOverlap, NeighboursAndCopies) {
  EXPECT_FALSE(may_overlap(view(DType::f32, {6}), view(DType::f32, {6}, 24)));
  EXPECT_TRUE(may_overlap(view(DType::f32, {6}), view(DType::f32, {6}, 23)));
  EXPECT_TRUE(may_overlap(view(DType::f32, {6}, 23), view(DType::f32, {6})));
  EXPECT_TRUE(may_overlap(view(DType::f32, {6}), view(DType::i8, {1}, 12)));
  EXPECT_FALSE(may_overlap(view(DType::f32, {6}), view(DType::f32, {0, 3}, 4)));
  EXPECT_TRUE(may_overlap(strided(DType::f32, {5, 2}, {0, 1}), view(DType::f32, {1}, 4)));
  EXPECT_FALSE(may_overlap(strided(DType::f32, {5, 2}, {0, 1}), view(DType::f32, {1}, 8)));
}

// Parts of one fused buffer [batch 2][seq 5][ (query heads 6 | key heads 2 | value heads 2) x head_dim 4 ].
TEST(MayOverlap, FusedBufferParts) {
  const ConstTensor fused = view(DType::f32, {2, 5, 10, 4});
  const ConstTensor q = fused.narrowed(2, 0, 6);
  const ConstTensor k = fused.narrowed(2, 6, 2);
  const ConstTensor v = fused.narrowed(2, 8, 2);
  const std::vector<ConstTensor> parts = {q, k, v};
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = 0; j < parts.size(); ++j) {
      EXPECT_EQ(may_overlap(parts[i], parts[j]), i == j) << i << ", " << j;
      // The same with heads outside, and one token of one against all of the other.
      EXPECT_EQ(may_overlap(parts[i].transposed(1, 2), parts[j]), i == j) << i << ", " << j;
      EXPECT_EQ(may_overlap(parts[i].selected(1, 3), parts[j].transposed(1, 2)), i == j) << i << ", " << j;
    }
  }
  EXPECT_TRUE(may_overlap(fused.narrowed(2, 0, 7), k));
  EXPECT_TRUE(may_overlap(fused.narrowed(2, 5, 2), q));
  EXPECT_FALSE(may_overlap(fused.narrowed(1, 0, 2), fused.narrowed(1, 2, 3)));
  EXPECT_FALSE(may_overlap(fused.narrowed(3, 0, 2), fused.narrowed(3, 2, 2)));
  EXPECT_TRUE(may_overlap(fused.narrowed(3, 0, 3), fused.narrowed(3, 2, 2)));
}

TEST(MayOverlap, EvenAndOddElements) {
  EXPECT_FALSE(may_overlap(strided(DType::f32, {8}, {2}), strided(DType::f32, {8}, {2}, 4)));
  EXPECT_FALSE(may_overlap(strided(DType::f32, {8}, {4}), strided(DType::f32, {5}, {6}, 4)));
  EXPECT_TRUE(may_overlap(strided(DType::f32, {8}, {2}), strided(DType::f32, {8}, {2}, 6)));
  EXPECT_TRUE(may_overlap(strided(DType::f32, {8}, {3}), strided(DType::f32, {8}, {2})));
}

// Never says "disjoint" of views that share a byte.
TEST(MayOverlap, NeverMissesASharedByte) {
  uint64_t state = 12345;
  const auto random = [&](int64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>(state >> 33) % bound;
  };
  int shared = 0;
  int proved_disjoint = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto draw = [&] {
      const auto rank = static_cast<size_t>(1 + random(3));
      std::vector<int64_t> shape, strides;
      for (size_t d = 0; d < rank; ++d) shape.push_back(1 + random(4)), strides.push_back(random(13));
      return strided(random(2) == 0 ? DType::f32 : DType::i8, shape, strides, random(64));
    };
    const ConstTensor a = draw();
    const ConstTensor b = draw();
    const bool truth = share_bytes(a, b);
    const bool claim = may_overlap(a, b);
    EXPECT_TRUE(claim || !truth) << to_string(a) << " and " << to_string(b) << ", draw " << i;
    EXPECT_EQ(claim, may_overlap(b, a)) << "draw " << i;
    shared += truth;
    proved_disjoint += !claim;

    const bool aliased = static_cast<int64_t>(bytes_of(a).size()) < a.num_elements() * size_bytes(a.dtype);
    EXPECT_TRUE(may_alias_itself(a) || !aliased) << to_string(a) << ", draw " << i;
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(proved_disjoint, 1000);
}

TEST(MayAliasItself, LayoutsOfEveryDay) {
  EXPECT_FALSE(may_alias_itself(view(DType::f32, {2, 3, 4})));
  EXPECT_FALSE(may_alias_itself(view(DType::f32, {2, 3, 4}).transposed(0, 2)));
  EXPECT_FALSE(may_alias_itself(view(DType::f32, {2, 3, 4}).narrowed(1, 1, 2)));
  EXPECT_FALSE(may_alias_itself(view(DType::f32, {})));
  EXPECT_FALSE(may_alias_itself(strided(DType::f32, {1, 3}, {0, 1})));
  EXPECT_FALSE(may_alias_itself(strided(DType::f32, {0, 3}, {0, 0})));
  EXPECT_TRUE(may_alias_itself(strided(DType::f32, {2, 3}, {0, 1})));
  EXPECT_TRUE(may_alias_itself(strided(DType::f32, {2, 3}, {2, 1})));
  EXPECT_FALSE(may_alias_itself(strided(DType::f32, {2, 3}, {3, 1})));
  EXPECT_TRUE(may_alias_itself(strided(DType::f32, {3, 3}, {INT64_MAX, 1})));
}

}  // namespace
}  // namespace opst
