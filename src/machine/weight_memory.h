// Memory for packed weights. Decoding a token streams all weights of a model through the caches; where each has small
// pages of its own, the page tables are streamed with them (q4_1, one thread: 0.79 of plain reading instead of 0.92).
// Therefore weights smaller than a huge page lie side by side in huge pages.
//
//   Result<Buffer> memory = context.impl().weights.allocate(bytes);
//
// A block of huge pages is freed when all its weights are gone. The place of its last weight is used again as soon as
// that weight is gone.
#pragma once

#include <memory>

#include "machine/fork_safe_mutex.h"
#include "opst/tensor.h"

namespace opst {

class WeightMemory {
 public:
  // As Buffer::allocate. May throw bad_alloc.
  Result<Buffer> allocate(int64_t size_bytes);

 private:
  struct Block;
  // Shared with all blocks, which may outlive this object.
  std::shared_ptr<ForkSafeMutex> mutex_ = std::make_shared<ForkSafeMutex>();
  std::shared_ptr<Block> block_;  // from which the next weight is taken
};

}  // namespace opst
