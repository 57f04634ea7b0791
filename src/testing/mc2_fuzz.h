// The calls of mc2.h that operator_fuzz draws: of one rank, which checks, packs, tiles and sums as one of many does. What
// ranks do to one another is mc2_test's.
#pragma once

#include <vector>

#include "opst/mc2.h"
#include "testing/fuzz_call.h"

namespace opst::test {

inline FuzzedCall draw_mc2(Choices& c, Operands& t) {
  const int64_t m = c.integer(0, 20), n = c.integer(1, 30), k = c.pick<int64_t>({1, 7, 32, 130});
  const auto function =
      c.pick({matmul_all_to_all, all_to_all_matmul, all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce});
  const bool ints = c.rarely(4);
  const DType x = c.pick({ints ? DType::i8 : DType::f32, DType::bf16, DType::f16});
  const bool sums = function == matmul_reduce_scatter || function == matmul_all_reduce;
  t.input(x, {m, k}, -128, 127);
  t.input(ints ? DType::i8 : c.pick({x, DType::f32}), {n, k}, -128, 127);
  ints ? t.input(DType::f32, {n, 1}) : t.absent();
  c.coin() ? t.absent() : t.input(c.pick({DType::f32, DType::f32, DType::bf16, DType::i32}), {n});
  c.rarely(sums ? 2 : 16) ? t.input(c.pick({x, DType::f32}), {m, n}) : t.absent();
  (x == DType::i8 ? c.coin() : c.rarely(32)) ? t.input(DType::f32, {m}) : t.absent();
  t.output(c.pick({DType::f32, DType::bf16, DType::f16, x == DType::i8 ? DType::i32 : DType::f32}), {m, n});
  c.rarely(sums ? 32 : 4) ? t.output(x, {m, k}) : t.absent();
  const std::vector<int64_t> rows = c.rarely(4) ? std::vector{c.size(m)} : std::vector<int64_t>();
  const std::vector<int64_t> inputs = c.rarely(16) ? std::vector{c.size(k)} : std::vector<int64_t>();
  const int64_t tile_rows = c.size(c.integer(0, 9));
  const auto activations = c.pick({ActivationType::exact, ActivationType::int8});
  const CommunicatorOptions world = {.staging_bytes = c.pick({1 << 16, 1 << 16, 1 << 12, 0}),
                                     .direct_stores = c.coin()};
  return {[=](Context& context, const Views& v) -> Status {
    Result<std::vector<Communicator>> ranks = Communicator::create_threads(1, world);
    if (!ranks.ok()) return ranks.status();
    const Mc2Options options{.bias = v[3],
                             .x_scales = v[5],
                             .residual = v[4],
                             .activations = activations,
                             .rows = rows,
                             .inputs = inputs,
                             .exchanged = v[7],
                             .tile_rows = tile_rows};
    if (ints) {
      const Result<std::vector<PackedIntWeight>> weight = pack_columns(context, IntMatrix{v[1], v[2]}, 1);
      return weight.ok() ? function(context, ranks.value()[0], v[0], weight.value(), v[6], options) : weight.status();
    }
    const Result<std::vector<PackedWeight>> weight = pack_columns(context, ConstTensor(v[1]), 1);
    return weight.ok() ? function(context, ranks.value()[0], v[0], weight.value(), v[6], options) : weight.status();
  }};
}

}  // namespace opst::test
