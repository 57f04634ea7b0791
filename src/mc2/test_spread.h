// Small calls of every operator of sequence_parallel.h and expert_parallel.h, of one rank: its numbers depend on the rank
// alone, and a call allocates nothing for the test.
#pragma once

#include <string>
#include <vector>

#include "opst/expert_parallel.h"
#include "opst/mc2.h"
#include "opst/sequence_parallel.h"
#include "testing/random.h"

namespace opst::test {

class SpreadProblem {
 public:
  // In the order of call(); the last one is moe_layer_forward.
  static constexpr int kCalls = 11;

  // No memory of this rank's but `out` is stored into by others: `out` may be shared memory of out_bytes(ranks).
  SpreadProblem(Context& context, int rank, int ranks) : rank_(rank), ranks_(ranks) {
    Random random(static_cast<uint64_t>(1000 + rank));
    for (float& value : x_) value = static_cast<float>(random.normal());
    for (int32_t& id : ids_) id = static_cast<int32_t>(random.integer(-1, ranks * kExperts - 1));
    for (const int32_t id : ids_) {
      if (id >= 0) ++counts_[static_cast<size_t>(id)];
    }
    for (int e = 0; e < kExperts; ++e) {
      std::vector<float> weight(kHidden * kHidden);
      for (float& value : weight) value = static_cast<float>(random.normal());
      const auto matrix = ConstTensor::contiguous(DType::f32, {kHidden, kHidden}, weight.data());
      experts_.push_back(std::move(PackedWeight::pack(context, matrix).value()));
    }
    out_.resize(static_cast<size_t>(out_bytes(ranks)) / 4);
  }
  static int64_t out_bytes(int ranks) { return int64_t{4} * ranks * kTokens * kTopK * kHidden; }
  void* own_out() { return out_.data(); }
  void* own_more() { return more_.data(); }

  // tile_rows < 0: every call is refused. Results lie in `out` and own_more().
  Status call(int index, Context& context, Communicator& communicator, void* out, int64_t tile_rows) {
    const auto f32 = [](std::initializer_list<int64_t> shape, void* data) {
      return Tensor::contiguous(DType::f32, shape, data);
    };
    const int64_t all = kTokens * ranks_;
    const HeadShardOptions heads{.tile_rows = tile_rows};
    const RingAttentionOptions ring{.causal = true, .order = SequenceOrder::zigzag, .tile_rows = tile_rows};
    const ExpertShardOptions shards{.tile_rows = tile_rows};
    const AttentionFfnOptions kinds{.attention_ranks = 1, .tile_rows = tile_rows};
    const int64_t num_experts = int64_t{ranks_} * kExperts;
    const Tensor by_rows = f32({kTokens, ranks_, 8}, x_.data());
    const Tensor x = f32({kTokens, kHidden}, x_.data()), sorted = f32({kTokens * kTopK, kHidden}, x_.data());
    const auto part = [&](int i) { return f32({1, 2, kTokens, 16}, x_.data() + i * kTokens * kHidden); };
    const auto result = [&](int i) { return f32({1, 2, kTokens, 16}, more_.data() + i * kTokens * kHidden); };
    const Tensor lse = f32({1, 2, kTokens}, more_.data() + 4 * kTokens * kHidden);
    const Tensor arriving = f32({all * kTopK, kHidden}, out);
    const ConstTensor ids = ConstTensor::contiguous(DType::i32, {kTokens, kTopK}, ids_.data());
    const ConstTensor counts = ConstTensor::contiguous(DType::i32, {num_experts}, counts_.data());
    const bool attends = rank_ == 0;
    const int64_t ffn_rows = attends ? 0 : share_of(kTokens, std::max(1, ranks_ - 1), rank_ - 1);
    switch (index) {
      case 0:
        return sequence_to_heads(context, communicator, by_rows, f32({all, 1, 8}, out), heads);
      case 1:
        return heads_to_sequence(context, communicator, f32({all, 1, 8}, x_.data()), f32({kTokens, ranks_, 8}, out),
                                 heads);
      case 2:
        return ring_attention_forward(context, communicator, {part(0), part(1), part(2)},
                                      {.out = result(0), .softmax_lse = lse}, ring);
      case 3:  // of what forward left
        return ring_attention_backward(context, communicator, {part(0), part(1), part(2)},
                                       {.out = result(0), .softmax_lse = lse, .grad_out = part(3)},
                                       {.grad_query = result(1), .grad_key = result(2), .grad_value = result(3)}, ring);
      case 4:
        return moe_dispatch(context, communicator, x, ids, num_experts, {.rows = arriving}, shards);
      case 5:  // of what dispatch left
        return moe_combine(context, communicator, {.rows = arriving, .topk_ids = ids}, num_experts,
                           f32({kTokens, kHidden}, more_.data()), shards);
      case 6:
        return all_to_allv_grouped_matmul(context, communicator, sorted, counts, experts_, arriving,
                                          {.shards = shards});
      case 7:
        return grouped_matmul_all_to_allv(context, communicator, f32({all * kTopK, kHidden}, long_.data()), counts,
                                          experts_, f32({kTokens * kTopK, kHidden}, out), {.shards = shards});
      case 8:
        return attention_to_ffn(context, communicator, {.x = f32({attends ? kTokens : 0, kHidden}, x_.data())},
                                {.rows = f32({ffn_rows, kHidden}, out)}, kinds);
      case 9:
        return ffn_to_attention(context, communicator,
                                {.combine = {.rows = f32({ffn_rows, kHidden}, x_.data()), .topk_ids = {}}},
                                f32({attends ? kTokens : 0, kHidden}, out), kinds);
      default: {
        MoeLayerInputs in{};
        in.x = x, in.topk_ids = ids, in.topk_weights = f32({kTokens, kTopK}, x_.data());
        in.experts.gate_up = experts_, in.experts.down = experts_;
        return moe_layer_forward(context, communicator, in, {.out = f32({kTokens, kHidden}, more_.data())},
                                 {.activation = Activation::silu, .num_experts = num_experts}, shards);
      }
    }
  }

  // The bytes of all results, or a message.
  std::string all_results(Context& context, Communicator& communicator, void* out) {
    std::string all;
    for (int index = 0; index < kCalls; ++index) {
      if (ranks_ == 1 && (index == 8 || index == 9)) continue;  // there are two kinds of ranks
      if (index != 5) std::fill_n(static_cast<float*>(out), out_bytes(ranks_) / 4, 0.f);
      const Status status = call(index, context, communicator, out, 2);
      if (!status.ok()) return status.message();
      all.append(static_cast<const char*>(out), static_cast<size_t>(out_bytes(ranks_)));
      all.append(reinterpret_cast<const char*>(more_.data()), more_.size() * 4);
    }
    return all;
  }

 private:
  static constexpr int64_t kTokens = 6, kTopK = 2, kHidden = 32, kMostRanks = 8;
  static constexpr int kExperts = 2;

  int rank_, ranks_;
  std::vector<float> x_ = std::vector<float>(4 * kTokens * kHidden), more_ = std::vector<float>(5 * kTokens * kHidden);
  std::vector<float> long_ = std::vector<float>(kMostRanks * kTokens * kTopK * kHidden, 1), out_;
  std::vector<int32_t> ids_ = std::vector<int32_t>(kTokens * kTopK),
                       counts_ = std::vector<int32_t>(kMostRanks * kExperts);
  std::vector<PackedWeight> experts_;
};

}  // namespace opst::test
