#include "opst/kv_cache.h"

#include <algorithm>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "kv_cache/kernels.h"
#include "kv_cache/page_layout.h"
#include "machine/context_impl.h"

namespace opst {
namespace {

using kv_cache::TokenRows;

const kv_cache::Kernels& kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return avx512::kv_cache::kKernels;
  if (isa >= Isa::avx2) return avx2::kv_cache::kKernels;
#endif
  static_cast<void>(isa);
  return generic::kv_cache::kKernels;
}

// Elements of a word of panel32 (PanelStep, for a dtype that is known when the code runs).
int64_t panel_step(DType dtype) { return dtype == DType::bf16 ? PanelStep<bf16>::kValue : PanelStep<float>::kValue; }

int type_index(DType dtype) { return dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 1 : 2; }

const void* at(const ConstTensor& tensor, int64_t offset) {
  return static_cast<const char*>(tensor.data) + offset * size_bytes(tensor.dtype);
}
void* at(const Tensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.data) + offset * size_bytes(tensor.dtype);
}

// Token t of `from` [tokens, heads, dim] and row `row` of block `block` of `to` [blocks, rows, heads, dim].
TokenRows token_rows(const ConstTensor& from, int64_t t, const Tensor& to, int64_t block, int64_t row) {
  return {.num_heads = from.shape[1],
          .head_dim = from.shape[2],
          .from = at(from, t * from.strides[0]),
          .from_head_stride = from.strides[1],
          .from_dim_stride = from.strides[2],
          .to = at(to, block * to.strides[0] + row * to.strides[1]),
          .to_head_stride = to.strides[2],
          .to_dim_stride = to.strides[3]};
}

// Slots are dealt out to tasks in runs, and a task writes its slots in token order: so of several tokens with one slot
// the last wins, whoever runs the tasks.
constexpr int64_t kRunSlots = 16;
constexpr int64_t kMaxTasks = 16;
constexpr int64_t kTaskElements = int64_t{1} << 14;

}  // namespace

const char* to_string(PageLayout layout) { return layout == PageLayout::norm ? "norm" : "panel32"; }

Status supports(PageLayout layout, DType dtype, int64_t block_size, int64_t head_dim) {
  return guarded([&]() -> Status {
    const auto refused = [&](const char* what, const std::string& is, const char* must) {
      return Status::unsupported(std::string("page layout ") + to_string(layout) + ": " + what + " is " + is +
                                 ", but must be " + must);
    };
    if (block_size < 1) return refused("block_size", std::to_string(block_size), ">= 1");
    if (layout == PageLayout::norm) {
      if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return {};
      return refused("dtype", to_string(dtype), "f32, bf16 or f16");
    }
    if (dtype != DType::f32 && dtype != DType::bf16) return refused("dtype", to_string(dtype), "f32 or bf16");
    if (block_size % kPanelRows != 0) return refused("block_size", std::to_string(block_size), "a multiple of 32");
    if (dtype == DType::bf16 && head_dim % 2 != 0) {
      return refused("head_dim", std::to_string(head_dim), "even for bf16");
    }
    return {};
  });
}

Tensor key_pages(PageLayout layout, DType dtype, const PageSizes& s, void* data) {
  if (!supports(layout, dtype, s.block_size, s.head_dim).ok()) return {};
  if (layout == PageLayout::norm) {
    return Tensor::contiguous(dtype, {s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim}, data);
  }
  const int64_t step = panel_step(dtype);
  return Tensor::contiguous(
      dtype, {s.num_blocks, s.num_kv_heads, s.block_size / kPanelRows, s.head_dim / step, kPanelRows * step}, data);
}

Tensor value_pages(PageLayout layout, DType dtype, const PageSizes& s, void* data) {
  if (!supports(layout, dtype, s.block_size, s.head_dim).ok()) return {};
  if (layout == PageLayout::norm) {
    return Tensor::contiguous(dtype, {s.num_blocks, s.block_size, s.num_kv_heads, s.value_head_dim}, data);
  }
  const int64_t step = panel_step(dtype);
  return Tensor::contiguous(dtype, {s.num_blocks, s.num_kv_heads, s.block_size / step, step * s.value_head_dim}, data);
}

Status scatter_pa_kv_cache(Context& context, const ConstTensor& key, const ConstTensor& value,
                           const ConstTensor& slot_mapping, const Tensor& key_cache, const Tensor& value_cache,
                           const ScatterOptions& options) {
  return guarded([&]() -> Status {
    if (options.layout != PageLayout::norm) {
      return Status::unsupported("scatter_pa_kv_cache: page layout panel32 cannot be written yet");
    }
    ShapeCheck check("scatter_pa_kv_cache");
    check.tensor("key", key).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "num_kv_heads", "head_dim"});
    check.tensor("value", value).dtype({key.dtype}).dims({"tokens", "num_kv_heads", "value_head_dim"});
    check.tensor("slot_mapping", slot_mapping).dtype({DType::i64}).dims({"tokens"});
    check.output("key_cache", key_cache)
        .dtype({DType::f32, DType::bf16, DType::f16})
        .dims({"num_blocks", "block_size", "num_kv_heads", "head_dim"});
    check.output("value_cache", value_cache)
        .dtype({key_cache.dtype})
        .dims({"num_blocks", "block_size", "num_kv_heads", "value_head_dim"});
    if (!check.ok()) return check.status();
    const int64_t num_blocks = check["num_blocks"];
    const int64_t block_size = check["block_size"];
    if (const Status status = supports(options.layout, key_cache.dtype, block_size); !status.ok()) {
      return {status.code(), "scatter_pa_kv_cache: " + status.message()};
    }

    // No overflow: a tensor's elements, hence its slots, were counted above, unless it has no heads.
    const int64_t tokens = check["tokens"];
    int64_t num_slots = 0;
    if (__builtin_mul_overflow(num_blocks, block_size, &num_slots)) num_slots = INT64_MAX;
    const auto slot_of = [&](int64_t t) {
      return static_cast<const int64_t*>(slot_mapping.data)[t * slot_mapping.strides[0]];
    };
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t slot = slot_of(t);
      if (slot >= -1 && slot < num_slots) continue;
      check.require(false, std::string("slot_mapping[") + std::to_string(t) + "] is " + std::to_string(slot) +
                               ", but the cache has " + std::to_string(num_blocks) + " blocks of " +
                               std::to_string(block_size) + " rows = " + std::to_string(num_slots) +
                               " slots (-1 skips a token)");
      return check.status();
    }

    const auto write_token =
        kernels(context.machine().isa).write_token[type_index(key.dtype)][type_index(key_cache.dtype)];
    const int64_t elements = tokens * check["num_kv_heads"] * (check["head_dim"] + check["value_head_dim"]);
    if (elements == 0) return {};
    const int64_t num_tasks = std::clamp<int64_t>(elements / kTaskElements, 1, kMaxTasks);
    context.impl().pool.parallel_for(num_tasks, [&](int64_t task, int) {
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t slot = slot_of(t);
        if (slot < 0 || slot / kRunSlots % num_tasks != task) continue;
        write_token(token_rows(key, t, key_cache, slot / block_size, slot % block_size));
        write_token(token_rows(value, t, value_cache, slot / block_size, slot % block_size));
      }
    });
    return {};
  });
}

}  // namespace opst
