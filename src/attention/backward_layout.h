// Layout of a backward call's scratch memory: what backward_plan.cc adds up and backward.cc hands out.
//
//   shared, once
//     wave buffers       [min(heads, 2 heads_per_wave)][blocks] times, of each block
//       progress           BlockState
//       rules              [block_q] RowRules                           where an option needs them
//       bias targets       [block_q] addresses of rows of grad_bias     grad_bias
//       Q, dO              row forms; for pairs of bf16 column forms too
//       of each row        [block_q] origin, reference, weight, delta
//       dQ                 accumulators [block_q][acc_stride]
//     sums of sinks      [heads][blocks][group] double                  grad_sinks
//     turns              [blocks + 1] task numbers (BiasOrder)          grad_bias
//     shared pages       see shared_pages.h                             paged
//   of each worker
//     of a tile          column panels of K and V, column form of K; accumulators dK, dV
//     of a block         P and dS in column form; for pairs of bf16 dS in row form, and S and dP of a register tile
//                        slopes of the softcap                          where an option needs rules
//                        dS for the bias                                grad_bias
//     sums for the bias  accumulators [group][scores_stride]            grad_bias
//     of rows            [block_kv] pointers to keys and to values, [block_q] to queries; [block_q] visible intervals,
//                        maxima and sums
#pragma once

#include <atomic>
#include <cstdint>

#include "attention/backward_kernels.h"
#include "attention/layout.h"
#include "attention/shared_pages.h"
#include "opst/attention_backward.h"

namespace opst::attention {

// A block of query rows in a head's scratch memory: the keys that it sees, and how far its dQ is.
struct BlockState {
  ScoreRules rules;
  int64_t some_begin, some_end;  // seen by some row
  int64_t all_begin, all_end;    // seen by every row
  bool finite, far;
  bool has_rules;
  std::atomic<int64_t> tiles_done;
};

struct BackwardLayout {
  BackwardSizes sizes;
  int64_t rows, blocks;  // of the longest sequence
  int64_t tiles;
  int64_t scores_stride;                           // words of column forms; row forms of dS: divided by step
  int64_t query_bytes, value_bytes;                // row forms of a block
  int64_t query_column_bytes, value_column_bytes;  // column forms; 0 where the row forms serve
  int64_t grad_query_bytes, statistic_bytes;       // of a block
  int64_t block_bytes, head_bytes;
  int64_t key_bytes, key_value_bytes, key_column_bytes;  // of a tile
  int64_t grad_key_bytes, grad_value_bytes;
  int64_t scores_bytes, score_row_bytes, raw_bytes;
  int64_t rule_bytes, target_bytes;  // of a block: RowRules, addresses of its rows of the bias's gradient
  int64_t cap_bytes, bias_bytes, bias_sum_bytes, bias_sum_row_bytes;
  int64_t sink_bytes, turn_bytes, page_bytes;  // of the whole call
  int64_t worker_bytes;

  BackwardLayout(const AttentionBackwardProblem& problem, int64_t block_q, int64_t block_kv, const Geometry& g) {
    const AttentionProblem& p = problem.forward;
    const int64_t group = p.num_heads / p.num_kv_heads;
    rows = rows_of(p);
    blocks = ceil_div(rows, block_q);
    tiles = ceil_div(p.kv_len, block_kv);
    const bool pairs = g.step > 1;
    // One vector more than the data: rows a power of two apart would share few cache sets.
    const auto row_stride = [&](int64_t length) { return round_up(ceil_div(length, g.step), g.lanes) + g.lanes; };
    sizes = {p.head_dim,
             p.value_head_dim,
             row_stride(p.head_dim),
             row_stride(p.value_head_dim),
             round_up(p.head_dim, g.lanes),
             round_up(p.value_head_dim, g.lanes)};
    scores_stride = round_up(block_kv, g.panel) + g.lanes * g.step;

    const auto bytes = [&](Size count, int64_t stride, int64_t element) {
      return Arena::round_up(count * stride * element);
    };
    query_bytes = bytes(block_q, sizes.query_stride, g.word_bytes);
    value_bytes = bytes(block_q, sizes.value_stride, g.word_bytes);
    const int64_t pair_rows = ceil_div(block_q, g.step);
    query_column_bytes = pairs ? bytes(pair_rows, sizes.acc_stride, g.word_bytes) : 0;
    value_column_bytes = pairs ? bytes(pair_rows, sizes.value_acc_stride, g.word_bytes) : 0;
    grad_query_bytes = bytes(block_q, sizes.acc_stride, g.accumulator_bytes);
    statistic_bytes = bytes(block_q, 1, g.accumulator_bytes);
    const bool rules = has_rules(p);
    rule_bytes = rules ? Arena::size_of<RowRules>(block_q) : 0;
    target_bytes = problem.grad_bias ? Arena::size_of<void*>(block_q) : 0;
    block_bytes = query_bytes + value_bytes + query_column_bytes + value_column_bytes + grad_query_bytes +
                  4 * statistic_bytes + rule_bytes + target_bytes + Arena::size_of<BlockState>(1);
    head_bytes = (Size(blocks) * block_bytes).value();

    const int64_t padded_keys = round_up(block_kv, g.panel);
    key_bytes = bytes(padded_keys, ceil_div(p.head_dim, g.step), g.word_bytes);
    key_value_bytes = bytes(padded_keys, ceil_div(p.value_head_dim, g.step), g.word_bytes);
    key_column_bytes = pairs ? bytes(ceil_div(block_kv, g.step), sizes.acc_stride, g.word_bytes)
                             : bytes(block_kv, sizes.query_stride, g.word_bytes);
    grad_key_bytes = bytes(block_kv, sizes.acc_stride, g.accumulator_bytes);
    grad_value_bytes = bytes(block_kv, sizes.value_acc_stride, g.accumulator_bytes);
    scores_bytes = bytes(pair_rows, scores_stride, g.word_bytes);
    score_row_bytes = pairs ? bytes(block_q, scores_stride / g.step, g.word_bytes) : 0;
    raw_bytes = pairs ? bytes(2 * g.tile_rows, scores_stride, g.accumulator_bytes) : 0;
    cap_bytes = rules ? bytes(g.tile_rows, scores_stride, g.accumulator_bytes) : 0;
    bias_bytes = problem.grad_bias ? bytes(block_q, scores_stride, g.accumulator_bytes) : 0;
    bias_sum_row_bytes = scores_stride * g.accumulator_bytes;
    bias_sum_bytes = problem.grad_bias ? bytes(group, scores_stride, g.accumulator_bytes) : 0;
    sink_bytes = problem.grad_sinks ? Arena::size_of<double>(Size(p.batch) * p.num_heads * blocks) : 0;
    turn_bytes = problem.grad_bias ? Arena::size_of<std::atomic<int64_t>>(blocks + 1) : 0;
    page_bytes = SharedPages::bytes(problem, sizes, g.accumulator_bytes);
    const Size worker = cap_bytes + bias_bytes + bias_sum_bytes + key_bytes + key_value_bytes + key_column_bytes +
                        grad_key_bytes + grad_value_bytes + 2 * scores_bytes + score_row_bytes + raw_bytes +
                        2 * Arena::size_of<void*>(block_kv) + Arena::size_of<void*>(block_q) +
                        2 * Arena::size_of<int64_t>(block_q) + 2 * statistic_bytes;
    worker_bytes = worker.value();
  }

  // Whether scores are more than products that a structure hides.
  static bool has_rules(const AttentionProblem& p) {
    return p.has_prefix || p.has_mask || p.has_bias || p.has_alibi || p.has_drop_mask || p.options.softcap > 0 ||
           p.options.dropout.keep_prob < 1;
  }

  // Two waves are in flight at a time, if there are two.
  int64_t wave_bytes(int64_t heads, int64_t heads_per_wave) const {
    return (Size(std::min(heads, 2 * heads_per_wave)) * head_bytes).value();
  }
  int64_t call_bytes() const { return (Size(sink_bytes) + turn_bytes + page_bytes).value(); }
  int64_t shared_bytes(int64_t heads, int64_t heads_per_wave) const {
    return (Size(wave_bytes(heads, heads_per_wave)) + call_bytes()).value();
  }
};

}  // namespace opst::attention
