// What the operators allocate: nothing in their second call. And exhausted memory: whichever allocation of a world, its
// first calls or a refusal fails, every rank gets a Status, in time, and nothing is leaked.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "mc2/test_ranks.h"
#include "mc2/test_spread.h"
#include "testing/fail_allocations.h"

namespace opst {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kRows = 6, kN = 10, kK = 32;

// The second rank's thread, started before memory fails. Nothing here allocates.
class SecondRank {
 public:
  explicit SecondRank(const std::function<void()>& body) : thread_([this, &body] { loop(body); }) {}
  ~SecondRank() {
    turn(-1);
    thread_.join();
  }
  void start() { turn(1); }
  void wait() {
    while (turn_.load() == 1) turn_.wait(1);
  }

 private:
  void turn(int value) {
    turn_ = value;
    turn_.notify_all();
  }
  void loop(const std::function<void()>& body) {
    for (;;) {
      turn_.wait(0);
      if (turn_.load() < 0) return;
      body();
      turn(0);
    }
  }
  std::atomic<int> turn_{0};
  std::thread thread_;
};

// All five operators on tensors that are the same for all ranks, out apart.
struct Problem {
  std::vector<float> x, weight, outs[kRanks];
  std::vector<PackedWeight> whole, parts;

  Problem() : x(kRows * kRanks * kK, 1), weight(kN * kK * kRanks, 1) {
    for (auto& out : outs) out.assign(kRows * kRanks * kN, 0);
    Context& context = test::rank_context(0);
    const auto matrix = ConstTensor::contiguous(DType::f32, {kN, kK}, weight.data());
    const auto wide = ConstTensor::contiguous(DType::f32, {kN, kK * kRanks}, weight.data());
    whole = std::move(pack_columns(context, matrix, 1).value());
    whole.push_back(std::move(pack_columns(context, wide, 1).value()[0]));
    parts = std::move(pack_columns(context, matrix, kRanks).value());
  }

  Status call(Mc2Operator op, Communicator& rank, int64_t tile_rows) {
    Context& context = test::rank_context(rank.rank());
    const int ranks = rank.world_size();
    const Mc2Options options{.tile_rows = tile_rows};
    const auto x_of = [&](int64_t rows) { return ConstTensor::contiguous(DType::f32, {rows, kK}, x.data()); };
    const auto out = [&](int64_t rows, int64_t n = kN) {
      return Tensor::contiguous(DType::f32, {rows, n}, outs[rank.rank()].data());
    };
    switch (op) {
      case Mc2Operator::matmul_all_to_all:
        return matmul_all_to_all(context, rank, x_of(kRows), parts,
                                 out(kRows * ranks, share_of(kN, ranks, rank.rank())), options);
      case Mc2Operator::all_to_all_matmul:
        return all_to_all_matmul(context, rank, x_of(kRows * ranks), whole[1], out(kRows), options);
      case Mc2Operator::all_gather_matmul:
        return all_gather_matmul(context, rank, x_of(kRows), whole[0], out(kRows * ranks), options);
      case Mc2Operator::matmul_reduce_scatter:
        return matmul_reduce_scatter(context, rank, x_of(kRows * ranks), whole[0], out(kRows), options);
      default:
        return matmul_all_reduce(context, rank, x_of(kRows), whole[0], out(kRows), options);
    }
  }
  Status all(Communicator& rank, int64_t tile_rows) {
    for (int op = 0; op < 5; ++op) {
      Status status = call(static_cast<Mc2Operator>(op), rank, tile_rows);
      if (!status.ok()) return status;
    }
    return {};
  }
};

// The operators of sequences and experts.
struct Spread {
  test::SpreadProblem problems[kRanks] = {{test::rank_context(0), 0, kRanks}, {test::rank_context(1), 1, kRanks}};

  Status call(int index, Communicator& rank, int64_t tile_rows) {
    test::SpreadProblem& problem = problems[rank.rank()];
    return problem.call(index, test::rank_context(rank.rank()), rank, problem.own_out(), tile_rows);
  }
  Status all(Communicator& rank, int64_t tile_rows) {
    for (int index = 0; index < test::SpreadProblem::kCalls; ++index) {
      Status status = call(index, rank, tile_rows);
      if (!status.ok()) return status;
    }
    return {};
  }
};

template <class P>
void expect_no_allocation() {
  P problem;
  for (const bool direct : {false, true}) {
    auto world =
        std::move(Communicator::create_threads(kRanks, {.staging_bytes = 1 << 16, .direct_stores = direct}).value());
    Status other;
    const std::function<void()> body = [&] { other = problem.all(world[1], 2); };
    SecondRank second(body);
    const auto both = [&] {
      second.start();
      Status own = problem.all(world[0], 2);
      second.wait();
      return own.ok() ? other : own;
    };
    Status status = both();
    ASSERT_TRUE(status.ok()) << status.message();
    const int64_t before = test::num_allocations;
    status = both();
    EXPECT_EQ(test::num_allocations - before, 0) << (direct ? "direct" : "slots");
    EXPECT_TRUE(status.ok()) << status.message();
  }
}
TEST(Mc2Memory, TheSecondCallAllocatesNothing) { expect_no_allocation<Problem>(); }
TEST(Mc2Memory, TheSecondSpreadCallAllocatesNothing) { expect_no_allocation<Spread>(); }

// Where one rank lacks memory, the other has `communication`. tile_rows < 0: every call is refused.
template <class P, class Op>
void fail_each(Op op, int64_t tile_rows) {
  SCOPED_TRACE(static_cast<int>(op));
  P problem;
  std::optional<Result<std::vector<Communicator>>> world;
  Status other;
  const std::function<void()> body = [&] { other = problem.call(op, world->value()[1], tile_rows); };
  SecondRank second(body);
  const auto attempt = [&]() -> Status {
    for (Context* context : {&test::rank_context(0), &test::rank_context(1)}) context->trim();
    world.emplace(Communicator::create_threads(kRanks, {.timeout_seconds = 20, .staging_bytes = 1 << 16}));
    Status status = world->status();
    if (status.ok()) {
      second.start();
      status = problem.call(op, world->value()[0], tile_rows);
      second.wait();
      if (other.code() == StatusCode::out_of_memory || status.ok()) status = std::move(other);
    }
    other = {};
    world.reset();
    return status;
  };
  const StatusCode expected = tile_rows < 0 ? StatusCode::invalid_argument : StatusCode::ok;
  ASSERT_EQ(attempt().code(), expected);
  const int64_t live = test::live_allocations;
  const int64_t failed = test::fail_each_allocation(
      attempt, [&] { EXPECT_EQ(attempt().code(), expected); }, expected);
  EXPECT_GT(failed, 0);
  EXPECT_LE(test::live_allocations, live);
}

TEST(Mc2Memory, ExhaustedMemoryIsAStatusOnAllRanks) {
  for (int op = 0; op < 5; ++op) fail_each<Problem>(static_cast<Mc2Operator>(op), 2);
}
TEST(Mc2Memory, ExhaustedMemoryIsAStatusOnAllRanksInSpreadCalls) {
  for (int index = 0; index < test::SpreadProblem::kCalls; ++index) fail_each<Spread>(index, 2);
}
TEST(Mc2Memory, ExhaustedMemoryWhileRefusingIsAStatus) { fail_each<Problem>(Mc2Operator::all_gather_matmul, -1); }

}  // namespace
}  // namespace opst
