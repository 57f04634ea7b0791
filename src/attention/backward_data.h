// BackwardData: what the parts of one backward call read, and where its scratch memory lies.
//
// A worker's memory is its own. A block belongs to the task that packs it, then to the tasks of its head: they read it,
// and add to dQ in turn. Who may touch the pieces of the call: bias_gradient.h, key_gradients.h, sink_gradient.h.
#pragma once

#include <cstring>

#include "attention/backward_layout.h"
#include "attention/call_heads.h"
#include "attention/call_rules.h"

namespace opst::attention {

// Numbers in the accumulator type of a product, float, or double for f64, outside the kernels.
struct Accumulators {
  const bool f64;

  void* at(void* numbers, int64_t i) const { return static_cast<char*>(numbers) + i * (f64 ? 8 : 4); }
  double get(const void* numbers, int64_t i) const {
    return f64 ? static_cast<const double*>(numbers)[i] : static_cast<double>(static_cast<const float*>(numbers)[i]);
  }
  void set(void* numbers, int64_t i, double x) const {
    if (f64)
      static_cast<double*>(numbers)[i] = x;
    else
      static_cast<float*>(numbers)[i] = static_cast<float>(x);
  }
  // to[i * stride] += from[i]
  void add(const void* from, int64_t count, void* to, int64_t stride) const {
    const auto add_numbers = [&](const auto* terms, auto* sums) {
      for (int64_t i = 0; i < count; ++i) sums[i * stride] += terms[i];
    };
    if (f64)
      add_numbers(static_cast<const double*>(from), static_cast<double*>(to));
    else
      add_numbers(static_cast<const float*>(from), static_cast<float*>(to));
  }
};

struct BackwardData : CallHeads {
  const AttentionSaved& saved;
  const AttentionGradients& grads;
  const AttentionBackwardProblem& problem;
  const AttentionBackwardPlan& plan;
  const BackwardKernels& kernels;
  const Geometry geometry;
  char* const memory;
  const CallRules rules{in, p};
  const BackwardLayout layout{problem, geometry, plan.block_q, plan.block_kv};
  const Accumulators numbers{plan.product == AttentionProduct::f64};

  // Blocks of a head; fewer than layout.blocks for a shorter sequence of the batch.
  int64_t blocks(int64_t head) const { return ceil_div(query_rows(head), plan.block_q); }

  BackwardBlock block(int64_t head, int64_t index) const {
    const int64_t place = head % (2 * plan.heads_per_wave);
    Arena arena(memory + place * layout.head_bytes + index * layout.block_bytes, layout.block_bytes);
    BackwardBlock b{{layout, &arena}};
    b.first_row = index * plan.block_q;
    b.queries.rows = std::min(plan.block_q, query_rows(head) - b.first_row);
    b.queries.finite = &b.state->finite;
    b.queries.far = &b.state->far;
    b.take.arena = nullptr;
    return b;
  }
  BackwardWorker worker(int index) const {
    Arena arena(memory + plan.scratch_bytes_shared + index * plan.scratch_bytes_per_worker, layout.worker_bytes);
    BackwardWorker w{{layout, &arena}};
    if (!layout.pairs) w.block.grad_scores = w.block.grad_score_columns;
    w.take.arena = nullptr;
    return w;
  }
  BackwardCallPieces call() const {
    Arena arena(memory + layout.wave_bytes(heads, plan.heads_per_wave), layout.call_bytes);
    BackwardCallPieces pieces{{layout, &arena}};
    pieces.take.arena = nullptr;
    return pieces;
  }

  // Rows of accumulators, set to 0.
  void* cleared(void* rows, int64_t count, int64_t stride) const {
    return std::memset(rows, 0, static_cast<size_t>(count * stride * geometry.accumulator_bytes));
  }
  double statistic(const StackedRows& t, int64_t row) const {
    return numbers.get(t.data, row / group * t.seq_stride + row % group * t.head_stride);
  }
  double sink(int64_t head, int64_t row) const {
    return numbers.get(in.sinks.data, query_head(head, row) * in.sinks.strides[0]);
  }
};

}  // namespace opst::attention
