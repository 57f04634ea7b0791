#include "mc2/mapped_transport.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "core/int_math.h"

namespace opst::mc2 {

namespace {

constexpr int64_t kPage = 4096;
constexpr int kSpins = 200;                      // some microseconds
constexpr int64_t kNapNanoseconds = 10'000'000;  // after which a waiting rank looks at the others' state

int64_t desk_bytes(int ranks) { return round_up(int64_t{sizeof(Desk)} * ranks, kPage); }
int64_t channel_bytes(int ranks) { return round_up(int64_t{sizeof(Channel)} * ranks * ranks, kPage); }

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

int64_t Shared::bytes(int world_size, int64_t staging_bytes) {
  const Size staging = Size(world_size) * staging_bytes;
  return (staging + desk_bytes(world_size) + channel_bytes(world_size) + kPage).value();
}

Shared::Shared(void* memory, int world_size, int64_t staging_bytes)
    : world_size_(world_size), staging_bytes_(staging_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  char* const begin = static_cast<char*>(memory) + (kPage - address % kPage) % kPage;
  desks_ = reinterpret_cast<Desk*>(begin);
  channels_ = reinterpret_cast<Channel*>(begin + desk_bytes(world_size));
  staging_ = begin + desk_bytes(world_size) + channel_bytes(world_size);
}

void Shared::initialise() {
  for (int i = 0; i < world_size_; ++i) new (desks_ + i) Desk;
  for (int i = 0; i < world_size_ * world_size_; ++i) new (channels_ + i) Channel;
}

// The counter is raised before the look at sleepers; a sleeper announces itself before the futex looks at the counter.
void MappedTransport::ring(int peer) {
  Desk& desk = shared_.desk(peer);
  desk.news.fetch_add(1, std::memory_order_seq_cst);
  if (desk.sleepers.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &desk.news, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

uint32_t MappedTransport::news() const { return shared_.desk(rank()).news.load(std::memory_order_acquire); }

void MappedTransport::sleep(uint32_t seen) {
  Desk& desk = shared_.desk(rank());
  for (int i = 0; i < kSpins; ++i) {
    if (news() != seen) return;
    pause_cpu();
  }
  desk.sleepers.store(1, std::memory_order_seq_cst);
  const timespec nap{.tv_sec = 0, .tv_nsec = kNapNanoseconds};
  syscall(SYS_futex, &desk.news, FUTEX_WAIT, seen, &nap, nullptr, 0);
  desk.sleepers.store(0, std::memory_order_relaxed);
}

void MappedTransport::show(uint32_t call, const Entry& entry) {
  Desk& desk = shared_.desk(rank());
  desk.entries[call % 2] = entry;
  desk.shown.store(call + 1, std::memory_order_release);
  for (int peer = 0; peer < world_size(); ++peer) ring(peer);
}

const Entry* MappedTransport::entry(int peer, uint32_t call) const {
  const Desk& desk = shared_.desk(peer);
  const uint32_t shown = desk.shown.load(std::memory_order_acquire);
  return static_cast<int32_t>(shown - call) > 0 ? &desk.entries[call % 2] : nullptr;
}

int64_t MappedTransport::in_flight(int to) const {
  const Channel& channel = shared_.channel(rank(), to);
  const uint32_t released = channel.released.load(std::memory_order_acquire);
  return channel.sent.load(std::memory_order_relaxed) - released;
}

void MappedTransport::send(int to) {
  shared_.channel(rank(), to).sent.fetch_add(1, std::memory_order_release);
  ring(to);
}

int64_t MappedTransport::arrived(int from) const {
  const Channel& channel = shared_.channel(from, rank());
  const uint32_t sent = channel.sent.load(std::memory_order_acquire);
  return static_cast<uint32_t>(sent - channel.released.load(std::memory_order_relaxed));
}

void MappedTransport::release(int from) {
  shared_.channel(from, rank()).released.fetch_add(1, std::memory_order_release);
  ring(from);
}

// Either the storing rank sees that the other left, or the leaving rank sees that somebody stores.
bool MappedTransport::begin_store(int to) {
  std::atomic<uint32_t>& storing = shared_.channel(rank(), to).storing;
  storing.store(1, std::memory_order_seq_cst);
  if (shared_.desk(to).state.load(std::memory_order_seq_cst) == PeerState::sound) return true;
  storing.store(0, std::memory_order_release);
  return false;
}

void MappedTransport::end_store(int to) { shared_.channel(rank(), to).storing.store(0, std::memory_order_release); }

PeerState MappedTransport::state(int peer) const { return shared_.desk(peer).state.load(std::memory_order_acquire); }

void MappedTransport::leave(PeerState state, const char* message) {
  Desk& desk = shared_.desk(rank());
  const size_t length = std::min<size_t>(std::strlen(message), kMessageBytes - 1);
  std::memcpy(desk.failure, message, length);
  desk.failure[length] = '\0';
  desk.state.store(state, std::memory_order_seq_cst);
  for (int peer = 0; peer < world_size(); ++peer) ring(peer);
  for (int peer = 0; peer < world_size(); ++peer) {
    while (shared_.channel(peer, rank()).storing.load(std::memory_order_seq_cst) != 0 && may_still_store(peer))
      usleep(100);
  }
}

}  // namespace opst::mc2
