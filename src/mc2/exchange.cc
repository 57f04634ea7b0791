#include "mc2/exchange.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/guarded.h"
#include "core/text.h"

namespace opst {

Status Communicator::Impl::poison(Status why) {
  if (!status.ok()) return status;
  status = std::move(why);
  transport->leave(mc2::PeerState::failed, status.message().c_str());
  return status;
}

Status Communicator::Impl::enter(const char* operator_name) {
  const bool forked = process != getpid();
  if (!forked && !busy.exchange(true, std::memory_order_acquire)) return {};
  return guarded([&] {
    return Status::invalid_argument(
        text(operator_name, ": the communicator of rank ", transport->rank(),
             forked ? " belongs to the process that forked this one" : " is in a call of another thread"));
  });
}

namespace mc2 {

void Exchange::begin(const Entry& entry) {
  ++communicator_.stats.calls;
  communicator_.stats.peak_staging_bytes = 0;
  transport_.show(communicator_.call++, entry);
  met(rank());
}

bool Exchange::met(int index) {
  PeerProgress& p = communicator_.peers[static_cast<size_t>(index)];
  if (p.entry != nullptr) return true;
  const uint32_t call = communicator_.call - 1;
  const Entry* const entry = transport_.entry(index, call);
  if (entry == nullptr) return false;
  if (entry->signature_hash != transport_.entry(rank(), call)->signature_hash) {
    mismatch_ = true;
    return false;
  }
  p.entry = entry;
  return true;
}

bool Exchange::can_send(int to, bool direct) {
  const PeerProgress& p = peer(to);
  return p.sent < p.to_send && met(to) && (direct || transport_.in_flight(to) < kSlots);
}

void Exchange::send(int to, int64_t bytes, bool direct) {
  PeerProgress& p = communicator_.peers[static_cast<size_t>(to)];
  CommunicatorStats& stats = communicator_.stats;
  p.slot_bytes[p.sent % kSlots] = direct ? 0 : bytes;
  ++p.sent;
  int64_t staged = 0;  // this one, and what is not released
  for (int i = 0; i < world_size(); ++i) {
    const int64_t in_flight = std::min<int64_t>(transport_.in_flight(i) + (i == to), peer(i).sent);
    for (int64_t n = 0; n < in_flight; ++n) {
      staged += peer(i).slot_bytes[(peer(i).sent - 1 - n) % kSlots];
    }
  }
  stats.peak_staging_bytes = std::max(stats.peak_staging_bytes, staged);
  transport_.send(to);
  progressed();
  if (to != rank()) ++stats.tiles_sent, stats.bytes_sent += bytes, stats.direct_tiles += direct;
}

bool Exchange::can_receive(int from) {
  const PeerProgress& p = peer(from);
  return p.received < p.to_receive && met(from) && transport_.arrived(from) > 0;
}

void Exchange::release(int from) {
  ++communicator_.peers[static_cast<size_t>(from)].received;
  transport_.release(from);
  progressed();
}

bool Exchange::done_with(int index) const {
  const PeerProgress& p = peer(index);
  return p.entry != nullptr && p.sent == p.to_send && p.received == p.to_receive;
}

bool Exchange::finished() const {
  for (int i = 0; i < world_size(); ++i) {
    if (!done_with(i)) return false;
  }
  return true;
}

bool Exchange::owes(int index) const {
  const PeerProgress& p = peer(index);
  return p.entry == nullptr || p.sent < p.to_send || p.received + transport_.arrived(index) < p.to_receive;
}

Status Exchange::compare_signatures() const {
  const uint32_t call = communicator_.call - 1;
  const Entry* const own = transport_.entry(rank(), call);
  for (int i = 0; i < world_size(); ++i) {
    const Entry* const other = transport_.entry(i, call);
    if (other == nullptr || other->signature_hash == own->signature_hash) continue;
    const bool behind = std::strcmp(own->signature, other->signature) == 0;  // both are cut
    return {StatusCode::communication, text(name_, ": rank ", rank(), " calls ", own->signature, ", but rank ", i,
                                            " calls ", other->signature, behind ? ".., which differs further on" : "")};
  }
  return {};
}

Status Exchange::lost_peer() const {
  for (int i = 0; i < world_size(); ++i) {
    const PeerState state = transport_.state(i);
    if (state == PeerState::sound || !owes(i)) continue;
    if (state == PeerState::failed) {
      return {StatusCode::communication, text(name_, ": rank ", i, " failed: ", transport_.failure(i))};
    }
    return {StatusCode::communication,
            text(name_, ": rank ", i, " is gone (", transport_.failure(i), "), but ", [&] { return awaited(); })};
  }
  return {};
}

// What the first rank that is waited for owes.
std::string Exchange::awaited() const {
  for (int step = 1; step <= world_size(); ++step) {
    const int i = (rank() + step) % world_size();
    const PeerProgress& p = peer(i);
    if (p.entry == nullptr) {
      return text("rank ", rank(), " waits for rank ", i, " to begin call ", communicator_.call - 1);
    }
    if (p.received < p.to_receive && transport_.arrived(i) == 0) {
      return text("rank ", rank(), " waits for tile ", p.received, " of ", p.to_receive, " from rank ", i);
    }
  }
  for (int i = 0; i < world_size(); ++i) {
    const PeerProgress& p = peer(i);
    if (p.sent < p.to_send) {
      return text("rank ", rank(), " waits for rank ", i, " to take tile ", p.sent, " of ", p.to_send);
    }
  }
  return text("rank ", rank(), " waits for nothing");
}

Status Exchange::after_progress() {
  last_progress_ = Clock::now();
  suspected_ = false;
  return mismatch_ ? compare_signatures() : Status();
}

Status Exchange::idle(uint32_t seen) {
  // Ranks that nothing is sent to or received from are met here.
  for (int i = 0; i < world_size(); ++i) met(i);
  if (mismatch_) return compare_signatures();
  if (finished() || transport_.news() != seen) return {};
  // A rank may have sent its last tiles just before it went: they are looked for once more.
  Status lost = lost_peer();
  if (!lost.ok() && suspected_) return lost;
  suspected_ = !lost.ok();
  if (suspected_) return {};
  const std::chrono::duration<double> waited = Clock::now() - last_progress_;
  if (waited.count() > communicator_.options.timeout_seconds) {
    return {StatusCode::timeout, text(name_, ": ", awaited(), ", without progress for ",
                                      static_cast<int64_t>(waited.count() * 1000), " ms")};
  }
  transport_.sleep(seen);
  return {};
}

}  // namespace mc2
}  // namespace opst
