// Packed weights: the only handles that own memory of the caller's numbers.
#include <algorithm>
#include <vector>

#include "c_api/arguments.h"
#include "core/guarded.h"
#include "opst/quant.h"

using namespace opst;
using c_api::AnyWeight;
using c_api::Arguments;

static_assert(OPST_FORMAT_BF16 == static_cast<int>(QuantFormat::bf16) && kNumQuantFormats == OPST_FORMAT_BF16 + 1);
static_assert(OPST_FORMAT_Q4_K == static_cast<int>(QuantFormat::q4_k));

namespace {

// More matrices are a mistake: a stack's groups are at most so many (grouped_matmul.h).
constexpr int64_t kMostMatrices = 1 << 20;

// What `make(core's context)` packs, a Result of a weight, becomes a handle. It may find further arguments wrong.
template <class Make>
opst_status pack(Arguments& arguments, opst_context* context, opst_weight** packed, const Make& make) {
  if (!arguments.ok()) return arguments.status();
  const Status status = guarded([&]() -> Status {
    auto made = make(context->context);
    if (!arguments.ok() || !made.ok()) return made.status();
    *packed = new opst_weight{.weight = std::make_shared<AnyWeight>(std::move(made.value()))};
    return {};
  });
  arguments.require(status);
  return arguments.status();
}

// Where a function packs, `count` matrices at `matrices`.
Arguments begin(const char* function, opst_context* context, opst_weight** packed, const void* matrices,
                int64_t count) {
  Arguments arguments(function);
  arguments.result<opst_weight*>("packed", packed, nullptr);
  arguments.handle("context", context);
  arguments.require(matrices != nullptr, "matrices is NULL");
  arguments.positive("count", count);
  arguments.require(count <= kMostMatrices, "count is beyond 2^20");
  return arguments;
}

}  // namespace

opst_status opst_weight_pack(opst_context* context, const opst_tensor* weight, opst_weight** packed) {
  Arguments arguments("opst_weight_pack");
  arguments.result<opst_weight*>("packed", packed, nullptr);
  arguments.handle("context", context);
  const ConstTensor tensor = arguments.tensor("weight", weight);
  return pack(arguments, context, packed, [&](Context& c) {
    return tensor.rank == 3 ? PackedWeight::pack_stack(c, tensor) : PackedWeight::pack(c, tensor);
  });
}

opst_status opst_weight_pack_blocks(opst_context* context, const opst_quant_matrix* matrices, int64_t count,
                                    opst_weight** packed) {
  Arguments arguments = begin("opst_weight_pack_blocks", context, packed, matrices, count);
  return pack(arguments, context, packed, [&](Context& c) -> Result<PackedWeight> {
    std::vector<QuantMatrix> all;
    for (int64_t i = 0; i < count; ++i) {
      const opst_quant_matrix& m = matrices[i];
      all.push_back(
          {arguments.enumerator("format", m.format, QuantFormat::bf16), m.rows, m.cols, m.data, m.size_bytes});
    }
    return count == 1 ? PackedWeight::pack(c, all[0]) : PackedWeight::pack_stack(c, all);
  });
}

opst_status opst_weight_pack_int(opst_context* context, const opst_int_matrix* matrices, int64_t count,
                                 opst_weight** packed) {
  Arguments arguments = begin("opst_weight_pack_int", context, packed, matrices, count);
  return pack(arguments, context, packed, [&](Context& c) -> Result<PackedIntWeight> {
    std::vector<IntMatrix> all;
    for (int64_t i = 0; i < count; ++i) {
      all.push_back({.q = arguments.tensor("q", matrices[i].q),
                     .scales = arguments.tensor("scales", matrices[i].scales),
                     .zeros = arguments.optional("zeros", matrices[i].zeros)});
    }
    return count == 1 ? PackedIntWeight::pack(c, all[0]) : PackedIntWeight::pack_stack(c, all);
  });
}

void opst_weight_destroy(opst_weight* weight) { delete weight; }
