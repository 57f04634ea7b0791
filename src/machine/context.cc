#include "opst/context.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <utility>

#include "core/guarded.h"
#include "core/text.h"
#include "machine/context_impl.h"
#include "machine/levels.h"

namespace opst {
namespace {

template <class... Parts>
Status refused(const std::string& what, const std::string& value, const Parts&... expected) {
  return Status::invalid_argument(text("Context::create: ", what, " is ", value, ", but must be ", expected...));
}

// Empty where the variable is not set.
std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string quoted(const std::string& value) { return "'" + value + "'"; }

// The number that `value` is, or that `separator` follows in it; 0 where there is none.
int number_in(const std::string& value, char separator = '\0') {
  int number = 0;
  const char* const end = value.data() + value.size();
  const auto [rest, error] = std::from_chars(value.data(), end, number);
  return error == std::errc() && (rest == end || *rest == separator) ? number : 0;
}

Result<Isa> choose_isa(const ContextOptions& options) {
  const Isa best = detect_isa();
  if (options.isa) {
    if (!includes(best, *options.isa)) {
      return refused("isa", to_string(*options.isa), "at most this processor's level, ", to_string(best));
    }
    return *options.isa;
  }
  const std::string value = environment("OPST_ISA");
  if (value.empty()) return best;
  const std::optional<Isa> cap = parse_isa(value);
  if (cap) return common_level(*cap, best);
  const auto level = [](int i) { return to_string(static_cast<Isa>(i)); };
  return refused("OPST_ISA", quoted(value), joined(kNumIsaLevels, level, " or "));
}

Result<int> choose_num_threads(const ContextOptions& options, const Machine& machine) {
  if (options.num_threads != 0) {
    if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
      return refused("num_threads", std::to_string(options.num_threads), "from 1 to ", kMaxThreads,
                     ", or 0 for the default");
    }
    return options.num_threads;
  }
  const int cores = std::min(machine.cores, kMaxThreads);
  const std::string value = environment("OPST_NUM_THREADS");
  if (value.empty()) {
    // "4", or "4,2" with the threads of parallel regions inside the outermost one. Launchers of many processes set it
    // so that they share the cores. It is OpenMP's variable: a malformed value says nothing here.
    const int omp_threads = number_in(environment("OMP_NUM_THREADS"), ',');
    return omp_threads < 1 ? cores : std::min(cores, omp_threads);
  }
  const int number = number_in(value);
  if (number < 1 || number > kMaxThreads) {
    return refused("OPST_NUM_THREADS", quoted(value), "a number from 1 to ", kMaxThreads);
  }
  return number;
}

// The dot instruction exists from avx512_bf16 on. Asking for it below that level is a contradiction in the options, but
// not in the environment, which speaks of whatever contexts a program makes.
Result<Bf16Product> choose_bf16_product(const ContextOptions& options, const Machine& machine) {
  const bool has_dot = includes(machine.isa, Isa::avx512_bf16);
  if (options.bf16_product) {
    if (*options.bf16_product == Bf16Product::dot && !has_dot) {
      return refused("bf16_product", "dot", "widen at level ", to_string(machine.isa));
    }
    return *options.bf16_product;
  }
  const std::string value = environment("OPST_BF16");
  if (value.empty()) return machine.bf16_product;
  for (Bf16Product product : {Bf16Product::dot, Bf16Product::widen}) {
    if (value == to_string(product)) return has_dot ? product : Bf16Product::widen;
  }
  return refused("OPST_BF16", quoted(value), "dot or widen");
}

}  // namespace

Result<Context> Context::create(const ContextOptions& options) {
  return guarded([&]() -> Result<Context> {
    const Result<Isa> isa = choose_isa(options);
    if (!isa.ok()) return isa.status();
    Machine machine = detect_machine(isa.value());
    const Result<Bf16Product> product = choose_bf16_product(options, machine);
    if (!product.ok()) return product.status();
    machine.bf16_product = product.value();
    if (options.cache) {
      const CacheSizes& cache = *options.cache;
      for (const auto& [name, bytes] :
           {std::pair{"cache.l1d_bytes", cache.l1d_bytes}, std::pair{"cache.l2_bytes", cache.l2_bytes},
            std::pair{"cache.l3_bytes_per_core", cache.l3_bytes_per_core}}) {
        if (bytes <= 0) return refused(name, std::to_string(bytes), "> 0");
      }
      machine.cache = cache;
    }
    const Result<int> num_threads = choose_num_threads(options, machine);
    if (!num_threads.ok()) return num_threads.status();
    return Context(std::make_unique<Impl>(machine, num_threads.value(), options.interrupted));
  });
}

Context::Context(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

const Machine& Context::machine() const { return impl_->machine; }
int Context::num_threads() const { return impl_->pool.num_threads(); }
int64_t Context::workspace_bytes() const { return impl_->workspaces.held_bytes(); }
int64_t Context::workspace_allocations() const { return impl_->workspaces.allocations(); }
void Context::trim() { impl_->workspaces.trim(); }

}  // namespace opst
