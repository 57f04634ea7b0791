#include "machine/fork_safe_mutex.h"

#include <pthread.h>

#include <new>

namespace opst {
namespace {

// The list of all ForkSafeMutexes. One thing of the process, as fork() is; needs no start and no end.
constinit std::mutex list_mutex;
constinit ForkSafeMutex* first = nullptr;
constinit bool registered = false;

}  // namespace

void ForkSafeMutex::before_fork() {
  list_mutex.lock();
  for (ForkSafeMutex* m = first; m != nullptr; m = m->next_) m->lock();
}

void ForkSafeMutex::after_fork() {
  for (ForkSafeMutex* m = first; m != nullptr; m = m->next_) m->unlock();
  list_mutex.unlock();
}

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(list_mutex);
  registered = registered || pthread_atfork(before_fork, after_fork, after_fork) == 0;
  if (!registered) throw std::bad_alloc();
  next_ = first;
  if (next_ != nullptr) next_->previous_ = this;
  first = this;
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(list_mutex);
  (previous_ == nullptr ? first : previous_->next_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

}  // namespace opst
