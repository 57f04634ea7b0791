#include "opst/status.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "core/guarded.h"

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
