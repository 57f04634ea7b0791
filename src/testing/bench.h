// What the rooms' benches share: a case that times itself, its figures beside the peak, the program around it.
#pragma once

#include <benchmark/benchmark.h>

#include <string>

#include "testing/peak.h"

namespace opst::test {

// run(state) sets the time of its one iteration itself, in seconds.
template <class Run>
void register_bench(const std::string& name, const Run& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->UseManualTime()->Iterations(1)->Unit(benchmark::kMicrosecond);
}

inline void report(benchmark::State& state, const Fraction& f) {
  state.counters["GFLOP/s"] = f.flops_per_second / 1e9;
  state.counters["of_peak"] = f.fraction;
  state.counters["q1"] = f.fraction_q1;
  state.counters["q3"] = f.fraction_q3;
  state.counters["valid"] = f.valid;
}

// The rest of main, once all cases are registered.
inline int run_benches(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace opst::test
