// What ran when, as a file for Chrome's chrome://tracing or ui.perfetto.dev.
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "opst/graph.h"

namespace opst::tools {

class Trace : public NodeListener {
 public:
  void on_node(const char* op, const std::string& name, Clock::time_point begin, Clock::time_point end) override {
    events_.push_back({op, name, begin, end});
  }
  // Complete events ("ph": "X"), times in microseconds since the trace was made.
  Status write(const std::string& path) const;

 private:
  struct Event {
    const char* op;
    std::string name;
    Clock::time_point begin, end;
  };
  Clock::time_point start_ = Clock::now();
  std::vector<Event> events_;
};

}  // namespace opst::tools
