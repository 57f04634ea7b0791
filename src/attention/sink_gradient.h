// SinkGradient: the gradient of the sinks, one more score of each row that has no key.
//
//   grad_sinks[h] = - sum over rows of head h of exp(sink - m) / l * delta       m, l: maximum and sum, or lse and 1
//
// Memory   sums [heads][blocks][group] of double: the task that packs a block writes the block's; added up in the end, in
//          the order of batches and blocks.
#pragma once

#include <cmath>

#include "attention/backward_data.h"
#include "core/elements.h"

namespace opst::attention {

class SinkGradient {
 public:
  explicit SinkGradient(const BackwardData& data)
      : d_(data), to_(data.grads.grad_sinks), sums_(data.call().sink_sums) {}

  // For block `index` of a head, also where a shorter sequence has no such block.
  void clear(int64_t head, int64_t index) const {
    for (int64_t g = 0; g < d_.group && wanted(); ++g) sum(head, index, g) = 0;
  }
  // When the block is packed.
  void add(int64_t head, int64_t index, const BackwardBlock& b, const PackQueries& pack) const {
    if (!wanted()) return;
    clear(head, index);
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const int64_t row = b.first_row + r;
      const double sink = d_.sink(head, row);
      const double top = d_.statistic(pack.max.data != nullptr ? pack.max : pack.lse, row);
      const double l = pack.max.data != nullptr ? d_.statistic(pack.sum, row) : 1;
      if (std::isinf(sink) || std::isinf(top)) continue;
      double delta = d_.numbers.get(b.queries.delta, r);
      // dO of a row that sees no key does not matter. O is 0 there, so a finite delta has nothing of dO.
      const auto sees_key = [&] {
        return !b.state->has_rules ||
               d_.kernels.sees_key(b.state->rules, r, pack.visible_begin[r], pack.visible_end[r]);
      };
      if (d_.numbers.get(b.queries.weight, r) == 0 || (!std::isfinite(delta) && !sees_key())) {
        delta = pack.grad_lse.data != nullptr ? -d_.statistic(pack.grad_lse, row) : 0;
      }
      sum(head, index, row % d_.group) -= std::exp(sink - top) / l * delta;
    }
  }
  void finish() const {
    const AttentionProblem& p = d_.p;
    for (int64_t h = 0; h < p.num_heads && wanted(); ++h) {
      double total = 0;
      for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t head = b * p.num_kv_heads + h / d_.group;
        for (int64_t i = 0; i < d_.layout.blocks; ++i) total += sum(head, i, h % d_.group);
      }
      store_element(to_, h * to_.strides[0], total);
    }
  }

 private:
  bool wanted() const { return to_.data != nullptr; }
  double& sum(int64_t head, int64_t block, int64_t g) const {
    return sums_[(head * d_.layout.blocks + block) * d_.group + g];
  }

  const BackwardData& d_;
  const Tensor& to_;
  double* const sums_;
};

}  // namespace opst::attention
