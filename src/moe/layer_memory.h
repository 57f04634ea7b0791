// What a layer's forward call takes of the workspace behind its routes: one list of pieces, by which memory is counted and
// taken.
#pragma once

#include <algorithm>

#include "moe/layer.h"

namespace opst::moe {

// Of a wave: hidden rows, and what becomes them.
struct HiddenMemory {
  char* rows;
  float *scales, *gate, *up;
};
template <class From>
HiddenMemory take_hidden(From& from, const Experts& experts, DType dtype, int64_t rows) {
  const Size values = Size(rows) * experts.intermediate;
  const Size halves = experts.apart ? Size(rows) * padded(experts.intermediate) : Size(0);
  const bool bytes = experts.hides_bytes();
  return {.rows = from.template take<char>(values * (bytes ? 1 : size_bytes(dtype))),
          .scales = from.template take<float>(bytes ? rows : 0),
          .gate = from.template take<float>(halves),
          .up = from.template take<float>(halves)};
}

// The memory of a call behind its routes.
struct RowsMemory {
  char* expanded;    // [rows of the experts, and with a shared one those of every token][hidden]
  int8_t* bytes;     // [tokens][hidden]
  float* scales;     // [tokens]
  float* of_rows;    // [rows]: the scales of the experts' rows
  int64_t* indices;  // [threads][top_k + 1], the slots of a token, and
  float* weights;    // their weights
};
template <class From>
RowsMemory take_rows(From& from, const LayerCall& call, int64_t rows, int num_threads) {
  const bool bytes = call.experts.takes_bytes() || call.shared.takes_bytes();
  const Size all = Size(rows) + (call.has_shared ? call.tokens : 0);
  const Size slots = Size(num_threads) * padded(call.top_k + 1);
  return {.expanded = from.template take<char>(all * call.hidden * size_bytes(call.dtype)),
          .bytes = from.template take<int8_t>(bytes ? Size(call.tokens) * call.hidden : Size(0)),
          .scales = from.template take<float>(bytes ? call.tokens : 0),
          .of_rows = from.template take<float>(call.experts.takes_bytes() ? rows : 0),
          .indices = from.template take<int64_t>(slots),
          .weights = from.template take<float>(slots)};
}

// Rows of the largest wave.
inline int64_t most_wave_rows(const int64_t* counts, int64_t num_experts, int64_t limit) {
  int64_t most = 0;
  ExpertWave wave;
  for (int64_t e = 0; e < num_experts; e = wave.end) {
    wave = wave_of(counts, e, num_experts, limit);
    most = std::max(most, wave.rows);
  }
  return most;
}

// The shared expert takes all tokens in as many equal parts as its limit demands. None has one or two rows that are not
// all tokens, so that the choice of a path is that of all tokens.
inline int64_t shared_parts(int64_t tokens, int64_t limit) { return std::max<int64_t>(1, ceil_div(tokens, limit)); }

// All of it: rows, and behind them the hidden rows of the largest wave.
inline Size rows_bytes(const LayerCall& call, const int64_t* counts, int64_t rows, const Machine& machine,
                       int num_threads) {
  CountBytes of_rows, of_experts, of_shared;
  take_rows(of_rows, call, rows, num_threads);
  const int64_t limit = wave_limit(call.experts, call.dtype, machine, num_threads).rows;
  take_hidden(of_experts, call.experts, call.dtype, most_wave_rows(counts, call.num_local(), limit));
  if (call.has_shared) {
    const int64_t parts = shared_parts(call.tokens, wave_limit(call.shared, call.dtype, machine, num_threads).rows);
    take_hidden(of_shared, call.shared, call.dtype, ceil_div(call.tokens, parts));
  }
  return of_rows.bytes + std::max(of_experts.bytes.value(), of_shared.bytes.value());
}

}  // namespace opst::moe
