#!/usr/bin/env python3
"""Attention on the shapes of image models: time and memory of ours, of torch's, and of the standard form.

Self-attention of an image of N = 4096 (512 x 512 pixels) to 16384 places, and cross-attention to 77 places of a text, with
heads of D = 40, 64, 80, 160 and, in an autoencoder, 512. Forward only, as in sampling.

    pip install . && pip install -r scripts/requirements-examples.txt
    python examples/diffusion_shapes.py

torch: what F.scaled_dot_product_attention does by itself. standard: its math path, the whole score matrix in memory; left
out where that takes more than half of what is free. Times are medians of calls in turn; memory is the peak beyond what is
resident before the call, the result included. Every result is compared with torch's.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

import ops_transformer.torch as ot
from ops_transformer import default_context, set_num_threads

HEADS = {40: 8, 64: 8, 80: 8, 160: 8, 512: 1}
TEXT = 77


def math_attention(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


KINDS = {"ours": ot.scaled_dot_product_attention, "torch": F.scaled_dot_product_attention, "standard": math_attention}


def from_proc(file, name):
    with open(f"/proc/{file}") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def peak(function, *tensors):
    """(result, bytes at the peak beyond what was resident before)"""
    # Nothing is left of the call before: neither scratch memory nor what was freed, but not given back.
    default_context().trim()
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = from_proc("self/status", "VmRSS")
    result = function(*tensors)
    return result, from_proc("self/status", "VmHWM") - before


def row(head_dim, length, keys, repeats):
    heads = HEADS[head_dim]
    # As a projection leaves them: the heads of a place beside each other.
    q, k, v = (torch.randn(1, n, heads, head_dim).transpose(1, 2) for n in (length, keys, keys))
    scores = 4 * heads * length * keys
    kinds = [kind for kind in KINDS if kind != "standard" or 3 * scores < from_proc("meminfo", "MemAvailable") // 2]
    found = {"head_dim": head_dim, "heads": heads, "length": length, "keys": keys, "scores_bytes": scores}
    results = {}
    for kind in kinds:
        results[kind], found[kind + "_bytes"] = peak(KINDS[kind], q, k, v)
    found["difference"] = max((results[kind] - results["torch"]).abs().max().item() for kind in kinds)
    del results
    seconds = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            start = time.perf_counter()
            KINDS[kind](q, k, v)
            seconds[kind].append(time.perf_counter() - start)
    found.update({kind + "_seconds": statistics.median(times) for kind, times in seconds.items()})
    return found


def draw(path, rows):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True)
    labels = [f"{r['length']}x{r['keys']}\nD {r['head_dim']}" for r in rows]
    for axis, key, scale, label in ((axes[0], "_seconds", 1e-3, "milliseconds"), (axes[1], "_bytes", 2**20, "peak memory, MiB")):
        for index, kind in enumerate(KINDS):
            places = [i + 0.27 * (index - 1) for i in range(len(rows))]
            axis.bar(places, [r.get(kind + key, 0) / scale for r in rows], 0.27, label=kind)
        axis.set(ylabel=label, yscale="log")
    axes[0].legend()
    axes[1].set_xticks(range(len(rows)), labels, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 9216, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and ours (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="256 places, one call each: does it run?")
    parser.add_argument("--plot", default="diffusion_shapes.png")
    parser.add_argument("--json", help="write the rows into this file")
    args = parser.parse_args()
    if args.quick:
        args.length, args.repeats = [256], 1
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    torch.manual_seed(0)

    shapes = [(d, n, keys) for d in args.head_dim for n in args.length for keys in (n, TEXT)]
    # An autoencoder's attention has no text.
    shapes = [s for s in shapes if s[0] != 512 or s[2] != TEXT]
    with torch.inference_mode():
        row(shapes[0][0], 128, 128, 1)  # libraries and threads
        rows = [row(*shape, args.repeats) for shape in tqdm(shapes)]

    def cell(found, kind, key, scale):
        return f"{found[kind + key] / scale:9.1f}" if kind + key in found else f"{'-':>9}"

    print(f"{args.threads} threads, float32, batch 1")
    print(f"{'D':>4} {'heads':>5} {'N':>6} {'keys':>6} |" + "".join(f"{kind:>9}" for kind in KINDS) + "  ms |"
          + "".join(f"{kind:>9}" for kind in KINDS) + "  MiB | torch/ours  difference")
    for r in rows:
        print(f"{r['head_dim']:4} {r['heads']:5} {r['length']:6} {r['keys']:6} |"
              + "".join(cell(r, kind, "_seconds", 1e-3) for kind in KINDS) + "     |"
              + "".join(cell(r, kind, "_bytes", 2**20) for kind in KINDS)
              + f"      | {r['torch_seconds'] / r['ours_seconds']:10.2f}  {r['difference']:.1e}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    draw(args.plot, rows)
    print(f"drawn: {args.plot}")
    # Of values about 1 in float32.
    return 0 if all(r["difference"] < 1e-4 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
