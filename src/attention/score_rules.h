// ScoreRules: what turns raw scores q k into S and decides which weights dropout keeps, for the rows of one block.
// Plain data: pointers and strides are resolved per row, because the rows of a block are queries of several heads.
//
//   S = Y + alibi + bias_scale * bias,   Y = softcap tanh(Z / softcap),   Z = score_scale * raw
//   hidden (S = -inf) where the mask is 0, or outside the row's interval and not below the prefix
//
// score_ops.h applies them, forward and backward.
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst::attention {

struct RowRules {
  const uint8_t* mask;   // of key 0
  const void* bias;      // of key 0
  double slope;          // of ALiBi
  int64_t position;      // key j is at distance |j - position|
  int64_t drop_bit;      // of key 0 in drop_mask
  uint32_t query, head;  // the row's words of the dropout counter
};

struct ScoreRules {
  const RowRules* rows = nullptr;  // of the block's rows
  int64_t prefix = 0;              // keys below it are visible to every row

  // Scores become S itself; otherwise they stay raw, and are only hidden. Set where there is softcap, ALiBi or bias.
  bool natural = false;
  double score_scale = 1;
  double softcap = 0;  // 0: none

  bool has_alibi = false;
  bool alibi_square_root = false;

  bool has_bias = false;
  DType bias_dtype = DType::f32;
  int64_t bias_stride = 0;  // between keys
  double bias_scale = 1;

  bool has_mask = false;
  int64_t mask_stride = 0;  // between keys

  // Dropout by Philox where keep_below > 0: a weight is kept where its word is less. Else by drop_mask, unless null.
  uint64_t keep_below = 0;  // at most 2^32 - 1
  uint32_t seed[2] = {};
  uint32_t offset = 0;
  int64_t first_key = 0;  // key 0's index in the larger problem (DropoutOptions)
  const uint8_t* drop_mask = nullptr;

  bool drops() const { return keep_below > 0 || drop_mask != nullptr; }
  // Whether a key that the structure shows may still contribute nothing.
  bool hides() const { return has_mask || has_bias || prefix > 0 || drops(); }
};

}  // namespace opst::attention
