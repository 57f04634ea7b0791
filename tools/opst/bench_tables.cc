// opst bench tables: the tables that articles on flash attention print, in the sizes that this machine allows.
#include <algorithm>
#include <chrono>
#include <memory>

#include "bench.h"
#include "system_memory.h"
#include "table_report.h"

namespace opst::tools {

namespace {

struct Options {
  TablesOptions tables;
  std::vector<std::string> names;
  std::string dtype = "bf16";
  int64_t memory_limit = 0;  // bytes; 0: a part of what is available
  int num_threads = 0;
  bool plan = false, json = false;
};

// Others need memory too; and a process that the system ends for want of it prints nothing.
constexpr double kPartOfAvailable = 0.75;

TablesOptions options_of(const Options& o) {
  TablesOptions tables = o.tables;
  tables.dtype = o.dtype == "f32" ? DType::f32 : o.dtype == "f16" ? DType::f16 : DType::bf16;
  if (o.names.empty()) return tables;
  tables.tables.clear();
  for (const TableKind kind : kTableKinds) {
    if (std::find(o.names.begin(), o.names.end(), to_string(kind)) != o.names.end()) tables.tables.push_back(kind);
  }
  return tables;
}

double memory_limit(const Options& o) {
  return o.memory_limit > 0 ? static_cast<double>(o.memory_limit)
                            : kPartOfAvailable * static_cast<double>(available_memory_bytes());
}

void run(const Options& o) {
  const auto start = std::chrono::steady_clock::now();
  const TablesOptions options = options_of(o);
  if (draw_tables(options, {}).rows.empty()) {
    std::string names;
    for (const TableKind kind : options.tables) names += std::string(names.empty() ? "" : ", ") + to_string(kind);
    usage_error("--max-seq " + std::to_string(options.max_seq) + " leaves no row of " + names);
  }
  Context context = make_context(o.num_threads);
  TableLimits limits = measure_limits(context, options, memory_limit(o));
  Tables tables = draw_tables(options, limits);
  const TableReport report{context, options, limits, tables, !o.plan};
  if (!o.json) write_output(head_text(report));
  std::vector<TableResult> results;
  const TableRow* before = nullptr;
  for (const TableRow& row : tables.rows) {
    if (!o.plan && row.run == results.size()) {  // rows are in the order of their runs
      TableRun& next = tables.runs[row.run];
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      limits.memory_bytes = std::min(limits.memory_bytes, memory_limit(o));
      settle(next, limits, options.budget_seconds - spent.count() - kept_seconds(tables, row.run, limits));
      results.push_back(measure_run(context, next));
      learn(next, results.back(), limits);
    }
    if (o.json) continue;
    if (before == nullptr || before->table != row.table) write_output(table_head(row.table, !o.plan));
    write_output(row_text(report, row, o.plan ? nullptr : &results[row.run]));
    before = &row;
  }
  if (o.json)
    write_json(report_json(report, results));
  else
    write_output(foot_text(report));
}

}  // namespace

void add_bench_tables(CLI::App& bench) {
  auto o = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand(
      "tables", "The tables of articles on flash attention: standard beside flash, 2K to 256K tokens");
  add_list(*command, "--tables", o->names, "Of inference, training, video, long, separated by commas (default: all)",
           one_of({"inference", "training", "video", "long"}))
      ->type_name("NAME");
  TablesOptions& t = o->tables;
  command->add_option("--budget", t.budget_seconds, "Seconds that all rows together may take, about")
      ->check(number_between(0, 1e6))
      ->capture_default_str();
  command->add_option("--max-seq", t.max_seq, "Tokens of the longest row")
      ->check(between(1, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--heads", t.most_heads, "Heads that a row is run with, at most")
      ->check(between(1, kPublishedHeads))
      ->capture_default_str();
  command->add_option("--head-dim", t.head_dim, "Size of queries, keys and values")
      ->check(between(1, 768))
      ->capture_default_str();
  command->add_option("--dtype", o->dtype, "Type of the tensors and the scores: f32, bf16, f16")
      ->check(one_of({"f32", "bf16", "f16"}))
      ->capture_default_str();
  command
      ->add_option("--memory-limit", o->memory_limit,
                   "Bytes that a form may take (default: three quarters of the available memory)")
      ->check(at_least(1));
  command->add_flag("--plan", o->plan, "Print the rows without running them");
  add_threads_option(*command, o->num_threads);
  command->add_flag("--json", o->json, "Print one JSON object");
  command->callback([o] { run(*o); });
}

}  // namespace opst::tools
