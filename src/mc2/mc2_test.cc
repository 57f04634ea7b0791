// Every operator against its unfused form: matmul of whole tensors, then the plain collective, bit for bit.
#include "opst/mc2.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>

#include "core/convert.h"
#include "core/text.h"
#include "mc2/test_ranks.h"
#include "testing/compare.h"
#include "testing/effort.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"

namespace opst {
namespace {

using test::GuardedBuffer;
using test::Random;

// What is multiplied with what.
enum class Kind { f32, bf16, q8_0, int8, int8_weights };
constexpr Kind kKinds[] = {Kind::f32, Kind::bf16, Kind::q8_0, Kind::int8, Kind::int8_weights};
constexpr const char* kKindNames[] = {"f32", "bf16", "q8_0", "int8", "f32 x int8"};

DType x_type(Kind kind) { return kind == Kind::int8 ? DType::i8 : kind == Kind::bf16 ? DType::bf16 : DType::f32; }

struct Owned {
  std::unique_ptr<GuardedBuffer> memory;
  Tensor tensor;
};

// A tensor without elements, as a rank without rows has them: of an empty std::vector, which is no memory.
template <class T>
T without_memory_if_empty(T tensor) {
  if (tensor.num_elements() == 0) tensor.data = nullptr;
  return tensor;
}

// [rows, columns], or its transposed storage: NaN everywhere.
Owned owned(DType dtype, int64_t rows, int64_t columns, bool transposed = false) {
  Owned o{std::make_unique<GuardedBuffer>(std::max<int64_t>(1, rows * columns) * size_bytes(dtype)), {}};
  o.tensor =
      transposed ? o.memory->tensor(dtype, {columns, rows}).transposed(0, 1) : o.memory->tensor(dtype, {rows, columns});
  return o;
}

Owned random_matrix(DType dtype, int64_t rows, int64_t columns, Random& random, bool transposed = false) {
  Owned o = owned(dtype, rows, columns, transposed);
  fill(o.tensor, test::Fill::normal, random);
  return o;
}

struct Weights {
  std::vector<PackedWeight> floats;
  std::vector<PackedIntWeight> ints;
  GroupedWeight view() const { return floats.empty() ? GroupedWeight(ints) : GroupedWeight(floats); }
};

// A weight [n, k], divided into `parts` by columns.
struct Source {
  Kind kind;
  int64_t n, k;
  Owned values, scales;
  std::vector<char> blocks;

  Source(Kind a_kind, int64_t a_n, int64_t a_k, Random& random) : kind(a_kind), n(a_n), k(a_k) {
    const bool ints = kind == Kind::int8 || kind == Kind::int8_weights;
    values = random_matrix(ints ? DType::i8 : kind == Kind::bf16 ? DType::bf16 : DType::f32, n, k, random);
    scales = random_matrix(DType::f32, n, 1, random);
    if (kind != Kind::q8_0) return;
    for (int64_t block = 0; block < n * k / 32; ++block) {
      const f16 scale = to_f16(static_cast<float>(random.uniform(0.01, 0.1)));
      blocks.insert(blocks.end(), reinterpret_cast<const char*>(&scale), reinterpret_cast<const char*>(&scale) + 2);
      for (int i = 0; i < 32; ++i) blocks.push_back(static_cast<char>(random.integer(-127, 127)));
    }
  }

  Weights pack(Context& context, int parts) const {
    Weights weights;
    const auto take = [](auto result, auto& to) {
      EXPECT_TRUE(result.ok()) << result.status().message();
      if (result.ok()) to = std::move(result.value());
    };
    if (kind == Kind::q8_0) {
      const QuantMatrix matrix{QuantFormat::q8_0, n, k, blocks.data(), static_cast<int64_t>(blocks.size())};
      take(pack_columns(context, matrix, parts), weights.floats);
    } else if (kind == Kind::f32 || kind == Kind::bf16) {
      take(pack_columns(context, values.tensor, parts), weights.floats);
    } else {
      take(pack_columns(context, IntMatrix{values.tensor, scales.tensor}, parts), weights.ints);
    }
    return weights;
  }
};

// The unfused form's product.
void multiply(Context& context, const ConstTensor& x, const ConstTensor& x_scales, const Weights& weight,
              const ConstTensor& bias, const Tensor& out) {
  const Status status = weight.floats.empty()
                            ? matmul(context, x, weight.ints[0], out, {.x_scales = x_scales, .bias = bias})
                            : matmul(context, x, weight.floats[0], out, {.bias = bias, .batch_invariant = true});
  ASSERT_TRUE(status.ok()) << status.message();
}

struct Case {
  Mc2Operator op;
  int ranks;
  Kind kind;
  int64_t n, k;               // k: of each rank's x
  std::vector<int64_t> rows;  // of each rank
  int64_t tile_rows;
  bool bias, residual, direct, strided, exchanged;
  DType out;

  std::string text() const {
    return opst::text(to_string(op), ", ", ranks, " ranks, ", kKindNames[static_cast<int>(kind)], ", n ", n, ", k ", k,
                      ", tile ", tile_rows, ", rows ",
                      joined(ranks, [&](int r) { return std::to_string(rows[static_cast<size_t>(r)]); }),
                      bias ? ", bias" : "", residual ? ", residual" : "", direct ? ", direct" : ", slots",
                      strided ? ", strided" : "", ", out ", to_string(out));
  }
  int64_t all_rows() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  int64_t first_row(int rank) const { return std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0}); }
  bool sums() const { return op == Mc2Operator::matmul_reduce_scatter || op == Mc2Operator::matmul_all_reduce; }
};

using Function = Status (*)(Context&, Communicator&, const ConstTensor&, const GroupedWeight&, const Tensor&,
                            const Mc2Options&);
constexpr Function kFunctions[] = {matmul_all_to_all, all_to_all_matmul, all_gather_matmul, matmul_reduce_scatter,
                                   matmul_all_reduce};

// A case's tensors of all ranks, and what the unfused form gives.
class AllRanks {
 public:
  AllRanks(const Case& a_case, Random& random) : c_(a_case) {
    Context& context = test::rank_context(0);
    const auto index = [](int r) { return static_cast<size_t>(r); };
    const bool all_to_all_matmul = c_.op == Mc2Operator::all_to_all_matmul;
    const int64_t weight_k = all_to_all_matmul ? c_.k * c_.ranks : c_.k;
    for (int r = 0; r < c_.ranks; ++r) {
      if (r == 0 || c_.sums()) sources_.emplace_back(c_.kind, c_.n, weight_k, random);
      const bool all_rows = all_to_all_matmul || c_.sums();
      const int64_t m = all_rows ? c_.all_rows() : c_.rows[index(r)];
      x_.push_back(random_matrix(x_type(c_.kind), m, c_.k, random, random.chance(0.3)));
      scales_.push_back(random_matrix(DType::f32, m, 1, random));
    }
    bias_ = random_matrix(DType::f32, c_.n, 1, random);
    residual_ = random_matrix(DType::bf16, c_.all_rows(), c_.n, random);
    for (const Source& source : sources_) whole_.push_back(source.pack(context, 1));
    if (c_.op == Mc2Operator::matmul_all_to_all) parts_ = sources_[0].pack(context, c_.ranks);
    for (int r = 0; r < c_.ranks; ++r) {
      const bool wide = c_.op == Mc2Operator::matmul_all_to_all;
      const int64_t columns = wide ? share_of(c_.n, c_.ranks, r) : c_.n;
      const bool every_row = wide || c_.op == Mc2Operator::all_gather_matmul || c_.op == Mc2Operator::matmul_all_reduce;
      const int64_t rows = every_row ? c_.all_rows() : c_.rows[index(r)];
      out_.push_back(owned(c_.out, rows, columns, c_.strided));
      expected_.push_back(owned(c_.out, rows, columns));
      const bool gather = c_.op == Mc2Operator::all_gather_matmul;
      exchanged_.push_back(owned(x_type(c_.kind), rows, gather ? c_.k : weight_k));
      expected_exchanged_.push_back(owned(x_type(c_.kind), rows, gather ? c_.k : weight_k));
    }
    unfused(context);
  }

  Status fused(int rank, Communicator& communicator) {
    const auto r = static_cast<size_t>(rank);
    Mc2Options options{.tile_rows = c_.tile_rows};
    if (c_.bias) options.bias = without_memory_if_empty(bias_.tensor.selected(1, 0));
    if (c_.kind == Kind::int8 && c_.op != Mc2Operator::all_to_all_matmul) {
      options.x_scales = without_memory_if_empty(scales_[r].tensor.selected(1, 0));
    }
    if (c_.residual) options.residual = without_memory_if_empty(residual_of(rank));
    if (c_.op != Mc2Operator::matmul_all_reduce) options.rows = c_.rows;
    if (c_.exchanged) options.exchanged = without_memory_if_empty(exchanged_[r].tensor);
    const Weights& weight = c_.op == Mc2Operator::matmul_all_to_all ? parts_ : whole_[c_.sums() ? r : 0];
    return kFunctions[static_cast<int>(c_.op)](test::rank_context(rank), communicator,
                                               without_memory_if_empty(x_[r].tensor), weight.view(),
                                               without_memory_if_empty(out_[r].tensor), options);
  }

  void expect_equal(int rank) const {
    const auto r = static_cast<size_t>(rank);
    const test::Comparison c = test::compare_bits(out_[r].tensor, expected_[r].tensor, {.name = "out"});
    EXPECT_TRUE(c.ok) << "rank " << rank << ": " << c.message;
    EXPECT_TRUE(out_[r].memory->slack_intact());
    if (!c_.exchanged) return;
    const test::Comparison x =
        test::compare_bits(exchanged_[r].tensor, expected_exchanged_[r].tensor, {.name = "exchanged"});
    EXPECT_TRUE(x.ok) << "rank " << rank << ": " << x.message;
  }

 private:
  ConstTensor residual_of(int rank) const {
    if (c_.op == Mc2Operator::matmul_all_reduce) return residual_.tensor;
    return residual_.tensor.narrowed(0, c_.first_row(rank), c_.rows[static_cast<size_t>(rank)]);
  }
  ConstTensor bias() const { return c_.bias ? ConstTensor(bias_.tensor.selected(1, 0)) : ConstTensor(); }
  ConstTensor scales(int rank) const {
    if (c_.kind != Kind::int8 || c_.op == Mc2Operator::all_to_all_matmul) return {};
    return scales_[static_cast<size_t>(rank)].tensor.selected(1, 0);
  }

  void unfused(Context& context) {
    if (c_.sums()) return unfused_sums(context);
    const auto whole = [&](int rank) { return c_.first_row(rank); };
    if (c_.op == Mc2Operator::all_to_all_matmul) {
      for (int d = 0; d < c_.ranks; ++d) {
        const auto to = static_cast<size_t>(d);
        for (int s = 0; s < c_.ranks; ++s) {
          test::copy(x_[static_cast<size_t>(s)].tensor.narrowed(0, whole(d), c_.rows[to]),
                     expected_exchanged_[to].tensor.narrowed(1, s * c_.k, c_.k));
        }
        multiply(context, expected_exchanged_[to].tensor, {}, whole_[0], bias(), expected_[to].tensor);
      }
      return;
    }
    for (int s = 0; s < c_.ranks; ++s) {
      const auto from = static_cast<size_t>(s);
      const Owned product = owned(c_.out, c_.rows[from], c_.n);
      multiply(context, x_[from].tensor, scales(s), whole_[0], bias(), product.tensor);
      int64_t column = 0;
      for (int d = 0; d < c_.ranks; ++d) {
        const auto to = static_cast<size_t>(d);
        const int64_t columns = expected_[to].tensor.shape[1];
        test::copy(product.tensor.narrowed(1, column, columns),
                   expected_[to].tensor.narrowed(0, whole(s), c_.rows[from]));
        if (c_.op == Mc2Operator::matmul_all_to_all) column += columns;
        if (c_.op != Mc2Operator::all_gather_matmul) continue;
        test::copy(x_[from].tensor, expected_exchanged_[to].tensor.narrowed(0, whole(s), c_.rows[from]));
      }
    }
  }

  // All-gather of f32 partials, summed in the order of ranks.
  void unfused_sums(Context& context) {
    const int64_t m = c_.all_rows();
    Owned sum = owned(DType::f32, m, c_.n);
    for (int s = 0; s < c_.ranks; ++s) {
      const Owned partial = owned(DType::f32, m, c_.n);
      multiply(context, x_[static_cast<size_t>(s)].tensor, scales(s), whole_[static_cast<size_t>(s)], {},
               partial.tensor);
      auto* const to = static_cast<float*>(sum.tensor.data);
      const auto* const from = static_cast<const float*>(partial.tensor.data);
      for (int64_t i = 0; i < m * c_.n; ++i) to[i] = s == 0 ? from[i] : to[i] + from[i];
    }
    auto* const values = static_cast<float*>(sum.tensor.data);
    for (int64_t i = 0; i < m * c_.n; ++i) {
      if (c_.bias) values[i] += static_cast<float>(test::get(bias_.tensor, i % c_.n));
      if (c_.residual) values[i] += static_cast<float>(test::get(residual_.tensor, i));
    }
    for (int r = 0; r < c_.ranks; ++r) {
      const Owned& to = expected_[static_cast<size_t>(r)];
      const bool all = c_.op == Mc2Operator::matmul_all_reduce;
      test::copy(sum.tensor.narrowed(0, all ? 0 : c_.first_row(r), to.tensor.shape[0]), to.tensor);
    }
  }

  Case c_;
  std::vector<Source> sources_;
  std::vector<Owned> x_, scales_, out_, expected_, exchanged_, expected_exchanged_;
  Owned bias_, residual_;
  std::vector<Weights> whole_;
  Weights parts_;
};

Case random_case(Mc2Operator op, int ranks, int64_t size, int64_t tile, Random& random) {
  Case c{.op = op,
         .ranks = ranks,
         .kind = kKinds[random.integer(0, 4)],
         .n = random.pick<int64_t>({1, 5, 16, 33, 48}),
         .k = 32 * random.integer(1, 3),
         .rows = {},
         .tile_rows = tile,
         .bias = random.chance(0.5),
         .residual = false,
         .direct = random.chance(0.5),
         .strided = random.chance(0.3),
         .exchanged = false,
         .out = random.pick({DType::f32, DType::bf16, DType::f16})};
  const bool uneven = random.chance(0.5);
  for (int r = 0; r < ranks; ++r) c.rows.push_back(uneven && r % 2 == 1 ? random.integer(0, size) : size);
  if (c.sums()) c.residual = random.chance(0.5);
  c.exchanged = (op == Mc2Operator::all_to_all_matmul || op == Mc2Operator::all_gather_matmul) && random.chance(0.5);
  return c;
}

class Operators : public testing::TestWithParam<int> {};

// Both communicators of a world size serve all its cases, so that slots and counters pass from call to call.
TEST_P(Operators, EqualTheirUnfusedFormsBitForBit) {
  const int ranks = GetParam();
  constexpr int64_t kTile = 8;
  Random random(test::seed() + static_cast<uint64_t>(ranks));
  std::vector<std::vector<Communicator>> worlds;
  for (const bool direct : {false, true}) {
    worlds.push_back(
        std::move(Communicator::create_threads(ranks, {.staging_bytes = 1 << 20, .direct_stores = direct}).value()));
  }
  for (int op = 0; op < 5; ++op) {
    for (const int64_t size : {int64_t{0}, int64_t{1}, kTile - 1, kTile, kTile + 1, int64_t{257}}) {
      for (const int64_t tile : {kTile, int64_t{0}}) {
        if (!random.chance(test::kEffort)) continue;
        const Case c = random_case(static_cast<Mc2Operator>(op), ranks, size, tile, random);
        SCOPED_TRACE(c.text());
        AllRanks run(c, random);
        std::vector<Communicator>& world = worlds[c.direct];
        const std::vector<Status> statuses =
            test::on_threads(ranks, [&](int r) { return run.fused(r, world[static_cast<size_t>(r)]); });
        for (int r = 0; r < ranks; ++r) {
          const CommunicatorStats stats = world[static_cast<size_t>(r)].stats();
          ASSERT_TRUE(statuses[static_cast<size_t>(r)].ok()) << statuses[static_cast<size_t>(r)].message();
          run.expect_equal(r);
          EXPECT_LE(stats.peak_staging_bytes, 2 * ranks * stats.tile_bytes);
          if (c.direct && c.op == Mc2Operator::matmul_all_to_all && c.n >= ranks) {
            EXPECT_EQ(stats.peak_staging_bytes, 0);
          } else if (!c.direct && ranks > 1 && size > 0 && c.n >= ranks && c.rows[static_cast<size_t>(r)] > 0 &&
                     !c.sums()) {
            EXPECT_GT(stats.peak_staging_bytes, 0);
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, Operators, testing::Values(1, 2, 3, 4, 5, 7, 8));

// A rank without rows has optional tensors without memory, which the others' have: one signature all the same.
TEST(Mc2, RanksWithoutRowsGiveTheirOptions) {
  Random random(test::seed());
  for (int op = 0; op < 5; ++op) {
    for (const bool direct : {false, true}) {
      Case c = random_case(static_cast<Mc2Operator>(op), 3, 3, 2, random);
      c.kind = Kind::int8, c.rows = {3, 0, 1}, c.bias = true, c.residual = c.sums(), c.direct = direct;
      SCOPED_TRACE(c.text());
      AllRanks run(c, random);
      auto world = std::move(
          Communicator::create_threads(3, {.timeout_seconds = 20, .staging_bytes = 1 << 16, .direct_stores = direct})
              .value());
      const auto statuses = test::on_threads(3, [&](int r) { return run.fused(r, world[static_cast<size_t>(r)]); });
      for (int r = 0; r < 3; ++r) {
        ASSERT_TRUE(statuses[static_cast<size_t>(r)].ok()) << statuses[static_cast<size_t>(r)].message();
        run.expect_equal(r);
      }
    }
  }
}

// The same bits whatever the timing: ranks begin late, in another order each time.
TEST(Mc2, BitsDoNotDependOnTiming) {
  Random random(test::seed());
  auto world = std::move(Communicator::create_threads(3, {.staging_bytes = 1 << 16}).value());
  for (int op = 0; op < 5; ++op) {
    const Case c = random_case(static_cast<Mc2Operator>(op), 3, 21, 2, random);
    SCOPED_TRACE(c.text());
    AllRanks run(c, random);
    for (int late = 0; late < 3; ++late) {
      const auto statuses = test::on_threads(3, [&](int r) {
        if (r == late) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        return run.fused(r, world[static_cast<size_t>(r)]);
      });
      for (int r = 0; r < 3; ++r) {
        ASSERT_TRUE(statuses[static_cast<size_t>(r)].ok()) << statuses[static_cast<size_t>(r)].message();
        run.expect_equal(r);
      }
    }
  }
}

// One communicator, many calls back to back: slots are used again while other ranks are still in the call before.
TEST(Mc2, ThousandCallsBackToBack) {
  constexpr int kRanks = 3;
  Random random(test::seed());
  auto world = std::move(Communicator::create_threads(kRanks, {.staging_bytes = 1 << 16}).value());
  std::vector<std::unique_ptr<AllRanks>> runs;
  for (int op = 0; op < 5; ++op) {
    runs.push_back(std::make_unique<AllRanks>(random_case(static_cast<Mc2Operator>(op), kRanks, 3, 1, random), random));
  }
  const int calls = test::kSanitized ? 100 : 1000;
  const auto statuses = test::on_threads(kRanks, [&](int r) {
    for (int i = 0; i < calls; ++i) {
      Status status = runs[static_cast<size_t>(i % 5)]->fused(r, world[static_cast<size_t>(r)]);
      if (!status.ok()) return status;
    }
    return Status();
  });
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_TRUE(statuses[static_cast<size_t>(r)].ok()) << statuses[static_cast<size_t>(r)].message();
    EXPECT_EQ(world[static_cast<size_t>(r)].stats().calls, calls);
    for (const auto& run : runs) run->expect_equal(r);
  }
}

// A sound problem for any rank; each test spoils one thing.
struct Sound {
  Context& context = test::rank_context(0);
  Random random{1};
  std::vector<Communicator> world = std::move(Communicator::create_threads(1, {.staging_bytes = 4096}).value());
  Owned x = random_matrix(DType::f32, 4, 32, random), out = owned(DType::f32, 4, 6);
  Source source{Kind::f32, 6, 32, random};
  Weights weight = source.pack(context, 1);

  // The message of a call that must be refused, with nothing written.
  std::string refusal(Mc2Operator op, const Mc2Options& options = {}) {
    const Status status =
        kFunctions[static_cast<int>(op)](context, world[0], x.tensor, weight.view(), out.tensor, options);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(world[0].status().message(), status.message());
    for (const double value : test::to_doubles(out.tensor)) EXPECT_TRUE(std::isnan(value));
    return status.message();
  }
};

TEST(Mc2, RefusesWhatDisagrees) {
  using enum Mc2Operator;
  const int64_t one[] = {5}, two[] = {2, 2}, negative[] = {-1};
  EXPECT_EQ(Sound().refusal(matmul_all_to_all, {.rows = two}),
            "matmul_all_to_all: rows has 2 sizes, but there are 1 ranks");
  EXPECT_EQ(Sound().refusal(all_gather_matmul, {.rows = negative}),
            "all_gather_matmul: rows[0] is -1, but must be from 0 to 2^56");
  EXPECT_EQ(Sound().refusal(matmul_reduce_scatter, {.rows = one}),
            "matmul_reduce_scatter: x dim 0 (m) is 4, but the ranks' rows are in all 5");
  EXPECT_EQ(Sound().refusal(all_gather_matmul, {.rows = one}),
            "all_gather_matmul: x dim 0 (m) is 4, but rows has for this rank 5");
  EXPECT_EQ(Sound().refusal(matmul_all_reduce, {.rows = one}),
            "matmul_all_reduce: rows are given, but every rank has all rows");
  EXPECT_EQ(Sound().refusal(all_gather_matmul, {.inputs = one}),
            "all_gather_matmul: inputs are given, but x is not split by columns");
  EXPECT_EQ(Sound().refusal(all_to_all_matmul, {.inputs = one}),
            "all_to_all_matmul: x dim 1 (k) is 32, but inputs has for this rank 5");
  EXPECT_EQ(Sound().refusal(all_gather_matmul, {.tile_rows = -1}),
            "all_gather_matmul: tile_rows is -1, but must be from 0 to 2^56");
  Sound s;
  EXPECT_EQ(Sound().refusal(matmul_all_to_all, {.residual = s.x.tensor}),
            "matmul_all_to_all: residual is given, but nothing is summed over ranks");
  EXPECT_EQ(Sound().refusal(matmul_all_to_all, {.exchanged = s.x.tensor}),
            "matmul_all_to_all: exchanged is given, but x is not exchanged");
  EXPECT_EQ(Sound().refusal(all_to_all_matmul, {.x_scales = s.x.tensor}),
            "all_to_all_matmul: x_scales is given, but a row comes from several ranks");
  EXPECT_EQ(Sound().refusal(all_gather_matmul, {.x_scales = s.x.tensor.selected(1, 0)}),
            "all_gather_matmul: x_scales belong to an x of i8, but x is f32");
}

TEST(Mc2, RefusesTensorsThatDisagree) {
  using enum Mc2Operator;
  Sound k;
  k.x.tensor.shape[1] = 31;
  EXPECT_EQ(k.refusal(all_gather_matmul), "all_gather_matmul: product: x dim 1 (k) is 31, but the weight has k = 32");
  Sound n;
  n.out.tensor.shape[1] = 5;
  EXPECT_EQ(n.refusal(matmul_all_to_all), "matmul_all_to_all: out dim 1 (n) is 5, but this rank's weight has n = 6");
  Sound type;
  type.x.tensor.dtype = DType::i8;
  EXPECT_EQ(type.refusal(matmul_all_to_all),
            "matmul_all_to_all: weight 0: product: x is i8, but must be f32, bf16 or f16");
  Sound rows;
  rows.out.tensor.shape[0] = 3;
  EXPECT_EQ(rows.refusal(matmul_all_reduce), "matmul_all_reduce: out dim 0 (rows) is 3, but x has m = 4");
  Sound bias;
  const Mc2Options with_bias{.bias = bias.x.tensor.selected(0, 0)};
  EXPECT_EQ(bias.refusal(matmul_all_to_all, with_bias),
            "matmul_all_to_all: bias dim 0 (n) is 32, but the weights have in all 6");
  Sound count;
  count.weight = count.source.pack(count.context, 2);
  EXPECT_EQ(count.refusal(all_gather_matmul), "all_gather_matmul: the weight has 2 matrices, but must have 1");
  Sound large;
  large.world = std::move(Communicator::create_threads(1, {.staging_bytes = 0}).value());
  EXPECT_EQ(large.refusal(all_gather_matmul),
            "all_gather_matmul: a row of a tile has 128 bytes, but a slot of staging_bytes = 0 has 0");
}

TEST(PackColumns, RefusesWhatIsNoWholeMatrix) {
  Context& context = test::rank_context(0);
  std::vector<float> values(64);
  std::vector<int8_t> q(64);
  const auto floats = [&](std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::f32, shape, values.data());
  };
  const auto ints = [&](std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::i8, shape, q.data());
  };
  const auto message = [&](const auto& weight, int parts = 2) {
    const auto packed = pack_columns(context, weight, parts);
    EXPECT_EQ(packed.status().code(), StatusCode::invalid_argument);
    return packed.status().message();
  };
  EXPECT_EQ(message(floats({8, 4}), 0), "pack_columns: parts is 0, but must be from 1 to 256");
  EXPECT_EQ(message(floats({8, 4}), 257), "pack_columns: parts is 257, but must be from 1 to 256");
  EXPECT_EQ(message(floats({8})), "pack_columns: weight has rank 1, but [n, k] has rank 2");
  EXPECT_EQ(message(IntMatrix{ints({8, 4}), floats({1, 1})}),
            "pack_columns: scales dim 0 (rows) is 1, but q set rows = 8");
  EXPECT_EQ(message(IntMatrix{ints({8, 4}), floats({8, 1}), ints({8, 2})}),
            "pack_columns: zeros dim 1 (groups) is 2, but scales set groups = 1");
  ConstTensor far = floats({2, 4});
  far.strides[0] = int64_t{1} << 62;
  EXPECT_EQ(message(far).find("pack_columns: weight"), 0u);
  EXPECT_EQ(message(QuantMatrix{QuantFormat::q8_0, 2, 32, values.data(), 40}),
            "pack_columns: weight has 40 bytes, but q8_0 [2, 32] needs 68");
}

TEST(Mc2Plan, BoundsTilesBySlotAndRows) {
  const Mc2Plan by_rows = plan_mc2({.world_size = 2, .rows = 1000, .row_bytes = 100, .slot_bytes = 1 << 20});
  EXPECT_EQ(by_rows.tile_rows, 250);
  EXPECT_EQ(by_rows.tiles, 4);
  EXPECT_EQ(by_rows.tile_bytes, 25024);
  EXPECT_EQ(by_rows.staging_bytes, 4 * 25024);
  const Mc2Plan by_slot = plan_mc2({.world_size = 2, .rows = 1000, .row_bytes = 100, .slot_bytes = 1023});
  EXPECT_EQ(by_slot.tile_rows, 9);
  EXPECT_LE(by_slot.tile_bytes, 1023);
  EXPECT_EQ(plan_mc2({.world_size = 2, .rows = 10, .row_bytes = 100, .slot_bytes = 64}).tile_rows, 0);
  EXPECT_EQ(to_string(plan_mc2({.world_size = 3, .rows = 5, .row_bytes = 8, .slot_bytes = 4096, .tile_rows = 2}), 1),
            "matmul_all_to_all: 3 ranks, 3 tiles of 2 rows, 64 bytes; at most 384 bytes in flight to a rank\n"
            "rank 1 multiplies for ranks 2, 0, 1, for each all tiles in turn");
}

TEST(Mc2Plan, IsDefinedForAnyNumbers) {
  EXPECT_EQ(share_of(7, 3, 0), 3);
  EXPECT_EQ(share_of(7, 3, 2), 2);
  EXPECT_EQ(share_of(7, 0, 0), 0);
  Mc2Plan none;
  none.world_size = 0;
  EXPECT_FALSE(to_string(none).empty());
  Random random(test::seed());
  const auto any = [&] { return random.pick<int64_t>({INT64_MIN, -1, 0, 1, 63, 64, 1000, 1 << 30, INT64_MAX}); };
  for (int i = 0; i < 10000; ++i) {
    const Mc2Problem problem{.op = static_cast<Mc2Operator>(random.integer(0, 5)),
                             .world_size = static_cast<int>(random.integer(-1, 300)),
                             .rows = any(),
                             .row_bytes = any(),
                             .slot_bytes = any(),
                             .tile_rows = any()};
    const Mc2Plan plan = plan_mc2(problem);
    ASSERT_GE(plan.tile_rows, 0);
    ASSERT_GE(plan.tile_bytes, 0);
    ASSERT_GE(plan.tiles, 0);
    if (plan.tile_rows > 0 && problem.row_bytes > 0) {
      ASSERT_LE(plan.tile_bytes, problem.slot_bytes);
    }
  }
}

}  // namespace
}  // namespace opst
