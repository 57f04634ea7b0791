#include "tables.h"

#include <algorithm>
#include <cmath>

#include "attention_outlook.h"

namespace opst::tools {

namespace {

constexpr int64_t kShortest = 2048, kLongest = 131072, kLongContext = 262144;
constexpr int64_t kFrames[] = {16, 64, 128}, kPatches = 1024;

double as_double(int64_t a) { return static_cast<double>(a); }

// 2K to 128K; shorter ones where the longest allowed is shorter.
std::vector<int64_t> lengths_up_to(int64_t most) {
  std::vector<int64_t> lengths;
  const int64_t last = std::min(most, kLongest);
  for (int64_t n = last >= kShortest ? kShortest : std::max<int64_t>(last / 4, 1); n <= last; n *= 2) {
    lengths.push_back(n);
  }
  return lengths;
}

std::string length_text(int64_t n) { return n % 1024 == 0 ? std::to_string(n / 1024) + "K" : std::to_string(n); }

// No less than writing as many bytes as it has: what bounds a decoded token is reading them.
void set_seconds(TableRun& run, const TableLimits& limits) {
  const auto set = [&](const FormRates& rates, FormPlan& form) {
    form.call_seconds =
        std::max(run.pairs() * (run.train ? rates.training : rates.forward), run.flash.bytes * limits.touch_seconds);
  };
  set(limits.standard, run.standard);
  set(limits.flash, run.flash);
}

void set_heads(TableRun& run, int64_t heads, const TableLimits& limits) {
  run.problem.num_heads = run.problem.num_kv_heads = heads;
  set_bytes(run);
  set_seconds(run, limits);
}

double cost_of(const TableRun& run, const TableLimits& limits) {
  return (run.flash.state == FormState::run ? run.flash_cost(limits) : 0) +
         (run.standard.state == FormState::run ? run.standard_cost(limits) : 0);
}

class Drawing {
 public:
  Drawing(const TablesOptions& options, const TableLimits& limits) : options_(options), limits_(limits) {}

  void add(TableKind table, const std::string& name, int64_t batch, int64_t queries, int64_t keys, bool train) {
    if (keys > options_.max_seq) {
      ++tables.left_out;
      return;
    }
    TableRun run;
    AttentionProblem& p = run.problem;
    p.query_dtype = p.kv_dtype = options_.dtype;
    p.query_len = queries, p.kv_len = keys;
    p.head_dim = p.value_head_dim = options_.head_dim;
    p.batch = batch, p.num_heads = p.num_kv_heads = kPublishedHeads;
    run.train = train;
    TableRow row{.table = table, .name = name, .published_batch = batch};
    row.published_score_bytes = (train ? kTrainingMatrices : 1) * score_bytes(p);
    row.published_standard_bytes = standard_memory_bytes(p, train);
    row.published_flash_bytes = flash_memory_bytes(p, train);
    p.batch = 1;
    set_heads(run, 1, limits_);
    const auto same = std::find_if(tables.runs.begin(), tables.runs.end(), [&](const TableRun& r) {
      return r.train == train && r.problem.query_len == queries && r.problem.kv_len == keys;
    });
    row.run = static_cast<size_t>(same - tables.runs.begin());
    if (same == tables.runs.end()) tables.runs.push_back(run);
    tables.rows.push_back(row);
  }

  // Forms with one head: those that fit the memory, cheapest first as long as the budget lasts.
  void admit() {
    struct Candidate {
      double order, cost;
      FormPlan* form;
      const FormPlan* before;  // must be run too
    };
    std::vector<Candidate> candidates;
    for (TableRun& run : tables.runs) {
      const double flash = run.flash_cost(limits_), standard = run.standard_cost(limits_);
      candidates.push_back({flash, flash, &run.flash, nullptr});
      candidates.push_back({flash + standard, standard, &run.standard, &run.flash});
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.order < b.order; });
    for (const Candidate& c : candidates) {
      const bool alone = c.before != nullptr && c.before->state != FormState::run;
      if (c.form->bytes > limits_.memory_bytes) {
        c.form->state = FormState::memory;
      } else if (alone || spent_ + c.cost > options_.budget_seconds) {
        c.form->state = FormState::time;
      } else {
        spent_ += c.cost;
      }
    }
  }

  // Calls of some seconds more than once, as long as the budget lasts.
  void repeat() {
    for (TableRun& run : tables.runs) {
      TableRun more = run;
      more.sparing = false;
      const double added = cost(more) - cost(run);
      if (run.flash.state != FormState::run || spent_ + added > options_.budget_seconds) continue;
      run = more;
      spent_ += added;
    }
  }

  // Twice the heads as long as the run keeps within half its share, and in the memory.
  void grow() {
    const double share = options_.budget_seconds / as_double(static_cast<int64_t>(tables.runs.size())) / 2;
    for (TableRun& run : tables.runs) {
      if (run.flash.state != FormState::run) continue;
      for (int64_t heads = 2; heads <= options_.most_heads; heads *= 2) {
        TableRun more = run;
        set_heads(more, heads, limits_);
        const bool both = run.standard.state == FormState::run;
        const double added = cost(more) - cost(run);
        if (cost(more) > share || spent_ + added > options_.budget_seconds) break;
        if (std::max(more.flash.bytes, both ? more.standard.bytes : 0) > limits_.memory_bytes) break;
        run = more;
        spent_ += added;
      }
    }
    for (TableRow& row : tables.rows) {
      row.times = as_double(row.published_batch * kPublishedHeads) / as_double(tables.runs[row.run].problem.num_heads);
    }
  }

  Tables tables;

 private:
  double cost(const TableRun& run) const { return cost_of(run, limits_); }

  const TablesOptions& options_;
  const TableLimits& limits_;
  double spent_ = 0;
};

}  // namespace

const char* to_string(TableKind kind) {
  switch (kind) {
    case TableKind::inference:
      return "inference";
    case TableKind::training:
      return "training";
    case TableKind::video:
      return "video";
    case TableKind::long_context:
      return "long";
  }
  return "?";
}

double TableRun::pairs() const {
  return as_double(problem.batch) * as_double(problem.num_heads) * as_double(problem.query_len) *
         as_double(problem.kv_len);
}

static double longest_call(const TableRun& run) { return std::max(run.flash.call_seconds, run.standard.call_seconds); }

int TableRun::repeats() const {
  const double seconds = longest_call(*this);
  if (seconds > 1) return seconds > 10 || sparing ? 1 : 3;
  return seconds > 0.3 ? 3 : seconds > 0.03 ? 7 : 11;
}

int TableRun::calls_before() const { return longest_call(*this) > 0.3 ? 0 : 2; }

static double calls_of(const TableRun& run) { return run.repeats() + run.calls_before(); }

double TableRun::flash_cost(const TableLimits& limits) const {
  const double elements = flash.bytes / as_double(size_bytes(problem.query_dtype));
  return elements * limits.element_seconds + calls_of(*this) * flash.call_seconds;
}

double TableRun::standard_cost(const TableLimits& limits) const {
  return standard.bytes * limits.touch_seconds + calls_of(*this) * standard.call_seconds;
}

void set_bytes(TableRun& run) {
  run.standard.bytes = standard_memory_bytes(run.problem, run.train);
  run.flash.bytes = flash_memory_bytes(run.problem, run.train);
}

Tables draw_tables(const TablesOptions& options, const TableLimits& limits) {
  Drawing drawing(options, limits);
  for (const TableKind kind : options.tables) {
    const bool video = kind == TableKind::video;
    if (kind == TableKind::inference || kind == TableKind::training) {
      for (const int64_t n : lengths_up_to(options.max_seq)) {
        drawing.add(kind, length_text(n), kPublishedBatch, n, n, kind == TableKind::training);
      }
    }
    for (const bool train : {false, true}) {
      for (const int64_t frames : kFrames) {
        const int64_t n = frames * kPatches;
        const std::string name = std::to_string(frames) + " frames" + (train ? ", training" : "");
        if (video) drawing.add(kind, name, 1, n, n, train);
      }
    }
    if (kind == TableKind::long_context) {
      drawing.add(kind, length_text(kLongContext), 1, kLongContext, kLongContext, false);
      drawing.add(kind, length_text(kLongContext) + ", one token", 1, 1, kLongContext, false);
    }
  }
  drawing.admit();
  drawing.repeat();
  drawing.grow();
  return std::move(drawing.tables);
}

double kept_seconds(const Tables& tables, size_t index, const TableLimits& limits) {
  const double own = cost_of(tables.runs[index], limits);
  double kept = 0;
  for (size_t i = index + 1; i < tables.runs.size(); ++i) {
    const double cost = cost_of(tables.runs[i], limits);
    kept += cost < own ? cost : 0;
  }
  return kept;
}

void settle(TableRun& run, const TableLimits& limits, double seconds_left) {
  set_seconds(run, limits);
  for (FormPlan* form : {&run.flash, &run.standard}) {
    if (form->bytes > limits.memory_bytes) form->state = FormState::memory;
  }
  if (run.flash.state == FormState::run && run.flash_cost(limits) > seconds_left) run.flash.state = FormState::time;
  const double both = run.flash_cost(limits) + run.standard_cost(limits);
  if (run.standard.state == FormState::run && (run.flash.state != FormState::run || both > seconds_left)) {
    run.standard.state = FormState::time;
  }
}

}  // namespace opst::tools
