// Experts of a test: their weights, the ranks that have them.
#pragma once

#include <vector>

#include "mc2/test_ranks.h"
#include "mc2/test_tensors.h"
#include "opst/grouped_matmul.h"
#include "testing/elements.h"

namespace opst::test {

// Sizes around a tile's.
inline constexpr int64_t kTile = 8;
inline constexpr int64_t kSizes[] = {0, 1, kTile - 1, kTile, kTile + 1, 257};

inline int64_t integer(const ConstTensor& t, int64_t index) { return static_cast<int64_t>(get(t, index)); }

inline std::vector<Communicator> world_of(int ranks, bool direct = true) {
  return std::move(
      Communicator::create_threads(ranks, {.timeout_seconds = 30, .staging_bytes = 1 << 20, .direct_stores = direct})
          .value());
}

inline void expect_ok(const std::vector<Status>& statuses) {
  for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
}

// Weights of all experts, each packed for itself.
struct Weights {
  std::vector<PackedWeight> floats;
  std::vector<PackedIntWeight> ints;

  Weights(int64_t count, int64_t n, int64_t k, DType dtype, Random& random) {
    Context& context = rank_context(0);
    for (int64_t e = 0; e < count; ++e) {
      const Owned values = random_tensor(dtype, {n, k}, random), scales = random_tensor(DType::f32, {n, 1}, random);
      if (dtype == DType::i8) {
        ints.push_back(std::move(PackedIntWeight::pack(context, IntMatrix{values.tensor, scales.tensor}).value()));
      } else {
        floats.push_back(std::move(PackedWeight::pack(context, values.tensor).value()));
      }
    }
  }
  GroupedWeight some(int64_t first, int64_t count) const {
    const auto i = static_cast<size_t>(first), n = static_cast<size_t>(count);
    if (ints.empty()) return std::span<const PackedWeight>(floats).subspan(i, n);
    return std::span<const PackedIntWeight>(ints).subspan(i, n);
  }
  GroupedWeight all() const { return some(0, static_cast<int64_t>(floats.size() + ints.size())); }
};

}  // namespace opst::test
