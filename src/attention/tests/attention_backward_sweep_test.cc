// Attention backward against the float64 reference on every level: each dimension walks past every tile edge while the
// others stay where all edges are ragged. Sampled; with OPST_EXHAUSTIVE=1 all of it.
#include <gtest/gtest.h>

#include "attention/tests/attention_backward_call.h"

namespace opst::test {
namespace {

struct Walk {
  const char* name;
  void (*set)(Draw& d, int64_t size);
  std::vector<int64_t> sizes;
};
const Walk kWalks[] = {
    {"query_len",
     [](Draw& d, int64_t size) {
       d.query_lens = {size, size};
     },
     {0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 23, 24, 25, 37, 60, 61, 119, 120, 121, 241}},
    {"kv_len",
     [](Draw& d, int64_t size) {
       d.kv_lens = {size, size};
     },
     {0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 257}},
    {"head_dim", [](Draw& d, int64_t size) { d.head_dim = size; }, {1,  2,  3,  4,  5,  7,  8,   9,   15,  16, 17,
                                                                    31, 32, 33, 63, 64, 65, 127, 128, 129, 768}},
    {"value_head_dim",
     [](Draw& d, int64_t size) { d.value_head_dim = size; },
     {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 768}},
    {"heads", [](Draw& d, int64_t size) { d.num_heads = size; }, {1, 2, 3, 5, 12, 13}},
};

class AttentionBackwardWalk : public testing::TestWithParam<Walk> {};

TEST_P(AttentionBackwardWalk, AgreesWithTheReferenceOnEveryLevel) {
  Random random(seed());
  double worst_ratio = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const int64_t size : GetParam().sizes) {
      for (const bool causal : {false, true}) {
        if (!exhaustive() && !random.chance(0.4 * kEffort)) continue;
        Draw d;
        d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
        d.num_heads = 2, d.head_dim = 21, d.value_head_dim = 19;
        d.query_lens = {13, 13}, d.kv_lens = {71, 71};
        d.options.causal = causal;
        d.options.alignment = random.pick({CausalAlignment::top_left, CausalAlignment::bottom_right});
        GetParam().set(d, size);
        DrawnCall call(d, random);
        BackwardForm form = draw_form(d, random);
        form.grad_out_dtype = dtype;
        BackwardCallData data(call, form, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          if (!exhaustive() && !random.chance(0.5)) continue;
          const BackwardCallData::Outcome r = data.run(t.context);
          ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name;
          ASSERT_EQ(data.run(contexts_like(t).back()->context).differs_from(r), "") << t.name << "\n  " << to_string(d);
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Attention, AttentionBackwardWalk, testing::ValuesIn(kWalks),
                         [](const auto& walk) { return std::string(walk.param.name); });

}  // namespace
}  // namespace opst::test
