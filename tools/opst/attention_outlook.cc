#include "attention_outlook.h"

#include <algorithm>
#include <cmath>

#include "time_model.h"

namespace opst::tools {

namespace {

double as_double(int64_t a) { return static_cast<double>(a); }

struct Sizes {
  double q, k, v, out, statistics;  // bytes of all heads
  explicit Sizes(const AttentionProblem& p) {
    const double queries = as_double(p.batch) * as_double(p.num_heads) * as_double(p.query_len);
    const double keys = as_double(p.batch) * as_double(p.num_kv_heads) * as_double(p.kv_len);
    const double in = as_double(size_bytes(p.query_dtype)), kv = as_double(size_bytes(p.kv_dtype));
    q = queries * as_double(p.head_dim) * in, out = queries * as_double(p.value_head_dim) * in;
    k = keys * as_double(p.head_dim) * kv, v = keys * as_double(p.value_head_dim) * kv;
    statistics = queries * 4;
  }
  double all() const { return q + k + v + out; }
};

// The gradients take five products where the forward pass takes two, and read what it read, the gradient and out once more.
constexpr double kBackwardFlops = 2.5, kBackwardTraffic = 2.5, kBackwardVector = 1;

size_t index_of(const MachineProfile& m, const MemoryLevel& level) {
  return static_cast<size_t>(&level - m.levels.data());
}

// The level, from the tile's outward, that holds so many bytes at once; the main memory where none does.
size_t home(const MachineProfile& m, double bytes) {
  for (size_t i = index_of(m, m.tile_level()); i + 1 < m.levels.size(); ++i) {
    if (bytes <= m.total_bytes(m.levels[i])) return i;
  }
  return m.levels.size() - 1;
}

struct Work {
  double flops, scores;  // multiply-adds twice, softmax elements
  double rate;           // of the matrix unit
};

void settle(const MachineProfile& m, const Work& work, AttentionForm& form) {
  form.matrix_seconds = work.flops / work.rate;
  form.vector_seconds = work.scores / m.exponentials.value;
  form.bound = form.matrix_seconds >= form.vector_seconds ? "matrix" : "vector";
  form.seconds = std::max(form.matrix_seconds, form.vector_seconds);
  for (size_t i = 0; i < m.levels.size(); ++i) {
    const double seconds = form.bytes[i] / m.levels[i].read.value;
    form.level_seconds.push_back(seconds);
    if (seconds > form.seconds) form.seconds = seconds, form.bound = m.levels[i].name;
  }
}

// Bytes of every level. Q and O pass once. K and V pass once for each block of query rows, out of the nearest level that
// holds those of the heads in work; beyond it once.
std::vector<double> flash_bytes(const AttentionProblem& p, double visible, const TileSize& tile,
                                const MachineProfile& m) {
  const Sizes s(p);
  const double group = as_double(p.num_heads / p.num_kv_heads);
  const bool cpu = m.kind == MachineProfile::Kind::cpu;  // stacks the query heads of a KV head as rows
  const double rows = as_double(p.query_len) * (cpu ? group : 1);
  const double blocks = std::max(std::ceil(rows / as_double(tile.block_q)), 1.0) * (cpu ? 1 : group);
  const double again = std::max((s.k + s.v) * blocks * visible, s.k + s.v);
  const double heads = as_double(p.batch) * as_double(p.num_kv_heads);
  const double in_work = (s.k + s.v) / heads * std::min(heads, cpu ? 1.0 : m.cores.value);
  const size_t tile_at = index_of(m, m.tile_level()), keys_at = home(m, in_work);
  std::vector<double> bytes(m.levels.size(), 0.0);
  for (size_t i = tile_at; i < m.levels.size(); ++i) bytes[i] = s.q + s.out + (i <= keys_at ? again : s.k + s.v);
  // Where the tile lies, f32 scores and the weights in the tensors' type are written and read once each.
  bytes[tile_at] += as_double(p.batch) * as_double(p.num_heads) * as_double(p.query_len) * as_double(p.kv_len) *
                    visible * 2 * (4 + as_double(size_bytes(p.query_dtype)));
  return bytes;
}

// Scores and weights are written and read once each, where one head's matrix for every core fits.
std::vector<double> standard_bytes(const AttentionProblem& p, const MachineProfile& m) {
  const Sizes s(p);
  const double heads = as_double(p.batch) * as_double(p.num_heads);
  const size_t at = home(m, score_bytes(p) / heads * std::min(heads, m.cores.value));
  std::vector<double> bytes(m.levels.size(), 0.0);
  for (size_t i = index_of(m, m.tile_level()); i < m.levels.size(); ++i) {
    bytes[i] = s.all() + (i <= at ? 4 * score_bytes(p) : 0);
  }
  return bytes;
}

AttentionProblem of_length(AttentionProblem p, int64_t length) {
  p.query_len = p.kv_len = length;
  return p;
}

}  // namespace

double score_bytes(const AttentionProblem& p) {
  return as_double(p.batch) * as_double(p.num_heads) * as_double(p.query_len) * as_double(p.kv_len) *
         as_double(size_bytes(p.query_dtype));
}

double flash_memory_bytes(const AttentionProblem& p, bool train) {
  const Sizes s(p);
  // Training also holds the gradients of all four, and delta beside the statistics.
  return train ? 2 * s.all() + 2 * s.statistics : s.all() + s.statistics;
}

double standard_memory_bytes(const AttentionProblem& p, bool train) {
  const Sizes s(p);
  return train ? 2 * s.all() + kTrainingMatrices * score_bytes(p) : s.all() + score_bytes(p);
}

int64_t longest_that_fits(AttentionProblem p, double capacity, double (*bytes)(const AttentionProblem&, bool),
                          bool train) {
  int64_t longest = 0;
  for (int64_t step = int64_t{1} << 40; step > 0; step /= 2) {
    if (bytes(of_length(p, longest + step), train) <= capacity) longest += step;
  }
  return longest;
}

AttentionOutlook attention_outlook(const AttentionProblem& p, double pairs, const MachineProfile& m,
                                   const OutlookOptions& options) {
  AttentionOutlook look;
  const double sram = m.tile_level().bytes.value * (m.tile_level().per_core ? 1 : 1 / m.cores.value);
  look.by_rule = choose_tile(p.head_dim, sram, options.sram_heads > 0 ? options.sram_heads : p.num_heads);
  look.one_head = choose_tile(p.head_dim, sram, 1);
  const bool cpu = m.kind == MachineProfile::Kind::cpu;
  if (p.options.block_q > 0 && p.options.block_kv > 0) {
    look.tile = {p.options.block_q, p.options.block_kv};
    look.tile_reason = "as given";
  } else if (cpu) {
    const AttentionPlan plan = plan_attention(p, m.machine());
    look.tile = {plan.block_q, plan.block_kv};
    look.tile_reason = plan.reason;
  } else {
    look.tile = look.by_rule.tile;
    look.tile_reason = "the tile rule";
  }
  const double dims = as_double(p.head_dim + p.value_head_dim), heads = as_double(p.num_heads);
  const double all_pairs = as_double(p.batch) * as_double(p.query_len) * as_double(p.kv_len);
  look.flops = 2 * dims * heads * pairs;
  // A matrix unit multiplies whole squares: sizes are rounded up to them.
  const auto padded = [&](int64_t size) {
    return std::ceil(as_double(size) / m.matrix_tile.value) * m.matrix_tile.value / as_double(size);
  };
  const double padding = cpu ? 1 : padded(p.query_len) * padded(p.kv_len) * padded(p.head_dim);
  const double passes = options.train ? 1 + kBackwardFlops : 1, vector = options.train ? 1 + kBackwardVector : 1;
  const double rate = m.matrix_rate(p.query_dtype);
  look.flash.bytes = flash_bytes(p, pairs / all_pairs, look.tile, m);
  look.standard.bytes = standard_bytes(p, m);
  for (AttentionForm* form : {&look.flash, &look.standard}) {
    if (options.train) {
      for (double& bytes : form->bytes) bytes *= 1 + kBackwardTraffic;
    }
  }
  settle(m, {look.flops * padding * passes, heads * pairs * vector, rate}, look.flash);
  // The standard form multiplies the whole matrix, masked or not; its gradients need no scores again: four products.
  settle(m, {2 * dims * heads * all_pairs * padding * (options.train ? 3 : 1), heads * all_pairs * vector, rate},
         look.standard);
  // On a CPU the units of a core take turns, and what they take was fitted. On an accelerator they work at once.
  const std::optional<TimePrediction> fitted = cpu ? predict_attention(p, pairs, m) : std::nullopt;
  if (fitted) look.flash.seconds = fitted->seconds() * (options.train ? 1 + kBackwardFlops : 1);
  look.flash.seconds += fitted ? 0 : m.start.value;
  // Three kernels after one another: products, softmax and memory do not overlap.
  look.standard.seconds = look.standard.matrix_seconds + look.standard.vector_seconds +
                          *std::max_element(look.standard.level_seconds.begin(), look.standard.level_seconds.end()) +
                          3 * m.start.value;
  const double capacity = m.total_bytes(m.main_memory());
  look.flash.memory_bytes = flash_memory_bytes(p, options.train);
  look.standard.memory_bytes = standard_memory_bytes(p, options.train);
  look.flash.longest = longest_that_fits(p, capacity, flash_memory_bytes, options.train);
  look.standard.longest = longest_that_fits(p, capacity, standard_memory_bytes, options.train);
  return look;
}

}  // namespace opst::tools
