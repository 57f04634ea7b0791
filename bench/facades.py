"""What the facades add to a call: microseconds beyond the functions of the package that compute for them.

    python3 bench/facades.py [--threads 2] [--calls 2000] [--only WORD]

Small tensors, so that a call is mostly Python. A facade's call and the core's, with the same tensors and its arguments ready,
take turns; the figures are the medians of each and of the pairs' differences. Forms that compute between two calls of the core
(the statistics of npu_fusion_attention eight times) have that in their figure.
"""

import argparse
import statistics
import time

import torch

import ops_transformer.npu as npu
from ops_transformer import flash_attention as fa
from ops_transformer import set_num_threads
from ops_transformer.flash_attn import flash_attn_func, flash_attn_with_kvcache
from ops_transformer.kv_cache import paged_attention, scatter_pa_kv_cache
from ops_transformer.rowwise import rms_norm, rope_cached, swiglu

SCALE = 64**-0.5


def kv_cache_cases():
    """Two sequences of 100 and 60 tokens, 8 query and 2 key heads of 64."""
    q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    cache = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
    lengths, table, behind = torch.tensor([100, 60], dtype=torch.int32), torch.tensor([[0], [1]]), torch.tensor([101, 61], dtype=torch.int32)
    pages, ids = [x.view(16, 16, 2, 64) for x in cache], torch.arange(16, dtype=torch.int32).view(2, 8)
    slots, positions = torch.tensor([100, 188]), torch.tensor([100, 60])
    rotary = torch.randn(128, 32), torch.randn(128, 32)
    attend = lambda x, sizes: paged_attention(x, *cache, table, sizes, causal=False, query_layout="BSND", scale_value=SCALE)  # noqa: E731

    def append():
        scatter_pa_kv_cache(k[:, 0], v[:, 0], slots, *cache)
        return attend(q, behind)

    def turn():
        turned = [rope_cached(x[:, 0], positions, *rotary, style="pairs") for x in (q, k)]
        scatter_pa_kv_cache(turned[1], v[:, 0], slots, *cache)
        return attend(turned[0][:, None], behind)

    yield "flash_attn_with_kvcache", lambda: flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths), lambda: attend(q, lengths)
    yield ("flash_attn_with_kvcache, pages", lambda: flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=ids),
           lambda: paged_attention(q, *pages, ids, lengths, causal=False, query_layout="BSND", scale_value=SCALE))
    yield "flash_attn_with_kvcache, causal", lambda: flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True), \
        lambda: paged_attention(q, *cache, table, lengths, causal=True, query_layout="BSND", scale_value=SCALE)
    yield "flash_attn_with_kvcache, new tokens", lambda: flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths), append
    yield ("flash_attn_with_kvcache, new tokens turned", lambda: flash_attn_with_kvcache(q, *cache, k, v, *rotary, cache_seqlens=lengths), turn)


def attention_cases():
    q, k, v = (torch.randn(1, 16, heads, 64) for heads in (8, 2, 2))
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)
    yield "flash_attn_func", lambda: flash_attn_func(q, k, v, causal=True), \
        lambda: fa.flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    yield ("npu_fusion_attention", lambda: npu.npu_fusion_attention(q, k, v, 8, "BSND", atten_mask=mask, sparse_mode=2, scale=SCALE),
           lambda: fa.flash_attention_score(q, k, v, input_layout="BSND", attn_head_num=8, kv_head_num=2, scale_value=SCALE, next_tokens=0,
                                            alignment="top_left"))
    yield ("npu_fused_infer_attention_score", lambda: npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=8, num_key_value_heads=2, input_layout="BSND", atten_mask=mask, sparse_mode=3, scale=SCALE),
        lambda: fa.flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window_right=0, alignment="bottom_right",
                                   softmax_scale=SCALE).transpose(1, 2).contiguous())
    x, gamma = torch.randn(16, 256), torch.randn(256)
    yield "npu_swiglu", lambda: npu.npu_swiglu(x), lambda: swiglu(x)
    yield "npu_rms_norm", lambda: npu.npu_rms_norm(x, gamma), lambda: rms_norm(x, gamma, 1e-6, return_rstd=True)


def seconds(call):
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"{'us a call, medians of ' + str(options.calls):44} {'facade':>8} {'core':>8} {'added':>8}")
    with torch.no_grad():
        for name, facade, core in (*kv_cache_cases(), *attention_cases()):
            if options.only not in name:
                continue
            for _ in range(options.calls // 10):
                facade(), core()
            pairs = [(seconds(facade), seconds(core)) for _ in range(options.calls)]
            ours, theirs = (statistics.median(column) for column in zip(*pairs))
            print(f"{name:44} {ours:8.1f} {theirs:8.1f} {statistics.median(a - b for a, b in pairs):8.1f}")


if __name__ == "__main__":
    main()
