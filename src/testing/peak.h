// What this machine can do, measured beside what we want to judge. Absolute times mean little on shared machines: a
// call is set against bursts of plain multiply-adds of the same length, on the same threads, right before and after it.
//
//   Fraction f = measure_fraction(context, PeakKind::f32, flops, [&] { op(context, ...); });
//   // f.call_seconds (median), f.fraction, f.fraction_q1 .. f.fraction_q3, f.valid
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "opst/context.h"
#include "opst/dtype.h"

namespace opst::test {

// f32 and f64 divide by the f32 multiply-add (f64 has no speed bar); f16 has no products of its own and widens to f32.
enum class PeakKind : uint8_t { f32, bf16, i8 };
const char* to_string(PeakKind kind);
PeakKind peak_kind(DType dtype);

struct Peak {
  double seconds = 0;           // how long the burst took, from the first thread's start to the last one's end
  double flops_per_second = 0;  // 2 for each multiply-add, all threads together
};

// A burst of about `seconds` (at least 20 us) on all of the context's threads, which start together, of the fastest
// multiply-add that the context's level may use for the kind. bf16: the pairwise dot or, where faster, FMA.
Peak measure_peak(const Context& context, PeakKind kind, double seconds);

// Bytes per second of reading the memory once, divided among the context's threads. For what lies in DRAM let the
// buffer be 256 MB or more; the smaller it is, the closer the cache. `passes`: how often each thread reads its part, for
// parts that are read faster than threads start.
double measure_read_bandwidth(const Context& context, const void* data, int64_t size_bytes, int64_t passes = 1);

// Seconds of copying the memory once, by memcpy, divided among the context's threads.
double measure_copy_seconds(const Context& context, const void* from, void* to, int64_t size_bytes);

// Cycles per second of this core now, from a chain of dependent multiplications of about 30 us.
double measure_clock();

// The highest number of flops per cycle and core that the level's units allow: lanes x units x 2. The number of units
// is what the best of some bursts shows, rounded to a half, one or two.
double ideal_flops_per_cycle(const Context& context, PeakKind kind);

struct Fraction {
  double call_seconds = 0;           // median
  double flops_per_second = 0;       // of the call, median
  double peak_flops_per_second = 0;  // of the bursts, median
  double fraction = 0;               // of the pairs' fractions: median and quartiles
  double fraction_q1 = 0;
  double fraction_q3 = 0;
  double clock_hz = 0;       // median
  double peak_of_ideal = 0;  // bursts over threads x lanes x units x 2 x clock
  bool valid = false;        // peak_of_ideal >= 0.9: the bursts had the machine to themselves
  int num_pairs = 0;
};

// Pairs of a call and the bursts around it, by the length of a call:
//   below 1 s    11, and up to 101 where calls are short
//   below 10 s   3
//   longer       1
// A burst is as long as the call, at most 0.3 s. The call is run once or twice before, untimed for the result.
Fraction measure_fraction(const Context& context, PeakKind kind, double flops, const std::function<void()>& call);

// The value below which the share `part` (0..1) of the numbers lies; 0 of none.
double quantile(std::vector<double> numbers, double part);

}  // namespace opst::test
