// The source of docs/extending.md: the loop, the softmax, masks and rules are attention's own; compared with the
// equation in double, at every level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "core/int_math.h"
#include "extending/scaled_rows_kernels.h"
#include "machine/levels.h"
#include "testing/contexts.h"
#include "testing/numbers.h"
#include "testing/random.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, extending, ScaledRowsKernels, kScaledRowsKernels, scaled_rows_kernels)

namespace {

using namespace attention;
using namespace test;
using extending::ScaledRowsKernels;

// More rows than a register tile; tiles that all rows see, that some rows see in part, and one of a few keys.
constexpr int64_t kRows = 29, kKeys = 93, kTiles[] = {48, 40, 5}, kHeadDim = 48, kValueHeadDim = 32;
constexpr double kScale = 0.2;  // of scores

// Rows of int8 behind their scale, and what they stand for.
struct Rows {
  int64_t length;
  Numbers<Numbers<float>> storage;  // the scale, then the bytes
  Numbers<const void*> pointers;

  Rows(Random& random, int64_t row_length) : length(row_length) {
    for (int64_t j = 0; j < kKeys; ++j) {
      storage.emplace_back(1 + length / 4);
      storage.back()[0] = static_cast<float>(std::exp(random.normal()) / 64);
      for (int64_t d = 0; d < length; ++d) bytes(j)[d] = static_cast<int8_t>(random.integer(-128, 127));
      pointers.push_back(storage.back().data());
    }
  }
  int8_t* bytes(int64_t j) { return reinterpret_cast<int8_t*>(&storage[j][1]); }
  double value(int64_t j, int64_t d) const {
    return static_cast<double>(storage[j][0]) * reinterpret_cast<const int8_t*>(&storage[j][1])[d];
  }
};

class ScaledRowsSource : public ::testing::Test {
 protected:
  ScaledRowsSource() : random_(seed()), keys_(random_, kHeadDim), values_(random_, kValueHeadDim) {
    for (float& x : query_) x = static_cast<float>(random_.normal());
    for (float& x : bias_) x = static_cast<float>(random_.normal());
    for (int64_t r = 0; r < kRows; ++r) {  // a window that moves over the keys; row 3 sees none
      begin_.push_back(r);
      end_.push_back(r == 3 ? r : std::min(kKeys, r + 50));
    }
  }

  // Row r by the equation: out [kValueHeadDim], and in `terms` the sum of the absolute terms.
  Numbers<double> expected(int64_t r, const ScoreRules* rules, Numbers<double>& terms) const {
    Numbers<double> score, out(kValueHeadDim), sizes(kValueHeadDim);
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t j = begin_[r]; j < end_[r]; ++j) {
      double s = 0;
      for (int64_t d = 0; d < kHeadDim; ++d) s += static_cast<double>(query_[r * kHeadDim + d]) * keys_.value(j, d);
      s *= kScale;
      if (rules != nullptr) {
        s = rules->softcap * std::tanh(s / rules->softcap) + static_cast<double>(bias_[r * kKeys + j]);
      }
      score.push_back(s);
      max = std::max(max, s);
    }
    for (double& s : score) sum += s = std::exp(s - max);
    for (int64_t j = 0; j < std::ssize(score); ++j) {
      for (int64_t d = 0; d < kValueHeadDim; ++d) {
        const double term = score[j] / sum * values_.value(begin_[r] + j, d);
        out[d] += term;
        sizes[d] += std::abs(term);
      }
    }
    terms = sizes;
    return out;
  }

  Numbers<float> attend(const ScaledRowsKernels& kernels, const ScoreRules* rules) {
    const int64_t lanes = kernels.lanes, acc_stride = round_up(kValueHeadDim, lanes), scores_stride = 64;
    Numbers<float> acc(static_cast<size_t>(kRows * acc_stride)), max(kRows), sums(static_cast<size_t>(kRows * lanes)),
        out(kRows * kValueHeadDim);
    const Buffer scores = std::move(Buffer::allocate(16 * scores_stride * 4).value());
    const double exponent_scale = (rules == nullptr ? kScale : 1) * std::log2(std::exp(1.0));
    const QueryBlock block = {.rows = kRows,
                              .head_dim = kHeadDim,
                              .value_head_dim = kValueHeadDim,
                              .query = query_.data(),
                              .query_stride = kHeadDim,
                              .state = {acc.data(), max.data(), sums.data()},
                              .acc_stride = acc_stride,
                              .exponent_scale = exponent_scale,
                              .scores = const_cast<void*>(scores.data()),
                              .scores_stride = scores_stride,
                              .visible_begin = begin_.data(),
                              .visible_end = end_.data(),
                              .rules = rules};
    Numbers<KvTile> tiles;
    int64_t first = 0;
    for (int64_t count : kTiles) {
      KvTile tile = {.first_key = first, .count = count, .partial = true};
      tile.key_rows = &keys_.pointers[first];
      tile.value_rows = &values_.pointers[first];
      tiles.push_back(tile);
      first += count;
    }
    FinishRows finish = {};
    finish.parts = &block.state;
    finish.num_parts = 1;
    finish.rows = kRows;
    finish.value_head_dim = kValueHeadDim;
    finish.acc_stride = acc_stride;
    finish.exponent_scale = exponent_scale;
    finish.score_scale = rules == nullptr ? kScale : 1;
    finish.keep_prob = 1;
    finish.out = {out.data(), DType::f32, kValueHeadDim, 0, 1, 1};
    kernels.empty_state(block);
    kernels.attend(block, tiles.data(), static_cast<int64_t>(tiles.size()));
    kernels.finish_rows(finish);
    return out;
  }

  void expect_equation(const ScoreRules* rules) {
    for (const TestContext& t : contexts_with_threads(1)) {
      SCOPED_TRACE(t.name);
      const Numbers<float> got = attend(extending::scaled_rows_kernels(t.context.machine().isa), rules);
      for (int64_t r = 0; r < kRows; ++r) {
        Numbers<double> terms;
        const Numbers<double> want = expected(r, rules, terms);
        for (int64_t d = 0; d < kValueHeadDim; ++d) {
          // Scores are up to 40, each rounded to 2^-24 of its terms; a weight is off by as much.
          ASSERT_LE(std::abs(static_cast<double>(got[r * kValueHeadDim + d]) - want[d]), 1e-4 * terms[d] + 1e-30)
              << "row " << r << ", column " << d;
        }
      }
    }
  }

  Random random_;
  Rows keys_, values_;
  Numbers<float> query_ = Numbers<float>(kRows * kHeadDim), bias_ = Numbers<float>(kRows * kKeys);
  Numbers<int64_t> begin_, end_;
};

TEST_F(ScaledRowsSource, IsAttended) { expect_equation(nullptr); }

TEST_F(ScaledRowsSource, RulesApplyToIt) {
  Numbers<RowRules> rows(kRows);
  for (int64_t r = 0; r < kRows; ++r) rows[r].bias = &bias_[r * kKeys];
  ScoreRules rules;
  rules.rows = rows.data();
  rules.natural = rules.has_bias = true;
  rules.score_scale = kScale;
  rules.softcap = 3;
  rules.bias_stride = 1;
  expect_equation(&rules);
}

// A value that is not finite reaches the rows that see it, and no other.
TEST_F(ScaledRowsSource, HiddenValuesDoNotReachARow) {
  values_.storage[60][0] = std::numeric_limits<float>::infinity();
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    const Numbers<float> out = attend(extending::scaled_rows_kernels(t.context.machine().isa), nullptr);
    for (int64_t r = 0; r < kRows; ++r) {
      const bool sees = begin_[r] <= 60 && 60 < end_[r];
      for (int64_t d = 0; d < kValueHeadDim; ++d) ASSERT_EQ(std::isfinite(out[r * kValueHeadDim + d]), !sees) << r;
    }
  }
}

}  // namespace
}  // namespace opst
