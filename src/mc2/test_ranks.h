// Ranks of a test: threads, each with its communicator and its own Context.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "opst/mc2.h"
#include "testing/random.h"

namespace opst::test {

// Rank r has 1 + r mod 2 threads.
inline Context& rank_context(int rank) {
  static std::vector<Context>* const contexts = [] {
    auto* const made = new std::vector<Context>();
    for (int r = 0; r < 16; ++r) made->push_back(std::move(Context::create({.num_threads = 1 + r % 2}).value()));
    return made;
  }();
  return (*contexts)[static_cast<size_t>(rank)];
}

// body(rank) on threads of their own; the Status of each.
inline std::vector<Status> on_threads(int ranks, const std::function<Status(int rank)>& body) {
  rank_context(0);
  std::vector<Status> statuses(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] { statuses[static_cast<size_t>(r)] = body(r); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

}  // namespace opst::test
