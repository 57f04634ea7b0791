// What `opst bench tables` prints: rows as text, or one JSON object.
#pragma once

#include "command.h"
#include "table_bench.h"

namespace opst::tools {

struct TableReport {
  const Context& context;
  const TablesOptions& options;
  const TableLimits& limits;
  const Tables& tables;
  bool measured = true;  // false: the rows as they are planned
};

// What the machine is, how rows are scaled down.
std::string head_text(const TableReport& report);
// Above the rows of a kind.
std::string table_head(TableKind kind, bool measured);
// `result`: of the row's run, or none where it is planned.
std::string row_text(const TableReport& report, const TableRow& row, const TableResult* result);
// What the words mean.
std::string foot_text(const TableReport& report);

// `results`: of the runs, as many as there are; none where they are planned.
nlohmann::ordered_json report_json(const TableReport& report, const std::vector<TableResult>& results);

}  // namespace opst::tools
