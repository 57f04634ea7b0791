// ForkSafeMutex: a mutex that is never locked in a forked child, and what it guards is whole there.
//
// fork() copies memory but the calling thread alone: a mutex that another thread holds at that moment stays locked in
// the child for ever, and what it guards may be half changed. Therefore fork() first takes all mutexes of this kind
// (pthread_atfork), and parent and child release them. For locks held for moments only, as fork() waits for them; a
// thread never holds two of them.
#pragma once

#include <mutex>

namespace opst {

class ForkSafeMutex {
 public:
  // May throw bad_alloc: the first one of the process registers the handlers of fork().
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static void before_fork();
  static void after_fork();

  std::mutex mutex_;
  ForkSafeMutex *previous_ = nullptr, *next_ = nullptr;  // of all that exist
};

}  // namespace opst
