// The builders of opst/block_patterns.h. Their arrays are new ones of NumPy, which own what the builder has allocated:
// how long `columns` is nobody knows before.
#include "opst/block_patterns.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <tuple>
#include <utility>

#include "view.h"

namespace opst::python {

namespace {

using Integers = nb::ndarray<nb::numpy, int64_t>;

Integers array_of(const ConstTensor& tensor, const nb::capsule& owner) {
  size_t shape[kMaxRank];
  for (int i = 0; i < tensor.rank; ++i) shape[i] = static_cast<size_t>(tensor.shape[i]);
  return Integers(const_cast<void*>(tensor.data), static_cast<size_t>(tensor.rank), shape, owner);
}

// (row_offsets, columns) of what `build` gives, which runs without the interpreter's lock.
template <class F>
std::tuple<Integers, Integers> arrays_of(F&& build) {
  Result<BlockMaskBuffer> built = [&] {
    const nb::gil_scoped_release released;
    return build();
  }();
  auto kept = std::make_unique<BlockMaskBuffer>(value_or_raise(std::move(built)));
  const BlockMask mask = kept->mask;
  const nb::capsule owner(kept.get(), [](void* buffer) noexcept { delete static_cast<BlockMaskBuffer*>(buffer); });
  kept.release();
  return {array_of(mask.row_offsets, owner), array_of(mask.columns, owner)};
}

}  // namespace

void bind_block_patterns(nb::module_& module) {
  module.def(
      "make_block_mask",
      [](int64_t query_len, int64_t kv_len, int64_t block_q, int64_t block_kv, int64_t heads, bool bottom_right,
         bool causal, std::optional<int64_t> window_left, std::optional<int64_t> window_right, int64_t dilation,
         int64_t global_tokens, int64_t stride, int64_t random, uint64_t seed, const View* documents) {
        const BlockPattern pattern = {
            .query_len = query_len,
            .kv_len = kv_len,
            .block_q = block_q,
            .block_kv = block_kv,
            .heads = heads,
            .alignment = bottom_right ? CausalAlignment::bottom_right : CausalAlignment::top_left,
            .causal = causal,
            .window_left = window_left,
            .window_right = window_right,
            .dilation = dilation,
            .global = global_tokens,
            .stride = stride,
            .random = random,
            .seed = seed,
            .documents = input_or_empty(documents)};
        return arrays_of([&] { return make_block_mask(pattern); });
      },
      nb::arg("query_len"), nb::arg("kv_len"), nb::arg("block_q"), nb::arg("block_kv"), nb::arg("heads"),
      nb::arg("bottom_right"), nb::arg("causal"), nb::arg("window_left").none(), nb::arg("window_right").none(),
      nb::arg("dilation"), nb::arg("global_tokens"), nb::arg("stride"), nb::arg("random"), nb::arg("seed"),
      nb::arg("documents").none());
  module.def(
      "block_mask_of",
      [](const View& mask, int64_t block_q, int64_t block_kv) {
        return arrays_of([&] { return block_mask_of(mask.input(), block_q, block_kv); });
      },
      nb::arg("mask"), nb::arg("block_q"), nb::arg("block_kv"));
}

}  // namespace opst::python
