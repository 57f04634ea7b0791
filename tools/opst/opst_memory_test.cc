// main() of the program when memory is exhausted, from its first allocation on: one line on standard error and exit
// code 1, never the end of the process by a signal.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "testing/fail_allocations.h"

#define main opst_main
#include "main.cc"
#undef main

namespace {

using opst::test::FailAllocations;
using opst::test::Failing;

struct Outcome {
  int exit_code = -1;  // -1: a signal ended the process
  std::string err;
};

// In a child: allocations fail from main() to its return, and nothing of the test's is in their way. A child that made
// fewer allocations than `n` exits with 100 more.
Outcome run_with_failure(std::vector<const char*> command, int64_t n, Failing failing) {
  command.push_back(nullptr);
  const int out = memfd_create("out", 0), err = memfd_create("err", 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    int exit_code = 0;
    bool happened = false;
    {
      const FailAllocations refused(n, failing);
      exit_code = opst_main(static_cast<int>(command.size()) - 1, const_cast<char**>(command.data()));
      happened = refused.happened();
    }
    std::fflush(stdout);
    _exit(exit_code + (happened ? 0 : 100));
  }
  Outcome outcome;
  int status = 0;
  if (waitpid(child, &status, 0) == child && WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  char text[4096];
  const ssize_t size = pread(err, text, sizeof text, 0);
  outcome.err.assign(text, static_cast<size_t>(size > 0 ? size : 0));
  close(out);
  close(err);
  return outcome;
}

// Of the allocations behind the first dozens a sample: one run makes thousands.
TEST(ProgramMemory, EndsWithAMessage) {
  const std::vector<std::vector<const char*>> commands = {
      {"opst", "--version"},
      {"opst", "plan", "attention", "--seq", "64"},
      {"opst", "plan", "memory", "--machine", "ascend-910"},
      {"opst", "no such command"},
  };
  for (const std::vector<const char*>& command : commands) {
    const int with_memory = command.back() == commands.back().back() ? 2 : 0;
    for (const Failing failing : {Failing::once, Failing::from_there_on}) {
      int failed = 0;
      for (int64_t n = 1;; n += 1 + n / 16) {
        SCOPED_TRACE(std::string(command.back()) + ", allocation " + std::to_string(n));
        const Outcome outcome = run_with_failure(command, n, failing);
        if (outcome.exit_code == 100 + with_memory) break;
        ++failed;
        // A failure that nobody needs to hear of, as that of a temporary buffer, may be none.
        ASSERT_TRUE(outcome.exit_code == with_memory || outcome.exit_code == 1)
            << outcome.exit_code << ": " << outcome.err;
        if (outcome.exit_code == 0) continue;
        EXPECT_EQ(outcome.err.substr(0, 4), "opst");
        EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
      }
      EXPECT_GT(failed, 50) << command.back();
    }
  }
}

}  // namespace
