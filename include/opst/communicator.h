// Communicator: one rank's place among the ranks that run the operators of mc2.h together.
//
//   Result<std::vector<Communicator>> ranks = Communicator::create_threads(4);     // each for one thread
//   ... in thread r:
//   Status status = matmul_all_to_all(context, ranks.value()[r], x, weights, out);
//
// Every rank makes the same calls in the same order; call N of one rank meets call N of all others. At the start of a
// call each rank shows the others a signature (operator, shapes, dtypes, splits, tile). What goes wrong is a Status on
// every rank that still runs, and the communicator is poisoned: all its later calls return that Status at once, and the
// outputs of the failed call hold anything. The ways a call fails:
//   invalid_argument  this rank's own tensors or options are refused
//   communication     signatures differ: the message has both, on both ranks
//                     another rank's call was refused or failed: the message has that rank and its message
//                     another rank is gone
//   timeout           a rank is waited for in vain: the message names operator, rank and tile
//   out_of_memory     of this rank
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "opst/status.h"

namespace opst {

inline constexpr int kMaxRanks = 256;

struct CommunicatorOptions {
  // A call ends with StatusCode::timeout after so long without any progress of its own.
  double timeout_seconds = 60;
  // Memory of a rank for tiles on their way to it: two slots for each rank. Bounds the tile.
  int64_t staging_bytes = int64_t{16} << 20;
  // Ranks that are processes: memory of each rank for outputs that others store into directly (allocate_shared).
  int64_t shared_bytes = 0;
  // Products store finished tiles straight into other ranks' outputs where the transport can. False: through slots.
  bool direct_stores = true;
};

// Of one rank, since it was made.
struct CommunicatorStats {
  int64_t calls = 0;
  int64_t tiles_sent = 0;          // to other ranks
  int64_t bytes_sent = 0;          // likewise: direct stores and tiles that passed through a slot
  int64_t direct_tiles = 0;        // of tiles_sent: stored by the product itself into the other rank's output
  int64_t tile_bytes = 0;          // of the last call: a slot's
  int64_t peak_staging_bytes = 0;  // of the last call: tiles in slots at once that this rank filled and nobody released
};

// Memory that ranks share which are processes of one machine. It has no name, so that nothing is left when processes are
// killed. Needed until every rank has joined; this process then may destroy it.
class RankMemory {
 public:
  static Result<RankMemory> create(int world_size, const CommunicatorOptions& options = {});
  ~RankMemory();
  RankMemory(RankMemory&& other) noexcept { *this = std::move(other); }
  RankMemory& operator=(RankMemory&& other) noexcept;
  const std::string& ticket() const { return ticket_; }

 private:
  RankMemory() = default;
  int fd_ = -1;
  std::string ticket_;
};

class Communicator {
 public:
  // Ranks that are threads of this process: element r is rank r's. May be moved into the threads, and outlive one
  // another. Errors: invalid_argument for a size beyond [1, kMaxRanks] or options that make no sense; out_of_memory.
  static Result<std::vector<Communicator>> create_threads(int world_size, const CommunicatorOptions& options = {});

  // A rank that is a process of this machine, by the ticket of a RankMemory. One call for each rank, from any process of
  // the same user that got the ticket (by a pipe, a file, the environment), before fork() or after. The memory's sizes
  // are those of RankMemory::create; timeout and direct_stores are this rank's own. Errors: invalid_argument for what is
  // no ticket, a rank that is out of range or taken; unsupported where the memory cannot be opened.
  static Result<Communicator> join(const std::string& ticket, int rank, const CommunicatorOptions& options = {});

  // Ranks that are processes: memory whose tensors other ranks can store into, until the communicator is destroyed.
  // (Threads need none: they reach all memory.) Errors: out_of_memory where less is left.
  Result<void*> allocate_shared(int64_t size_bytes);

  // Tells the other ranks that this one is gone.
  ~Communicator();
  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;

  int rank() const;
  int world_size() const;
  const CommunicatorOptions& options() const;
  CommunicatorStats stats() const;
  // The Status that poisoned it; ok while it is sound.
  Status status() const;

  // One call at a time: a second thread's is refused, and the first one's goes on. Calls on different communicators may
  // run concurrently. In a forked child every call is refused, and the copy's end is not the rank's.
  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  friend struct CommunicatorFactory;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace opst
