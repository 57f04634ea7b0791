#include "table_report.h"

#include <cstdio>

#include "system_memory.h"

namespace opst::tools {

namespace {

using Json = nlohmann::ordered_json;

std::string rounded(const char* format, double number) {
  char text[64];
  std::snprintf(text, sizeof text, format, number);
  return text;
}

const char* mode_of(const TableRun& run) {
  return run.train ? "training" : run.problem.query_len == run.problem.kv_len ? "inference" : "decode";
}

// "1.20 ms", "does not fit", "no time ~96 s"; planned: "~1.20 ms"
std::string time_text(const FormPlan& plan, const FormResult* result) {
  const FormState state = result != nullptr ? result->state : plan.state;
  if (state == FormState::memory) return "does not fit";
  if (state == FormState::time) return "no time ~" + rounded("%.3g s", plan.call_seconds);
  return result != nullptr ? human_seconds(result->seconds) : "~" + human_seconds(plan.call_seconds);
}

std::string memory_text(const FormPlan& plan, const FormResult* result) {
  return result != nullptr && result->bytes >= 0 ? binary_bytes(result->bytes) : "~" + binary_bytes(plan.bytes);
}

double memory_of(const FormPlan& plan, const FormResult* result) {
  return result != nullptr && result->bytes >= 0 ? result->bytes : plan.bytes;
}

std::string speedup_text(const TableResult* result) {
  if (result == nullptr || result->speedup < 0) return "-";
  std::string text = rounded("%.2f", result->speedup);
  if (result->repeats > 1) text += rounded(" (%.2f", result->speedup_q1) + rounded(" - %.2f)", result->speedup_q3);
  return text;
}

Json form_json(const FormPlan& plan, const FormResult* result) {
  const FormState state = result != nullptr ? result->state : plan.state;
  const bool measured = result != nullptr && result->seconds >= 0;
  const char* const words[] = {measured ? "measured" : "planned", "memory", "time"};
  return {{"state", words[static_cast<size_t>(state)]},
          {"ms", measured ? Json(result->seconds * 1e3) : Json()},
          {"ms_quartiles", measured ? Json({result->q1 * 1e3, result->q3 * 1e3}) : Json()},
          {"bytes", measured ? Json(result->bytes) : Json()},
          {"computed_bytes", plan.bytes},
          {"predicted_ms", plan.call_seconds * 1e3}};
}

Json row_json(const Tables& tables, const TableRow& row, const TableResult* result) {
  const TableRun& run = tables.runs[row.run];
  const AttentionProblem& p = run.problem;
  const bool both = result != nullptr && result->speedup >= 0, judged = result != nullptr && result->flash.seconds >= 0;
  return {{"table", to_string(row.table)},
          {"name", row.name},
          {"mode", mode_of(run)},
          {"kv_len", p.kv_len},
          {"query_len", p.query_len},
          {"published",
           {{"batch", row.published_batch},
            {"heads", kPublishedHeads},
            {"head_dim", p.head_dim},
            {"computed_score_bytes", row.published_score_bytes},
            {"computed_standard_bytes", row.published_standard_bytes},
            {"computed_flash_bytes", row.published_flash_bytes}}},
          {"batch", p.batch},
          {"heads", p.num_heads},
          {"times", row.times},
          {"run", row.run},
          {"standard", form_json(run.standard, result != nullptr ? &result->standard : nullptr)},
          {"flash", form_json(run.flash, result != nullptr ? &result->flash : nullptr)},
          {"repeats", result != nullptr ? result->repeats : 0},
          {"speedup", both ? Json(result->speedup) : Json()},
          {"speedup_quartiles", both ? Json({result->speedup_q1, result->speedup_q3}) : Json()},
          {"memory_ratio", both ? Json(result->standard.bytes / result->flash.bytes) : Json()},
          {"difference", both ? Json(result->difference) : Json()},
          {"max_abs_error", judged ? Json(result->verdict.error) : Json()},
          {"error_bound", judged ? Json(result->verdict.bound) : Json()},
          {"error_ok", judged ? Json(result->verdict.ok) : Json()}};
}

}  // namespace

std::string head_text(const TableReport& r) {
  char text[1024];
  std::snprintf(text, sizeof text,
                "standard attention beside flash attention, %s, head_dim %lld, full, %d thread(s), %s%s\n"
                "published: batch %lld (video, long: 1), %lld heads. Here: fewer, so that the rows fit %g s; time and "
                "memory of both forms are\nproportional to batch x heads, of which the published shape has \"times\" "
                "as many\n",
                to_string(r.options.dtype), static_cast<long long>(r.options.head_dim), r.context.num_threads(),
                to_string(r.context.machine().isa), r.measured ? "" : "; planned, nothing of it measured",
                static_cast<long long>(kPublishedBatch), static_cast<long long>(kPublishedHeads),
                r.options.budget_seconds);
  return text;
}

std::string table_head(TableKind kind, bool measured) {
  const char* const title = kind == TableKind::inference  ? "inference: forward"
                            : kind == TableKind::training ? "training: forward and backward"
                            : kind == TableKind::video    ? "video: 1024 patches a frame"
                                                          : "long: 256K tokens end to end, and one decoded token";
  char text[512];
  std::snprintf(text, sizeof text, "\n%s\n%-20s  %-6s %5s  %15s  %15s  %-20s %5s  %9s  %9s  %7s  %9s  %9s  %9s\n",
                title, "tokens", "here", "times", "standard", "flash", "standard / flash", "calls", "memory", "flash's",
                "ratio", measured ? "max error" : "", "published", "flash's");
  return text;
}

std::string row_text(const TableReport& r, const TableRow& row, const TableResult* result) {
  const TableRun& run = r.tables.runs[row.run];
  const FormResult* const standard = result != nullptr ? &result->standard : nullptr;
  const FormResult* const flash = result != nullptr ? &result->flash : nullptr;
  const bool judged = flash != nullptr && flash->seconds >= 0;
  const std::string here = "1 x " + std::to_string(run.problem.num_heads);
  const double ratio = memory_of(run.standard, standard) / memory_of(run.flash, flash);
  const bool counted = result != nullptr && result->speedup >= 0;
  char text[512];
  std::snprintf(text, sizeof text, "%-20s  %-6s %5.4g  %15s  %15s  %-20s %5s  %9s  %9s  %7s  %9s  %9s  %9s\n",
                row.name.c_str(), here.c_str(), row.times, time_text(run.standard, standard).c_str(),
                time_text(run.flash, flash).c_str(), speedup_text(result).c_str(),
                judged ? std::to_string(result->repeats).c_str() : "-", memory_text(run.standard, standard).c_str(),
                memory_text(run.flash, flash).c_str(), rounded(counted ? "%.3g" : "~%.3g", ratio).c_str(),
                judged ? (rounded("%.1e", result->verdict.error) + (result->verdict.ok ? "" : " !")).c_str() : "-",
                ("~" + binary_bytes(row.published_standard_bytes)).c_str(),
                ("~" + binary_bytes(row.published_flash_bytes)).c_str());
  return text;
}

std::string foot_text(const TableReport& r) {
  std::string text =
      "\nstandard: matmul, softmax, matmul, one operator of this library after the other, all scores in memory (one "
      "matrix; training three);\nflash: the operator. Times: medians of calls in turn, quartiles in brackets; one call "
      "where it is long. Memory: tensors, matrices\nand scratch memory, counted while it ran; ~: computed or "
      "predicted, "
      "not measured, as is all of the published shape.\n";
  text += "does not fit: beyond the " + binary_bytes(r.limits.memory_bytes) +
          " that the command may take (--memory-limit); no time: beyond --budget.\n";
  if (r.tables.left_out > 0) {
    text += std::to_string(r.tables.left_out) + " row(s) of more than " + std::to_string(r.options.max_seq) +
            " tokens (--max-seq) are left out.\n";
  }
  return text;
}

Json report_json(const TableReport& r, const std::vector<TableResult>& results) {
  Json rows = Json::array();
  for (const TableRow& row : r.tables.rows) {
    rows.push_back(row_json(r.tables, row, results.empty() ? nullptr : &results[row.run]));
  }
  return {{"machine", to_string(r.context.machine())},
          {"isa", to_string(r.context.machine().isa)},
          {"threads", r.context.num_threads()},
          {"dtype", to_string(r.options.dtype)},
          {"head_dim", r.options.head_dim},
          {"budget_s", r.options.budget_seconds},
          {"memory_limit_bytes", r.limits.memory_bytes},
          {"measured", r.measured},
          {"left_out", r.tables.left_out},
          {"rows", rows}};
}

}  // namespace opst::tools
