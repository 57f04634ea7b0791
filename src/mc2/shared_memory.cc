#include "mc2/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/text.h"
#include "mc2/factory.h"

namespace opst {

namespace mc2 {

namespace {

constexpr uint64_t kMagic = 0x6f7073742d6d6332;  // changes with the layout
constexpr int64_t kPage = 4096;
// A leaving rank waits so many looks of 100 us for another process that stores into its outputs: these lie in shared
// memory, which stays, so that a stopped process costs patience and nothing else.
constexpr int kPatience = 1000;

Status failed(const char* function, const std::string& what) {
  return Status::unsupported(text(function, ": ", what, ": ", std::strerror(errno)));
}

}  // namespace

Mapping::~Mapping() { munmap(data_, static_cast<size_t>(bytes_)); }

int64_t Mapping::bytes(int world_size, int64_t staging_bytes, int64_t heap_bytes) {
  const Size block = Size(round_up(Shared::bytes(world_size, staging_bytes), kPage));
  return (Size(int64_t{sizeof(SharedHeader)}) + block + Size(world_size) * heap_bytes).value();
}

Shared Mapping::shared() const { return {data_ + sizeof(SharedHeader), header().world_size, header().staging_bytes}; }

char* Mapping::heap(int rank) const { return data_ + bytes_ - (header().world_size - rank) * header().heap_bytes; }

bool Mapping::contains(const void* data) const {
  const char* const place = static_cast<const char*>(data);
  return place >= data_ && place < data_ + bytes_;
}

ProcessTransport::ProcessTransport(std::shared_ptr<Mapping> mapping, int rank)
    : MappedTransport(mapping->shared(), rank, mapping),
      mapping_(std::move(mapping)),
      pidfds_(static_cast<size_t>(world_size()), -1),
      ended_(static_cast<size_t>(world_size()), 0) {}

ProcessTransport::~ProcessTransport() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void ProcessTransport::sleep(uint32_t seen) {
  MappedTransport::sleep(seen);
  if (news() == seen) look_at_processes();
}

void ProcessTransport::look_at_processes() {
  for (int peer = 0; peer < world_size(); ++peer) {
    const auto p = static_cast<size_t>(peer);
    const int32_t process = mapping_->header().process[p].load(std::memory_order_acquire);
    if (peer == rank() || process == 0 || ended_[p] != 0) continue;
    if (pidfds_[p] < 0) pidfds_[p] = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    pollfd ended{.fd = pidfds_[p], .events = POLLIN, .revents = 0};
    ended_[p] = pidfds_[p] < 0 ? errno == ESRCH : poll(&ended, 1, 0) == 1;
  }
}

PeerState ProcessTransport::state(int peer) const {
  const PeerState state = MappedTransport::state(peer);
  return state == PeerState::sound && ended_[static_cast<size_t>(peer)] != 0 ? PeerState::gone : state;
}

const char* ProcessTransport::failure(int peer) const {
  const bool said_so = MappedTransport::state(peer) != PeerState::sound;
  return said_so ? MappedTransport::failure(peer) : "its process ended";
}

uint64_t ProcessTransport::address_for_others(const void* data) const {
  return mapping_->contains(data) ? static_cast<uint64_t>(static_cast<const char*>(data) - mapping_->data()) : 0;
}

void* ProcessTransport::address_from_others(uint64_t address) const {
  return address == 0 ? nullptr : mapping_->data() + address;
}

bool ProcessTransport::may_still_store(int peer) {
  look_at_processes();
  return ended_[static_cast<size_t>(peer)] == 0 && ++patience_ < kPatience;
}

}  // namespace mc2

// ---- RankMemory

Result<RankMemory> RankMemory::create(int world_size, const CommunicatorOptions& options) {
  constexpr const char* kName = "RankMemory::create";
  return guarded([&]() -> Result<RankMemory> {
    Status status = mc2::check_options(kName, world_size, options);
    if (!status.ok()) return status;
    const int64_t staging = round_up(options.staging_bytes, mc2::kPage);
    const int64_t heap = round_up(options.shared_bytes, mc2::kPage);
    const int64_t bytes = mc2::Mapping::bytes(world_size, staging, heap);
    if (bytes >= kMaxBytes) return Status::out_of_memory();
    RankMemory memory;
    memory.fd_ = memfd_create("opst-ranks", MFD_CLOEXEC);
    if (memory.fd_ < 0) return mc2::failed(kName, "memfd_create");
    if (ftruncate(memory.fd_, bytes) != 0) return mc2::failed(kName, "ftruncate");
    void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd_, 0);
    if (data == MAP_FAILED) return Status::out_of_memory();
    const mc2::Mapping mapping(data, bytes);
    auto* const header = new (data) mc2::SharedHeader;
    header->world_size = world_size;
    header->staging_bytes = staging;
    header->heap_bytes = heap;
    mapping.shared().initialise();
    header->magic = mc2::kMagic;
    memory.ticket_ = text(getpid(), ":", memory.fd_);
    return memory;
  });
}

RankMemory::~RankMemory() {
  if (fd_ >= 0) close(fd_);
}

RankMemory& RankMemory::operator=(RankMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(ticket_, other.ticket_);
  return *this;
}

Result<Communicator> Communicator::join(const std::string& ticket, int rank, const CommunicatorOptions& options) {
  constexpr const char* kName = "Communicator::join";
  return guarded([&]() -> Result<Communicator> {
    int process = 0, number = 0;
    char more = 0;
    if (std::sscanf(ticket.c_str(), "%d:%d%c", &process, &number, &more) != 2) {
      return Status::invalid_argument(text(kName, ": '", ticket, "' is no ticket of RankMemory"));
    }
    Status status = mc2::check_options(kName, 1, options);
    if (!status.ok()) return status;
    const std::string path = text("/proc/", process, "/fd/", number);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return mc2::failed(kName, text("the memory of ticket ", ticket, " is not there"));
    const int64_t bytes = lseek(fd, 0, SEEK_END);
    void* const data = bytes < int64_t{sizeof(mc2::SharedHeader)}
                           ? MAP_FAILED
                           : mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (data == MAP_FAILED) return Status::invalid_argument(text(kName, ": '", ticket, "' is no memory of ranks"));
    auto mapping = std::make_shared<mc2::Mapping>(data, bytes);
    mc2::SharedHeader& header = mapping->header();
    if (header.magic != mc2::kMagic) {
      return Status::invalid_argument(text(kName, ": '", ticket, "' is memory of ranks of another version"));
    }
    if (rank < 0 || rank >= header.world_size) {
      return Status::invalid_argument(
          text(kName, ": rank is ", rank, ", but must be from 0 to ", header.world_size - 1));
    }
    int32_t nobody = 0;
    if (!header.process[rank].compare_exchange_strong(nobody, getpid())) {
      return Status::invalid_argument(text(kName, ": rank ", rank, " was taken by process ", nobody));
    }
    CommunicatorOptions own = options;
    own.staging_bytes = header.staging_bytes;
    own.shared_bytes = header.heap_bytes;
    char* const heap = mapping->heap(rank);
    auto transport = std::make_unique<mc2::ProcessTransport>(mapping, rank);
    return CommunicatorFactory::make(std::move(transport), own, Buffer::part_of(mapping, heap, own.shared_bytes));
  });
}

}  // namespace opst
