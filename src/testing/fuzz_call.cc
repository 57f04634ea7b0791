#include "testing/fuzz_call.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "testing/contexts.h"

namespace opst::test {
namespace {

Context make_context(std::optional<Isa> isa, int threads) {
  ContextOptions options;
  options.isa = isa, options.num_threads = threads;
  options.cache = tiny_caches();  // every loop over tiles runs more than once
  return std::move(Context::create(options).value());
}

}  // namespace

bool answers(const FuzzedCall& fuzzed, Operands& operands, PlantedFault fault) {
  static Context many = make_context({}, 3), one = make_context({}, 1), generic = make_context(Isa::generic, 1);
  if (std::getenv("OPST_FUZZ_SHOW") != nullptr) operands.show();
  if (!operands.can_be_called()) return false;
  bool prepared = true;
  if (fuzzed.prepare) {
    prepared = fuzzed.prepare(generic, operands.views()).ok();
    operands.remember();
  }
  const Status status = fuzzed.call(many, operands.views());
  if (std::getenv("OPST_FUZZ_SHOW") != nullptr)
    std::fprintf(stderr, "%s: %s\n", to_string(status.code()), status.message().c_str());
  require(status.code() != StatusCode::internal, "no call ends as internal");
  if (!status.ok()) {
    if (fault == PlantedFault::refused) operands.plant(0);
    require(!status.message().empty(), "a refusal says why");
    operands.require_untouched();
    return false;
  }
  if (fault == PlantedFault::outside) operands.plant_outside();
  operands.require_written_only_inside();

  Operands alone = operands.copy();
  alone.restore();
  require(fuzzed.call(one, alone.views()).ok(), "what several threads accept one accepts");
  if (fault == PlantedFault::threads) alone.plant(1e-7);
  alone.require_equals(operands, 0, false, "the same bits for any number of threads");

  if (!operands.all_small() || !prepared) return true;
  operands.restore();
  Operands plain = operands.clones();
  const Status plain_status = (fuzzed.plain ? fuzzed.plain : fuzzed.call)(generic, plain.views());
  if (!plain_status.ok()) std::fprintf(stderr, "%s\n", plain_status.message().c_str());
  require(plain_status.ok(), "contiguous copies are accepted as well");
  if (fault == PlantedFault::value) plain.plant(0.5);
  const double tolerance = fuzzed.tolerance ? *fuzzed.tolerance : plain.tolerance();
  alone.require_equals(plain, tolerance, fuzzed.loose_infinities,
                       "the values of contiguous copies at the generic level");
  return true;
}

}  // namespace opst::test
