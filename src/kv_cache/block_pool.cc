#include "core/guarded.h"
#include "core/text.h"
#include "opst/kv_cache.h"

namespace opst {

Result<BlockPool> BlockPool::create(int64_t num_blocks) {
  return guarded([&]() -> Result<BlockPool> {
    if (num_blocks < 0) {
      return Status::invalid_argument(text("BlockPool: num_blocks is ", num_blocks, ", but must be >= 0"));
    }
    BlockPool pool;
    if (static_cast<uint64_t>(num_blocks) > pool.free_.max_size()) return Status::out_of_memory();
    pool.num_blocks_ = num_blocks;
    pool.make_room();
    return pool;
  });
}

void BlockPool::make_room() {
  references_.reserve(static_cast<size_t>(num_blocks_));
  free_.reserve(static_cast<size_t>(num_blocks_));
}

int64_t BlockPool::references(int64_t block) const {
  return block >= 0 && static_cast<size_t>(block) < references_.size() ? references_[static_cast<size_t>(block)] : 0;
}

Status BlockPool::refuse(const char* call, size_t index, int64_t block) const {
  const int64_t held = references(block);
  const std::string why = block < 0 || block >= num_blocks_ ? text("is none of num_blocks = ", num_blocks_)
                          : held == 0                       ? "is free"
                                                            : text("comes more often than its references, ", held);
  return Status::invalid_argument(text("BlockPool::", call, ": block ", block, " (number ", index, ") ", why));
}

Status BlockPool::allocate(std::span<int64_t> blocks) {
  return guarded([&]() -> Status {
    if (blocks.size() > static_cast<size_t>(num_free())) {
      return {StatusCode::out_of_memory, text("BlockPool::allocate: ", blocks.size(), " blocks asked for, but ",
                                              num_free(), " of ", num_blocks_, " are free")};
    }
    make_room();  // only a copy of a pool has none
    for (int64_t& block : blocks) {
      if (free_.empty()) {
        block = static_cast<int64_t>(references_.size());
        references_.push_back(1);
      } else {
        block = free_.back();
        free_.pop_back();
        references_[static_cast<size_t>(block)] = 1;
      }
    }
    return {};
  });
}

Status BlockPool::fork(std::span<const int64_t> blocks) {
  return guarded([&]() -> Status {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (references(blocks[i]) == 0) return refuse("fork", i, blocks[i]);
    }
    for (int64_t block : blocks) ++references_[static_cast<size_t>(block)];
    return {};
  });
}

Status BlockPool::free(std::span<const int64_t> blocks) {
  return guarded([&]() -> Status {
    make_room();
    // Counting down finds a block that comes more often than it has references; counting up again restores all.
    size_t counted = 0;
    while (counted < blocks.size() && references(blocks[counted]) > 0) {
      --references_[static_cast<size_t>(blocks[counted++])];
    }
    for (size_t i = 0; i < counted; ++i) ++references_[static_cast<size_t>(blocks[i])];
    if (counted < blocks.size()) return refuse("free", counted, blocks[counted]);
    // From the last block on, so that the next sequence gets the blocks in this order again.
    for (size_t i = blocks.size(); i-- > 0;) {
      if (--references_[static_cast<size_t>(blocks[i])] == 0) free_.push_back(blocks[i]);
    }
    return {};
  });
}

Result<BlockWrite> BlockPool::prepare_write(int64_t block) {
  return guarded([&]() -> Result<BlockWrite> {
    if (references(block) == 0) return refuse("prepare_write", 0, block);
    if (references(block) == 1) return BlockWrite{.block = block};
    BlockWrite write = {.copy_from = block};
    if (Status status = allocate({&write.block, 1}); !status.ok()) return status;
    --references_[static_cast<size_t>(block)];
    return write;
  });
}

}  // namespace opst
