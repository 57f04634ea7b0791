// Contexts, and views of the caller's memory.
#include <algorithm>
#include <optional>
#include <string>

#include "c_api/arguments.h"
#include "core/guarded.h"

using namespace opst;
using c_api::Arguments;

// The numbers of opst_types.h are those of the core.
static_assert(OPST_INTERNAL == static_cast<int>(StatusCode::internal) && OPST_MAX_RANK == kMaxRank);
static_assert(OPST_WORKSPACE_ALIGNMENT == WorkspacePool::kLentAlignment);
static_assert(OPST_BOOL == static_cast<int>(DType::boolean) && OPST_F8_E5M2 == static_cast<int>(DType::f8_e5m2));

opst_status opst_context_create(const opst_context_options* options, opst_context** context) {
  Arguments arguments("opst_context_create");
  arguments.result<opst_context*>("context", context, nullptr);
  const opst_context_options given = arguments.members("options", options, OPST_CONTEXT_OPTIONS);
  if (!arguments.ok()) return arguments.status();
  return c_api::report(
      arguments.function(), guarded([&]() -> Status {
        std::optional<Isa> isa;
        if (given.isa != nullptr) {
          isa = parse_isa(given.isa);
          if (!isa) {
            return Status::invalid_argument(std::string("options->isa is '") + given.isa + "', which is no level");
          }
        }
        Result<Context> made = Context::create({.isa = isa, .num_threads = given.num_threads});
        if (!made.ok()) return made.status();
        // Threads are started by the first region that can use them: by this one, not by a call's.
        ThreadPool& pool = made.value().impl().pool;
        pool.parallel_for(pool.num_threads(), [](int64_t, int) {});
        *context = new opst_context{.context = std::move(made.value())};
        return {};
      }));
}

void opst_context_destroy(opst_context* context) { delete context; }

opst_status opst_tensor_contiguous(opst_dtype dtype, int32_t rank, const int64_t* shape, void* data,
                                   opst_tensor* tensor) {
  Arguments arguments("opst_tensor_contiguous");
  arguments.result<opst_tensor>("tensor", tensor, {});
  arguments.enumerator("dtype", dtype, DType::f8_e5m2);
  arguments.enumerator("rank", rank, kMaxRank);
  arguments.require(shape != nullptr || rank == 0, "shape is NULL");
  if (!arguments.ok()) return arguments.status();
  opst_tensor made = {dtype, rank, {}, {}, data};
  int64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    made.shape[i] = shape[i];
    made.strides[i] = stride;
    // What no memory holds saturates, as Tensor::contiguous does; the operators refuse it by its name.
    if (__builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride)) stride = INT64_MAX;
  }
  *tensor = made;
  return OPST_OK;
}

opst_status opst_tensor_transpose(opst_tensor* tensor, int32_t a, int32_t b) {
  Arguments arguments("opst_tensor_transpose");
  arguments.tensor("tensor", tensor);
  if (!arguments.ok()) return arguments.status();
  for (const int32_t dim : {a, b}) {
    if (dim < 0 || dim >= tensor->rank) {
      return c_api::fail(OPST_INVALID_ARGUMENT, arguments.function(),
                         "dimension %d is exchanged, but the tensor has rank %d", dim, tensor->rank);
    }
  }
  std::swap(tensor->shape[a], tensor->shape[b]);
  std::swap(tensor->strides[a], tensor->strides[b]);
  return OPST_OK;
}
