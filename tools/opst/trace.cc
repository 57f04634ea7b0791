#include "trace.h"

#include <fstream>

namespace opst::tools {

Status Trace::write(const std::string& path) const {
  const auto microseconds = [](Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); };
  std::ofstream file(path, std::ios::binary);
  file << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (const Event& event : events_) {
    const nlohmann::ordered_json json = {{"name", event.name},
                                         {"cat", event.op},
                                         {"ph", "X"},
                                         {"ts", microseconds(event.begin - start_)},
                                         {"dur", microseconds(event.end - event.begin)},
                                         {"pid", 1},
                                         {"tid", 1}};
    file << json.dump() << (&event == &events_.back() ? "\n" : ",\n");
  }
  file << "]}\n" << std::flush;
  if (!file) return {StatusCode::internal, path + ": cannot be written"};
  return {};
}

}  // namespace opst::tools
