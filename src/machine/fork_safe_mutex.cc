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

struct ForkHandlers {
  static void before_fork() {
    list_mutex.lock();
    for (ForkSafeMutex* m = first; m != nullptr; m = m->next_) m->mutex_.lock();
  }
  static void after_fork() {
    for (ForkSafeMutex* m = first; m != nullptr; m = m->next_) m->mutex_.unlock();
    list_mutex.unlock();
  }
};

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(list_mutex);
  if (!registered) {
    if (pthread_atfork(ForkHandlers::before_fork, ForkHandlers::after_fork, ForkHandlers::after_fork) != 0) {
      throw std::bad_alloc();
    }
    registered = true;
  }
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
