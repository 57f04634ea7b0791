// Faults: every rank that still runs gets a Status that says what happened, in time, and its communicator is poisoned.
#include "opst/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "mc2/exchange.h"
#include "mc2/test_ranks.h"
#include "testing/elements.h"

namespace opst {
namespace {

using test::on_threads;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<Communicator> world(int ranks, double timeout_seconds = 20) {
  return std::move(
      Communicator::create_threads(ranks, {.timeout_seconds = timeout_seconds, .staging_bytes = 1 << 16}).value());
}

// One rank's tensors of all_gather_matmul and the others, of 4 rows.
struct Tensors {
  int64_t m, n, k;
  DType type;
  std::vector<float> x_values, weight_values, out_values;
  PackedWeight weight;

  explicit Tensors(int ranks, int64_t a_m = 4, int64_t a_n = 6, DType a_type = DType::f32)
      : m(a_m), n(a_n), k(8), type(a_type) {
    x_values.assign(static_cast<size_t>(m * k), 1);
    weight_values.assign(static_cast<size_t>(n * k), 1);
    out_values.assign(static_cast<size_t>(ranks * std::max<int64_t>(m, 4) * n), -1);
    weight = std::move(
        PackedWeight::pack(test::rank_context(0), ConstTensor::contiguous(DType::f32, {n, k}, weight_values.data()))
            .value());
  }
  ConstTensor x() const { return ConstTensor::contiguous(type, {m, k}, x_values.data()); }
  Tensor out(int64_t rows) { return Tensor::contiguous(DType::f32, {rows, n}, out_values.data()); }

  Status gather(int rank, Communicator& communicator, const Mc2Options& options = {}) {
    const int64_t rows = options.rows.empty() ? m * communicator.world_size() : out_rows(options);
    return all_gather_matmul(test::rank_context(rank), communicator, x(), weight, out(rows), options);
  }
  static int64_t out_rows(const Mc2Options& options) {
    int64_t rows = 0;
    for (const int64_t r : options.rows) rows += r;
    return rows;
  }
};

TEST(Communicator, KnowsItsPlace) {
  auto ranks = world(3);
  ASSERT_EQ(ranks.size(), 3u);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(ranks[static_cast<size_t>(r)].rank(), r);
    EXPECT_EQ(ranks[static_cast<size_t>(r)].world_size(), 3);
    EXPECT_TRUE(ranks[static_cast<size_t>(r)].status().ok());
  }
  Communicator moved = std::move(ranks[1]);
  EXPECT_EQ(moved.rank(), 1);
  moved = std::move(ranks[2]);
  EXPECT_EQ(moved.rank(), 2);
}

TEST(Communicator, RefusesOptionsThatMakeNoSense) {
  const auto message = [](int ranks, const CommunicatorOptions& options) {
    const auto result = Communicator::create_threads(ranks, options);
    EXPECT_EQ(result.status().code(), StatusCode::invalid_argument);
    return result.status().message();
  };
  EXPECT_EQ(message(0, {}), "Communicator::create_threads: world_size is 0, but must be from 1 to 256");
  EXPECT_EQ(message(257, {}), "Communicator::create_threads: world_size is 257, but must be from 1 to 256");
  EXPECT_TRUE(contains(message(2, {.timeout_seconds = 0}), "timeout_seconds is 0.000000, but must be > 0"));
  EXPECT_TRUE(contains(message(2, {.timeout_seconds = std::nan("")}), "but must be > 0"));
  EXPECT_TRUE(contains(message(2, {.staging_bytes = -1}), "staging_bytes is -1, but must be from 0 to 2^56"));
  EXPECT_EQ(Communicator::create_threads(256, {.staging_bytes = int64_t{1} << 56}).status().code(),
            StatusCode::out_of_memory);
}

// Rank 2 of three spoils its call: all get an error, both signatures are named, and the communicator is poisoned.
void expect_mismatch(const std::function<Status(int, Communicator&)>& call, const std::string& first,
                     const std::string& second) {
  auto ranks = world(3);
  const auto statuses = on_threads(3, [&](int r) { return call(r, ranks[static_cast<size_t>(r)]); });
  for (int r = 0; r < 3; ++r) {
    const Status& status = statuses[static_cast<size_t>(r)];
    EXPECT_EQ(status.code(), StatusCode::communication);
    EXPECT_TRUE(contains(status.message(), first)) << status.message();
    EXPECT_TRUE(contains(status.message(), second)) << status.message();
    EXPECT_EQ(ranks[static_cast<size_t>(r)].status().message(), status.message());
    // At once, and the same again.
    EXPECT_EQ(call(r, ranks[static_cast<size_t>(r)]).message(), status.message());
  }
}

TEST(Communicator, AMismatchedShapeIsAnErrorOnAllRanks) {
  Tensors a(3), b(3), c(3, 5);
  expect_mismatch(
      [&](int r, Communicator& comm) {
        return (r == 0 ? a : r == 1 ? b : c).gather(r, comm);
      },
      "rows [4, 4, 4], k 8", "rows [5, 5, 5], k 8");
}

TEST(Communicator, AMismatchedDtypeIsAnErrorOnAllRanks) {
  Tensors a(3), b(3), c(3, 4, 6, DType::bf16);
  expect_mismatch(
      [&](int r, Communicator& comm) {
        return (r == 0 ? a : r == 1 ? b : c).gather(r, comm);
      },
      "all_gather_matmul(x f32", "all_gather_matmul(x bf16");
}

TEST(Communicator, AnotherOperatorIsAnErrorOnAllRanks) {
  Tensors a(3), b(3), c(3);
  expect_mismatch(
      [&](int r, Communicator& comm) {
        if (r != 2) return (r == 0 ? a : b).gather(r, comm);
        return matmul_all_reduce(test::rank_context(r), comm, c.x(), c.weight, c.out(4));
      },
      "all_gather_matmul(x f32", "matmul_all_reduce(x f32");
}

TEST(Communicator, ARefusedCallFailsOnAllRanks) {
  auto ranks = world(3);
  Tensors tensors[] = {Tensors(3), Tensors(3), Tensors(3)};
  const auto statuses = on_threads(
      3, [&](int r) { return tensors[r].gather(r, ranks[static_cast<size_t>(r)], {.tile_rows = r == 1 ? -1 : 0}); });
  const std::string why = "all_gather_matmul: tile_rows is -1, but must be from 0 to 2^56";
  EXPECT_EQ(statuses[1].code(), StatusCode::invalid_argument);
  EXPECT_EQ(statuses[1].message(), why);
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(statuses[r].code(), StatusCode::communication);
    EXPECT_TRUE(contains(statuses[r].message(), why)) << statuses[r].message();
    EXPECT_FALSE(ranks[r].status().ok());
  }
}

TEST(Communicator, ARankThatNeverCallsIsATimeout) {
  auto ranks = world(2, 0.2);
  Tensors a(2);
  const auto started = std::chrono::steady_clock::now();
  const Status status = a.gather(0, ranks[0]);
  EXPECT_GE(std::chrono::steady_clock::now() - started, std::chrono::milliseconds(200));
  EXPECT_EQ(status.code(), StatusCode::timeout);
  EXPECT_TRUE(
      contains(status.message(), "all_gather_matmul: rank 0 waits for rank 1 to begin call 0, without progress for "))
      << status.message();
  // The late one learns of it.
  const Status late = a.gather(1, ranks[1]);
  EXPECT_EQ(late.code(), StatusCode::communication);
  EXPECT_TRUE(contains(late.message(), "all_gather_matmul: rank 0 failed: all_gather_matmul: rank 0 waits"))
      << late.message();
}

// Rank 1 sends one tile of three: the message names the tile that is missing.
TEST(Communicator, ATimeoutNamesTheTile) {
  auto ranks = world(2, 20);
  ranks[0].impl().options.timeout_seconds = 0.2;
  const auto statuses = on_threads(2, [&](int r) {
    mc2::Exchange exchange(ranks[static_cast<size_t>(r)].impl(), "test_operator");
    exchange.expect(1 - r, r == 1 ? 3 : 0, r == 0 ? 3 : 0);
    return exchange.run({}, [&] {
      if (r == 0 && exchange.can_receive(1)) exchange.release(1);
      if (r == 1 && exchange.peer(0).sent == 0 && exchange.can_send(0)) exchange.send(0, 64);
      return Status();
    });
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::timeout);
  EXPECT_TRUE(
      contains(statuses[0].message(), "test_operator: rank 0 waits for tile 1 of 3 from rank 1, without progress"))
      << statuses[0].message();
  EXPECT_EQ(statuses[1].code(), StatusCode::communication);
  EXPECT_TRUE(contains(statuses[1].message(), "rank 0 failed: test_operator: rank 0 waits for tile 1 of 3"));
}

TEST(Communicator, ARankThatIsGoneIsFoundAtOnce) {
  auto ranks = world(3);
  Tensors tensors[] = {Tensors(3), Tensors(3)};
  const auto statuses = on_threads(3, [&](int r) {
    Communicator own = std::move(ranks[static_cast<size_t>(r)]);
    if (r == 2) return Status();
    return tensors[r].gather(r, own);
  });
  // One finds rank 2 gone; the other finds that too, or that the first failed of it.
  for (const size_t r : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(statuses[r].code(), StatusCode::communication);
    EXPECT_TRUE(contains(statuses[r].message(), "rank 2 is gone (its communicator was destroyed)"))
        << statuses[r].message();
  }
}

// A rank that leaves after its last call owes nothing.
TEST(Communicator, ARankMayLeaveAfterItsLastCall) {
  for (int i = 0; i < 50; ++i) {
    auto ranks = world(3);
    Tensors tensors[] = {Tensors(3), Tensors(3), Tensors(3)};
    const auto statuses = on_threads(3, [&](int r) {
      Communicator own = std::move(ranks[static_cast<size_t>(r)]);
      return tensors[r].gather(r, own, {.tile_rows = 1});
    });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
  }
}

// Rank 2 has sent all, ends its part and leaves, or fails in its next call, while rank 0 waits for rank 1 to read both
// messages at once, as the operators do that sum: rank 0's call goes on.
void expect_no_loss(bool leaves) {
  auto ranks = world(3);
  const auto statuses = on_threads(3, [&](int r) {
    Communicator own = std::move(ranks[static_cast<size_t>(r)]);
    mc2::Exchange exchange(own.impl(), "test_operator");
    if (r == 0) {
      for (const int peer : {1, 2}) exchange.expect(peer, 0, 1);
    } else {
      exchange.expect(0, 1, 0);
    }
    Status status = exchange.run({}, [&] {
      if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (r == 0 && exchange.can_receive(1) && exchange.can_receive(2)) {
        for (const int peer : {1, 2}) exchange.release(peer);
      }
      if (r != 0 && exchange.can_send(0)) exchange.send(0, 64);
      return Status();
    });
    if (r == 2 && status.ok() && !leaves) static_cast<void>(own.impl().poison(Status::invalid_argument("next")));
    return status;
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
}
TEST(Communicator, ARankMayLeaveWhenAllItSentHasArrived) { expect_no_loss(true); }
TEST(Communicator, ARankMayFailInItsNextCallWhenAllItSentHasArrived) { expect_no_loss(false); }

// A rank without rows takes part all the same; shapes that differ between ranks are stated by all of them.
TEST(Communicator, RanksWithoutRowsTakePart) {
  auto ranks = world(3);
  Tensors tensors[] = {Tensors(3, 5), Tensors(3, 0), Tensors(3, 1)};
  const int64_t rows[] = {5, 0, 1};
  const auto statuses =
      on_threads(3, [&](int r) { return tensors[r].gather(r, ranks[static_cast<size_t>(r)], {.rows = rows}); });
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(statuses[static_cast<size_t>(r)].ok()) << statuses[static_cast<size_t>(r)].message();
  }
  for (int64_t i = 0; i < 6 * 6; ++i) EXPECT_EQ(tensors[0].out_values[static_cast<size_t>(i)], 8);
}

// A second thread's call on the same communicator is refused; the first one's goes on.
TEST(Communicator, ASecondThreadIsRefused) {
  auto ranks = world(2);
  Tensors first(2), second(2), other(2);
  const auto statuses = on_threads(3, [&](int t) {
    if (t == 0) return first.gather(0, ranks[0]);
    while (ranks[1].impl().transport->entry(0, 0) == nullptr) std::this_thread::yield();
    if (t == 1) {
      const Status status = second.gather(2, ranks[0]);
      EXPECT_EQ(status.code(), StatusCode::invalid_argument);
      EXPECT_EQ(status.message(), "all_gather_matmul: the communicator of rank 0 is in a call of another thread");
      return other.gather(1, ranks[1]);
    }
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(ranks[0].status().ok());
}

// Lists of many ranks are cut: a difference behind the cut is found, and said to lie there.
TEST(Communicator, AMismatchBehindTheCutSignatureIsFound) {
  constexpr int kRanks = 2;
  auto ranks = world(kRanks);
  const auto statuses = on_threads(kRanks, [&](int r) {
    mc2::Entry entry;
    entry.signature_hash = static_cast<uint64_t>(r);
    std::fill_n(entry.signature, mc2::kSignatureBytes - 1, 'x');
    mc2::Exchange exchange(ranks[static_cast<size_t>(r)].impl(), "test_operator");
    return exchange.run(entry, [] { return Status(); });
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::communication);
    EXPECT_TRUE(contains(status.message(), "x.., which differs further on")) << status.message();
  }
}

// Two communicators of the same ranks at once.
TEST(Communicator, TwoMayBeUsedAtOnce) {
  auto first = world(2), second = world(2);
  Tensors tensors[] = {Tensors(2), Tensors(2), Tensors(2), Tensors(2)};
  const auto statuses = on_threads(4, [&](int t) {
    Communicator& own = (t < 2 ? first : second)[static_cast<size_t>(t % 2)];
    for (int i = 0; i < 20; ++i) {
      Status status = tensors[t].gather(t % 2, own, {.tile_rows = 1});
      if (!status.ok()) return status;
    }
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace opst
