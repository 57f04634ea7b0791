#include "opst/status.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/guarded.h"
#include "core/shape_check.h"
#include "core/text.h"

namespace opst {
namespace {

TEST(Status, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::ok);
  EXPECT_EQ(status.message(), "");
}

TEST(Status, KeepsCodeAndMessage) {
  const Status status = Status::invalid_argument("op: query is wrong");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(status.message(), "op: query is wrong");
  EXPECT_EQ(Status::unsupported("x").code(), StatusCode::unsupported);
  EXPECT_EQ(Status::internal("x").code(), StatusCode::internal);
  EXPECT_EQ(Status::out_of_memory().code(), StatusCode::out_of_memory);
}

TEST(Status, CodesHaveNames) {
  EXPECT_STREQ(to_string(StatusCode::ok), "ok");
  EXPECT_STREQ(to_string(StatusCode::invalid_argument), "invalid_argument");
  EXPECT_STREQ(to_string(StatusCode::unsupported), "unsupported");
  EXPECT_STREQ(to_string(StatusCode::out_of_memory), "out_of_memory");
  EXPECT_STREQ(to_string(StatusCode::communication), "communication");
  EXPECT_STREQ(to_string(StatusCode::timeout), "timeout");
  EXPECT_STREQ(to_string(StatusCode::internal), "internal");
}

TEST(Text, JoinsPartsOfEveryKind) {
  const std::string name = "key";
  const char* const unit = " bytes";
  EXPECT_EQ(text(), "");
  EXPECT_EQ(text(name, std::string_view(" dim "), 3, ": ", int64_t{INT64_MIN}, unit, "; ", uint64_t{UINT64_MAX}),
            "key dim 3: -9223372036854775808 bytes; 18446744073709551615");
  EXPECT_EQ(text(0.5f, " ", -1e6, " ", true), std::to_string(0.5f) + " " + std::to_string(-1e6) + " 1");
  // Functions give a part of any kind, other functions too.
  EXPECT_EQ(text([] { return 7; }, [] { return " of "; }, [&] { return [&] { return name; }; }), "7 of key");
}

TEST(Text, AFunctionIsCalledForAFailureAlone) {
  int calls = 0;
  const auto part = [&] { return ++calls; };
  ShapeCheck check("op");
  check.require(true, "never seen", part);
  EXPECT_EQ(calls, 0);
  EXPECT_TRUE(check.ok());
  check.require(false, "call ", part, " of ", 1);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(check.status().message(), "op: call 1 of 1");
}

TEST(NameOf, IsUnknownBeyondTheList) {
  enum class Fruit : uint8_t { apple, pear };
  enum class Signed : int8_t { minus = -1, zero };
  EXPECT_STREQ(name_of(Fruit::apple, {"apple", "pear"}), "apple");
  EXPECT_STREQ(name_of(Fruit::pear, {"apple", "pear"}), "pear");
  for (const int beyond : {2, 3, 255}) EXPECT_STREQ(name_of(static_cast<Fruit>(beyond), {"apple", "pear"}), "unknown");
  EXPECT_STREQ(name_of(Signed::zero, {"zero"}), "zero");
  EXPECT_STREQ(name_of(Signed::minus, {"zero"}), "unknown");
  for (const int beyond : {11, 255}) EXPECT_STREQ(to_string(static_cast<DType>(beyond)), "unknown");
  for (const int beyond : {7, 255}) EXPECT_STREQ(to_string(static_cast<StatusCode>(beyond)), "unknown");
}

TEST(Result, HoldsAValueOrTheReason) {
  Result<int> value = 3;
  EXPECT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  value.value() = 4;
  EXPECT_EQ(value.value(), 4);
  const Result<int> reason = Status::unsupported("op: no");
  EXPECT_FALSE(reason.ok());
  EXPECT_EQ(reason.status().message(), "op: no");
}

TEST(Guarded, PassesResultsAndTurnsExceptionsIntoStatus) {
  EXPECT_TRUE(guarded([]() -> Status { return {}; }).ok());
  EXPECT_EQ(guarded([]() -> Status { return Status::unsupported("no"); }).message(), "no");
  EXPECT_EQ(guarded([]() -> Result<int> { return 7; }).value(), 7);
  const Status memory = guarded([]() -> Status { throw std::bad_alloc(); });
  EXPECT_EQ(memory.code(), StatusCode::out_of_memory);
  EXPECT_EQ(memory.message(), "out of memory");
  EXPECT_EQ(guarded([]() -> Status { throw std::runtime_error("a bug"); }).code(), StatusCode::internal);
  EXPECT_EQ(guarded([]() -> Result<int> { throw 1; }).status().code(), StatusCode::internal);
}

}  // namespace
}  // namespace opst
