// What the opaque handles of opst.h are.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <variant>

#include "machine/context_impl.h"
#include "opst/context.h"
#include "opst/grouped_matmul.h"
#include "opst/matmul.h"
#include "opst/opst.h"

namespace opst::c_api {

// The first word of a handle, by which one of another kind is told.
enum class Tag : uint64_t { context = 0x6f70737443545854, executor = 0x6f70737445584543, weight = 0x6f70737457474854 };

using AnyWeight = std::variant<PackedWeight, PackedIntWeight>;
// A call of the core with its arguments, which takes its scratch memory from the context that it is given.
using Call = std::function<Status(Context&)>;

}  // namespace opst::c_api

struct opst_context {
  static constexpr opst::c_api::Tag kTag = opst::c_api::Tag::context;
  static constexpr const char* kName = "opst_context";
  opst::c_api::Tag tag = kTag;
  opst::Context context;
};

struct opst_weight {
  static constexpr opst::c_api::Tag kTag = opst::c_api::Tag::weight;
  static constexpr const char* kName = "opst_weight";
  opst::c_api::Tag tag = kTag;
  std::shared_ptr<const opst::c_api::AnyWeight> weight;  // executors keep it, too
};

struct opst_executor {
  opst_executor(const char* function_name, const opst::Context& of, opst::c_api::Call planned)
      : function(function_name), context(std::make_unique<opst::Context::Impl>(of.impl())), call(std::move(planned)) {}

  static constexpr opst::c_api::Tag kTag = opst::c_api::Tag::executor;
  static constexpr const char* kName = "opst_executor";
  opst::c_api::Tag tag = kTag;
  const char* function;   // that runs it
  opst::Context context;  // the caller's machine and threads; scratch memory that is lent
  opst::c_api::Call call;
  int64_t workspace_bytes = 0;
  std::atomic<bool> running = false, repeatable = false;
  bool has_run = false;  // of whoever set running
};
