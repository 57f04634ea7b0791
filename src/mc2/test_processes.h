// Ranks of a test as processes.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "core/sanitizers.h"

// ThreadSanitizer allows no threads in a forked child.
#define OPST_SKIP_UNDER_THREAD_SANITIZER() \
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer allows no threads in a forked child"

namespace opst::test {

// Processes, one for each rank: body(rank) gives a line, which arrives by a pipe. The lines of those that wrote one.
class Processes {
 public:
  Processes(int ranks, const std::function<std::string(int)>& body) {
    for (int r = 0; r < ranks; ++r) {
      int ends[2];
      EXPECT_EQ(pipe(ends), 0);
      const pid_t process = fork();
      if (process == 0) {
        const std::string line = body(r);
        const bool written = write(ends[1], line.data(), line.size()) == static_cast<ssize_t>(line.size());
        _exit(written ? 0 : 1);
      }
      close(ends[1]);
      processes_.push_back(process);
      pipes_.push_back(ends[0]);
    }
  }
  ~Processes() {
    for (const pid_t process : processes_) kill(process, SIGKILL);
    for (const pid_t process : processes_) waitpid(process, nullptr, 0);
    for (const int end : pipes_) close(end);
  }
  pid_t process(int rank) const { return processes_[static_cast<size_t>(rank)]; }
  std::string line(int rank) const {
    std::string all;
    char part[4096];
    for (ssize_t n = 0; (n = read(pipes_[static_cast<size_t>(rank)], part, sizeof(part))) > 0;) {
      all.append(part, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  std::vector<pid_t> processes_;
  std::vector<int> pipes_;
};

}  // namespace opst::test
