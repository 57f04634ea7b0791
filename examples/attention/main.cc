// Causal attention of 32 query heads over 8 key/value heads, 4096 tokens, stored [batch, seq, heads, head_dim].
#include <cstdint>
#include <cstdio>
#include <vector>

#include "opst/attention.h"

int main() {
  opst::Result<opst::Context> context = opst::Context::create();
  if (!context.ok()) {
    std::fprintf(stderr, "%s\n", context.status().message().c_str());
    return 1;
  }

  const int64_t seq = 4096, heads = 32, kv_heads = 8, head_dim = 64;
  std::vector<float> q(seq * heads * head_dim, 0.5f), k(seq * kv_heads * head_dim, 0.25f);
  std::vector<float> v(seq * kv_heads * head_dim, 3.0f), o(seq * heads * head_dim);

  // Layout is strides: the operator sees [batch, heads, seq, head_dim], nothing is copied.
  const opst::DType f32 = opst::DType::f32;
  opst::Tensor query = opst::Tensor::contiguous(f32, {1, seq, heads, head_dim}, q.data()).transposed(1, 2);
  opst::Tensor key = opst::Tensor::contiguous(f32, {1, seq, kv_heads, head_dim}, k.data()).transposed(1, 2);
  opst::Tensor value = opst::Tensor::contiguous(f32, {1, seq, kv_heads, head_dim}, v.data()).transposed(1, 2);
  opst::Tensor out = opst::Tensor::contiguous(f32, {1, seq, heads, head_dim}, o.data()).transposed(1, 2);

  opst::Status status = opst::flash_attention_forward(context.value(), {.query = query, .key = key, .value = value},
                                                      {.out = out}, {.causal = true});
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::printf("out[0] = %g\n", o[0]);
}
