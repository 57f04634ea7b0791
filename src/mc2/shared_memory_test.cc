// Ranks that are processes: the same results as threads, and what is seen of a process that ends, stops or never calls.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>

#include "core/text.h"
#include "mc2/exchange.h"
#include "mc2/test_processes.h"
#include "mc2/test_ranks.h"
#include "mc2/test_spread.h"

namespace opst {
namespace {

using test::Processes;

constexpr int64_t kRows = 20, kN = 24, kK = 16;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) names.insert(file.path().filename());
  return names;
}

RankMemory memory_of(int ranks) {
  return std::move(RankMemory::create(ranks, {.staging_bytes = 1 << 16, .shared_bytes = 1 << 16}).value());
}

// Three operators of one rank on numbers that depend on the rank alone; the bytes of all outputs, or the message.
std::string work(Communicator& communicator, bool direct) {
  const int rank = communicator.rank(), ranks = communicator.world_size();
  Context context = std::move(Context::create({.num_threads = 1}).value());
  test::Random random(7);
  std::vector<float> weights(kN * kK), x(kRows * kK), bytes(static_cast<size_t>(ranks * kRows * kN));
  for (float& value : weights) value = static_cast<float>(random.normal());
  test::Random own(static_cast<uint64_t>(100 + rank));
  for (float& value : x) value = static_cast<float>(own.normal());
  const auto weight = ConstTensor::contiguous(DType::f32, {kN, kK}, weights.data());
  const auto parts = pack_columns(context, weight, ranks);
  const auto whole = PackedWeight::pack(context, weight);
  const auto rows = ConstTensor::contiguous(DType::f32, {kRows, kK}, x.data());
  void* memory = bytes.data();
  if (direct) memory = communicator.allocate_shared(static_cast<int64_t>(bytes.size()) * 4).value();
  std::string all;
  const Mc2Options options{.tile_rows = 3};
  const auto add = [&](int64_t m, int64_t n, const auto& call) {
    const Tensor out = Tensor::contiguous(DType::f32, {m, n}, memory);
    const Status status = call(out);
    if (!status.ok()) return all = status.message(), false;
    all.append(static_cast<const char*>(memory), static_cast<size_t>(m * n * 4));
    return true;
  };
  const bool ok = add(ranks * kRows, share_of(kN, ranks, rank),
                      [&](const Tensor& out) {
                        return matmul_all_to_all(context, communicator, rows, parts.value(), out, options);
                      }) &&
                  add(kRows, kN,
                      [&](const Tensor& out) {
                        return matmul_all_reduce(context, communicator, rows, whole.value(), out, options);
                      }) &&
                  add(ranks * kRows, kN, [&](const Tensor& out) {
                    return all_gather_matmul(context, communicator, rows, whole.value(), out, options);
                  });
  if (ok && direct && ranks > 1 && communicator.stats().direct_tiles == 0) all += "no tile was stored directly";
  return all;
}

class Ranks : public testing::TestWithParam<int> {};

TEST_P(Ranks, ProcessesHaveTheBitsOfThreads) {
  OPST_SKIP_UNDER_THREAD_SANITIZER();
  const int ranks = GetParam();
  const std::set<std::string> before = shared_files();
  std::vector<std::string> results[2];
  for (const bool direct : {false, true}) {
    const RankMemory memory = memory_of(ranks);
    const Processes processes(ranks, [&](int rank) {
      Result<Communicator> own = Communicator::join(memory.ticket(), rank, {.timeout_seconds = 20});
      return own.ok() ? work(own.value(), direct) : own.status().message();
    });
    for (int r = 0; r < ranks; ++r) results[direct].push_back(processes.line(r));
  }
  auto threads = std::move(Communicator::create_threads(ranks, {.staging_bytes = 1 << 16}).value());
  std::vector<std::string> expected(static_cast<size_t>(ranks));
  test::on_threads(ranks, [&](int r) {
    expected[static_cast<size_t>(r)] = work(threads[static_cast<size_t>(r)], false);
    return Status();
  });
  for (size_t r = 0; r < expected.size(); ++r) {
    ASSERT_GE(expected[r].size(), static_cast<size_t>(kRows * kN * 4)) << expected[r];
    EXPECT_TRUE(results[0][r] == expected[r]) << results[0][r].substr(0, 300);
    EXPECT_TRUE(results[1][r] == expected[r]) << results[1][r].substr(0, 300);
  }
  EXPECT_EQ(shared_files(), before);
}

// The operators of sequences and experts likewise.
TEST_P(Ranks, ProcessesHaveTheBitsOfThreadsInSpreadOperators) {
  OPST_SKIP_UNDER_THREAD_SANITIZER();
  const int ranks = GetParam();
  const std::set<std::string> before = shared_files();
  const CommunicatorOptions options{.timeout_seconds = 20, .staging_bytes = 1 << 16, .shared_bytes = 1 << 18};
  const auto results = [&](int rank, Communicator& own, bool direct) {
    Context context = std::move(Context::create({.num_threads = 1}).value());
    test::SpreadProblem problem(context, rank, ranks);
    void* out = problem.own_out();
    if (direct) out = own.allocate_shared(test::SpreadProblem::out_bytes(ranks)).value();
    std::string all = problem.all_results(context, own, out);
    if (direct && ranks > 1 && own.stats().direct_tiles == 0) all += "no tile was stored directly";
    return all;
  };
  std::vector<std::string> of_processes[2];
  for (const bool direct : {false, true}) {
    const RankMemory memory = std::move(RankMemory::create(ranks, options).value());
    const Processes processes(ranks, [&](int rank) {
      Result<Communicator> own = Communicator::join(memory.ticket(), rank, options);
      return own.ok() ? results(rank, own.value(), direct) : own.status().message();
    });
    for (int r = 0; r < ranks; ++r) of_processes[direct].push_back(processes.line(r));
  }
  auto threads = std::move(Communicator::create_threads(ranks, options).value());
  std::vector<std::string> expected(static_cast<size_t>(ranks));
  test::on_threads(ranks, [&](int r) {
    const auto i = static_cast<size_t>(r);
    return expected[i] = results(r, threads[i], false), Status();
  });
  for (size_t r = 0; r < expected.size(); ++r) {
    ASSERT_GE(expected[r].size(), size_t{10000}) << expected[r];
    EXPECT_TRUE(of_processes[0][r] == expected[r]) << of_processes[0][r].substr(0, 300);
    EXPECT_TRUE(of_processes[1][r] == expected[r]) << of_processes[1][r].substr(0, 300);
  }
  EXPECT_EQ(shared_files(), before);
}
INSTANTIATE_TEST_SUITE_P(SharedMemory, Ranks, testing::Values(1, 2, 3, 4));

// Rank 2 of three ends without a word, by a signal or by itself; both others learn of it, not by the timeout of 20 s:
// a zombie counts as ended.
void expect_found(bool killed_by_signal) {
  OPST_SKIP_UNDER_THREAD_SANITIZER();
  const RankMemory memory = memory_of(3);
  const Processes processes(3, [&](int rank) {
    Communicator own = std::move(Communicator::join(memory.ticket(), rank, {.timeout_seconds = 20}).value());
    if (rank == 2 && !killed_by_signal) _exit(0);
    if (rank == 2) return pause(), std::string();
    const std::string all = work(own, false);
    return all + (work(own, false) == all ? " poisoned" : " alive");
  });
  if (killed_by_signal) {
    usleep(50'000);
    kill(processes.process(2), SIGKILL);
  }
  for (const int r : {0, 1}) {
    const std::string line = processes.line(r);
    EXPECT_TRUE(contains(line, "rank 2 is gone (its process ended)")) << line;
    EXPECT_TRUE(contains(line, "poisoned")) << line;
  }
}

TEST(Faults, AProcessThatExitsIsFound) { expect_found(false); }
TEST(Faults, AProcessThatIsKilledIsFound) { expect_found(true); }

TEST(Faults, AStoppedProcessIsATimeout) {
  OPST_SKIP_UNDER_THREAD_SANITIZER();
  const RankMemory memory = memory_of(2);
  const Processes processes(2, [&](int rank) {
    Communicator own = std::move(Communicator::join(memory.ticket(), rank, {.timeout_seconds = 0.3}).value());
    if (rank == 1) raise(SIGSTOP);
    return work(own, false);
  });
  const std::string line = processes.line(0);
  EXPECT_TRUE(contains(line, "matmul_all_to_all: rank 0 waits for rank 1 to begin call 0, without progress for "))
      << line;
}

// A forked child has copies of its parent's communicators: their end is not the rank's, and they make no calls.
TEST(Faults, AForkedCopyIsNotTheRank) {
  const RankMemory memory = memory_of(2);
  auto first = std::make_unique<Communicator>(std::move(Communicator::join(memory.ticket(), 0).value()));
  const Communicator second = std::move(Communicator::join(memory.ticket(), 1).value());
  const Processes child(1, [&](int) {
    const Tensor nothing = Tensor::contiguous(DType::f32, {0, 0}, nullptr);
    const Status status =
        all_gather_matmul(test::rank_context(0), *first, nothing, std::span<const PackedWeight>(), nothing);
    first.reset();
    return status.message();
  });
  EXPECT_EQ(child.line(0), "all_gather_matmul: the communicator of rank 0 belongs to the process that forked this one");
  EXPECT_EQ(second.impl().transport->state(0), mc2::PeerState::sound);
  first.reset();
  EXPECT_EQ(second.impl().transport->state(0), mc2::PeerState::gone);
}

TEST(RankMemory, TicketsAndRanksAreChecked) {
  const RankMemory memory = memory_of(2);
  const auto refusal = [&](const std::string& ticket, int rank) { return Communicator::join(ticket, rank).status(); };
  EXPECT_EQ(refusal("nonsense", 0).message(), "Communicator::join: 'nonsense' is no ticket of RankMemory");
  EXPECT_EQ(refusal(memory.ticket(), 2).message(), "Communicator::join: rank is 2, but must be from 0 to 1");
  EXPECT_EQ(refusal(text(getpid(), ":", 1 << 20), 0).code(), StatusCode::unsupported);
  EXPECT_EQ(refusal(text(getpid(), ":", 0), 0).ok(), false);
  Result<Communicator> one = Communicator::join(memory.ticket(), 1);
  ASSERT_TRUE(one.ok()) << one.status().message();
  EXPECT_EQ(one.value().rank(), 1);
  EXPECT_EQ(refusal(memory.ticket(), 1).message(), text("Communicator::join: rank 1 was taken by process ", getpid()));
  EXPECT_EQ(one.value().allocate_shared(1 << 17).status().message(),
            "allocate_shared: size_bytes is 131072, but 65536 of shared_bytes are left");
  EXPECT_EQ(RankMemory::create(0).status().message(), "RankMemory::create: world_size is 0, but must be from 1 to 256");
}

}  // namespace
}  // namespace opst
