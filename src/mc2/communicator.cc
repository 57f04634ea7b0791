// Communicator: options, ranks as threads.
#include "opst/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/text.h"
#include "mc2/factory.h"
#include "mc2/mapped_transport.h"

namespace opst {

Communicator CommunicatorFactory::make(std::unique_ptr<mc2::Transport> transport, const CommunicatorOptions& options,
                                       Buffer shared) {
  auto impl = std::make_unique<Communicator::Impl>();
  impl->peers.resize(static_cast<size_t>(transport->world_size()));
  impl->transport = std::move(transport);
  impl->options = options;
  impl->process = getpid();
  impl->shared = std::move(shared);
  return Communicator(std::move(impl));
}

Status mc2::check_options(const char* function, int world_size, const CommunicatorOptions& options) {
  const auto refused = [&](const auto&... parts) { return Status::invalid_argument(text(function, ": ", parts...)); };
  if (world_size < 1 || world_size > kMaxRanks) {
    return refused("world_size is ", world_size, ", but must be from 1 to ", kMaxRanks);
  }
  if (!(options.timeout_seconds > 0)) {
    return refused("timeout_seconds is ", options.timeout_seconds, ", but must be > 0");
  }
  if (options.staging_bytes < 0 || options.staging_bytes > kMaxBytes) {
    return refused("staging_bytes is ", options.staging_bytes, ", but must be from 0 to 2^56");
  }
  if (options.shared_bytes < 0 || options.shared_bytes > kMaxBytes) {
    return refused("shared_bytes is ", options.shared_bytes, ", but must be from 0 to 2^56");
  }
  return {};
}

Result<std::vector<Communicator>> Communicator::create_threads(int world_size, const CommunicatorOptions& options) {
  return guarded([&]() -> Result<std::vector<Communicator>> {
    Status status = mc2::check_options("Communicator::create_threads", world_size, options);
    if (!status.ok()) return status;
    CommunicatorOptions rounded = options;
    rounded.staging_bytes = round_up(options.staging_bytes, 4096);
    const int64_t bytes = mc2::Shared::bytes(world_size, rounded.staging_bytes);
    if (bytes >= kMaxBytes) return Status::out_of_memory();
    Result<Buffer> buffer = Buffer::allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    const auto memory = std::make_shared<Buffer>(std::move(buffer.value()));
    mc2::Shared shared(memory->data(), world_size, rounded.staging_bytes);
    shared.initialise();
    std::vector<Communicator> ranks;
    ranks.reserve(static_cast<size_t>(world_size));
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.push_back(CommunicatorFactory::make(std::make_unique<mc2::MappedTransport>(shared, rank, memory), rounded));
    }
    return ranks;
  });
}

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Communicator::Communicator(Communicator&&) noexcept = default;

Communicator& Communicator::operator=(Communicator&& other) noexcept {
  Communicator moved(std::move(other));
  std::swap(impl_, moved.impl_);
  return *this;
}

// A copy that fork() made is not the rank.
Communicator::~Communicator() {
  if (impl_ != nullptr && impl_->status.ok() && impl_->process == getpid()) {
    impl_->transport->leave(mc2::PeerState::gone, "its communicator was destroyed");
  }
}

Result<void*> Communicator::allocate_shared(int64_t size_bytes) {
  return guarded([&]() -> Result<void*> {
    Impl& own = *impl_;
    const int64_t left = own.shared.size_bytes() - own.shared_used;
    if (size_bytes < 0 || size_bytes > left) {
      return Status(size_bytes < 0 ? StatusCode::invalid_argument : StatusCode::out_of_memory,
                    text("allocate_shared: size_bytes is ", size_bytes, ", but ", left, " of shared_bytes are left"));
    }
    void* const data = static_cast<char*>(own.shared.data()) + own.shared_used;
    own.shared_used += std::min(left, round_up(size_bytes, 64));
    return data;
  });
}

int Communicator::rank() const { return impl_->transport->rank(); }
int Communicator::world_size() const { return impl_->transport->world_size(); }
const CommunicatorOptions& Communicator::options() const { return impl_->options; }
CommunicatorStats Communicator::stats() const { return impl_->stats; }
Status Communicator::status() const { return impl_->status; }

}  // namespace opst
