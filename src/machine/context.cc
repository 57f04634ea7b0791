#include "opst/context.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/guarded.h"
#include "machine/context_impl.h"
#include "machine/levels.h"

namespace opst {
namespace {

Status refused(const std::string& what, const std::string& value, const std::string& expected) {
  return Status::invalid_argument("Context::create: " + what + " is " + value + ", but must be " + expected);
}

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

Result<Isa> choose_isa(const ContextOptions& options) {
  const Isa best = detect_isa();
  if (options.isa) {
    if (!includes(best, *options.isa)) {
      return refused("isa", to_string(*options.isa), std::string("at most this processor's level, ") + to_string(best));
    }
    return *options.isa;
  }
  const std::optional<std::string> text = environment("OPST_ISA");
  if (!text) return best;
  const std::optional<Isa> cap = parse_isa(*text);
  if (!cap) {
    std::string levels;
    for (int i = 0; i < kNumIsaLevels; ++i) {
      if (i > 0) levels += i + 1 == kNumIsaLevels ? " or " : ", ";
      levels += to_string(static_cast<Isa>(i));
    }
    return refused("OPST_ISA", quoted(*text), levels);
  }
  return common_level(*cap, best);
}

// What OMP_NUM_THREADS says of the outermost parallel region ("4", or "4,2" with those inside it). Launchers of many
// processes set it so that they share the cores. It is OpenMP's variable: what is malformed there says nothing here.
std::optional<int> omp_num_threads() {
  const std::optional<std::string> text = environment("OMP_NUM_THREADS");
  if (!text) return std::nullopt;
  int number = 0;
  const char* const end = text->data() + text->size();
  const auto [parsed_to, error] = std::from_chars(text->data(), end, number);
  if (error != std::errc() || number < 1 || (parsed_to != end && *parsed_to != ',')) return std::nullopt;
  return number;
}

Result<int> choose_num_threads(const ContextOptions& options, const Machine& machine) {
  const std::string range = "from 1 to " + std::to_string(kMaxThreads);
  if (options.num_threads != 0) {
    if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
      return refused("num_threads", std::to_string(options.num_threads), range + ", or 0 for the default");
    }
    return options.num_threads;
  }
  const int cores = std::min(machine.cores, kMaxThreads);
  const std::optional<std::string> text = environment("OPST_NUM_THREADS");
  if (!text) return std::min(cores, omp_num_threads().value_or(cores));
  int number = 0;
  const char* const end = text->data() + text->size();
  const auto [parsed_to, error] = std::from_chars(text->data(), end, number);
  if (error != std::errc() || parsed_to != end || number < 1 || number > kMaxThreads) {
    return refused("OPST_NUM_THREADS", quoted(*text), "a number " + range);
  }
  return number;
}

// The dot instruction exists from avx512_bf16 on. Asking for it below that level is a contradiction in the options, but
// not in the environment, which speaks of whatever contexts a program makes.
Result<Bf16Product> choose_bf16_product(const ContextOptions& options, const Machine& machine) {
  const bool has_dot = includes(machine.isa, Isa::avx512_bf16);
  if (options.bf16_product) {
    if (*options.bf16_product == Bf16Product::dot && !has_dot) {
      return refused("bf16_product", "dot", std::string("widen at level ") + to_string(machine.isa));
    }
    return *options.bf16_product;
  }
  const std::optional<std::string> text = environment("OPST_BF16");
  if (!text) return machine.bf16_product;
  for (Bf16Product product : {Bf16Product::dot, Bf16Product::widen}) {
    if (*text == to_string(product)) return has_dot ? product : Bf16Product::widen;
  }
  return refused("OPST_BF16", quoted(*text), "dot or widen");
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
