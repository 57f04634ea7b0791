// SharedPages: the pages of a cache that come more than once in a block table. No task owns their gradients: tasks add
// to sums in accumulators, which are rounded to the output when all is added. So the memory grows with the pages,
// however many sequences share them.
//
// Memory   [num_blocks] ordinal of each block among the shared ones, or -1
//          [shared_blocks][num_kv_heads][sums of keys, sums of values] accumulators
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/backward_kernels.h"
#include "attention/sequences.h"
#include "core/int_math.h"
#include "machine/workspace.h"
#include "opst/attention_backward.h"

namespace opst::attention {

class SharedPages {
 public:
  static int64_t bytes(const AttentionBackwardProblem& b, const BackwardSizes& sizes, int64_t accumulator_bytes) {
    if (b.shared_blocks == 0) return 0;
    const Size heads = Size(b.shared_blocks) * b.forward.num_kv_heads;
    return (Size(ordinal_bytes(b)) + Arena::round_up(heads * head_bytes(b, sizes, accumulator_bytes))).value();
  }
  // Of the memory that `number` needs.
  static int64_t ordinal_bytes(const AttentionBackwardProblem& b) { return Arena::size_of<int64_t>(b.num_blocks); }

  // Numbers the shared blocks; returns how many there are.
  static int64_t number(const AttentionInputs& in, const AttentionProblem& p, int64_t num_blocks, int64_t* ordinals) {
    for (int64_t i = 0; i < num_blocks; ++i) ordinals[i] = 0;
    const Sequences sequences(in, p);
    for (int64_t b = 0; b < p.batch; ++b) {
      const ConstTensor& table = in.block_table;
      const int64_t used = ceil_div(sequences.kv_len(b), p.block_size);
      for (int64_t i = 0; i < used; ++i) {
        ++ordinals[index_at(table, b, i)];
      }
    }
    int64_t shared = 0;
    for (int64_t i = 0; i < num_blocks; ++i) ordinals[i] = ordinals[i] > 1 ? shared++ : -1;
    return shared;
  }

  SharedPages() = default;
  SharedPages(const AttentionBackwardProblem& b, const BackwardSizes& sizes, int64_t accumulator_bytes, void* memory)
      : head_bytes_(head_bytes(b, sizes, accumulator_bytes)),
        num_kv_heads_(b.forward.num_kv_heads),
        shared_blocks_(b.shared_blocks),
        ordinals_(static_cast<int64_t*>(memory)),
        sums_(static_cast<char*>(memory) + ordinal_bytes(b)) {}

  int64_t count() const { return shared_blocks_; }
  int64_t* ordinals() const { return ordinals_; }
  int64_t ordinal(int64_t block) const { return shared_blocks_ > 0 ? ordinals_[block] : -1; }

  // Of a shared block and a KV head: [block_size][acc_stride] of keys, then [block_size][value_acc_stride] of values.
  void* sums(int64_t ordinal, int64_t kv_head) const {
    return sums_ + (ordinal * num_kv_heads_ + kv_head) * head_bytes_;
  }
  void clear(int64_t ordinal) const {
    std::memset(sums(ordinal, 0), 0, static_cast<size_t>(num_kv_heads_ * head_bytes_));
  }

 private:
  static int64_t head_bytes(const AttentionBackwardProblem& b, const BackwardSizes& sizes, int64_t accumulator_bytes) {
    return (Size(b.forward.block_size) * (sizes.acc_stride + sizes.value_acc_stride) * accumulator_bytes).value();
  }

  int64_t head_bytes_ = 0, num_kv_heads_ = 0, shared_blocks_ = 0;
  int64_t* ordinals_ = nullptr;
  char* sums_ = nullptr;
};

}  // namespace opst::attention
