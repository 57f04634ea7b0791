#!/usr/bin/env python3
"""Attention beside other libraries: the same inputs, equal threads, calls in turn, every output compared with float64.

    bench/compare.py --threads 1 --json out.json --markdown out.md
    bench/compare.py --shapes 1x8x1024x64 --dtypes f32,bf16 --modes forward,causal,backward

For each row the calls go round: ours, then each peer, `--pairs` times. Shown are the median time of ours, and for every peer
the median of its time over ours within the same round, with its 95 % interval (order statistics): above 1 ours is faster. A row
is won where the interval's lower end is above 1, lost where its upper end is below. Losing rows are shown like any other.

Peers, each where it is installed: torch SDPA's flash and its math path, ONNX Runtime's MultiHeadAttention.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings

MODES = ("forward", "causal", "backward", "dropout", "bool_mask")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=30, help="rounds of each row (default 30)")
    parser.add_argument("--seconds", type=float, default=4, help="a row ends after so long and 5 rounds (default 4)")
    parser.add_argument("--shapes", default="1x8x64x64,1x8x256x64,1x8x1024x64,1x8x1024x128,1x8x4096x64",
                        help="batch x heads x length x head_dim, comma separated")
    parser.add_argument("--dtypes", default="f32", help="f32, bf16, f16")
    parser.add_argument("--modes", default=",".join(MODES[:3]), help="of " + ", ".join(MODES))
    parser.add_argument("--json", help="write all numbers here")
    parser.add_argument("--markdown", help="write the table here")
    options = parser.parse_args()
    for mode in options.modes.split(","):
        if mode not in MODES:
            parser.error(f"--modes: {mode} is none of {', '.join(MODES)}")
    return options


def main():
    options = arguments()
    os.environ["OPST_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        import torch
    except ImportError:
        sys.exit("compare.py: torch is not installed (scripts/requirements-torch.txt)")
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message=".*(not used because|do not support|kernel)")  # of paths that do not take a call
    torch.manual_seed(0)
    rows = []
    for dtype in options.dtypes.split(","):
        for mode in options.modes.split(","):
            for shape in options.shapes.split(","):
                row = measure(torch, dtype, mode, tuple(int(n) for n in shape.split("x")), options)
                rows.append(row)
                print(line(row), flush=True)
    report = {"machine": machine(torch), "threads": options.threads, "command": " ".join(sys.argv), "rows": rows}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(table(report))


def machine(torch):
    import ops_transformer

    return {"ours": ops_transformer.default_context().machine, "torch": torch.__version__,
            "torch_capability": torch.backends.cpu.get_cpu_capability(), "system": platform.platform()}


def measure(torch, dtype, mode, shape, options):
    torch_dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    q, k, v = (torch.randn(shape, dtype=torch_dtype) for _ in range(3))
    grad = torch.randn(shape, dtype=torch_dtype)
    extra = {"causal": dict(is_causal=True), "dropout": dict(dropout_p=0.1),
             "bool_mask": dict(attn_mask=torch.rand(shape[2], shape[2]) < 0.9)}.get(mode, {})
    calls = {"ours": ours(torch, q, k, v, grad, mode, extra), **peers(torch, q, k, v, grad, mode, extra)}
    row = {"dtype": dtype, "mode": mode, "shape": list(shape), "error": {}, "peers": {}}
    for name, call in calls.items():
        with chosen(name):
            result = call()  # also the warm-up
            call()
        if mode != "dropout":
            row["error"][name] = error(torch, result, q, k, v, grad, mode, extra)
    times = {name: [] for name in calls}
    start = time.perf_counter()
    while len(times["ours"]) < options.pairs:
        for name, call in calls.items():
            with chosen(name):
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
        if time.perf_counter() - start > options.seconds and len(times["ours"]) >= 5:
            break
    row["pairs"] = len(times["ours"])
    row["ours_ms"] = 1e3 * statistics.median(times["ours"])
    for name in calls:
        if name != "ours":
            row["peers"][name] = interval([theirs / mine for theirs, mine in zip(times[name], times["ours"])])
    return row


def ours(torch, q, k, v, grad, mode, extra):
    from ops_transformer.torch import scaled_dot_product_attention

    return through(torch, scaled_dot_product_attention, q, k, v, grad, mode, extra)


def through(torch, function, q, k, v, grad, mode, extra):
    """The call as a user makes it: with autograd for backward, without it otherwise."""
    if mode != "backward":

        def forward():
            with torch.inference_mode():
                return (function(q, k, v, **extra),)

        return forward
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def both():
        return torch.autograd.grad(function(*leaves, **extra), leaves, grad)

    return both


def peers(torch, q, k, v, grad, mode, extra):
    found = {}
    for name in ("torch flash", "torch math"):
        # The scores alone would take more than 4 GiB.
        if name == "torch math" and math.prod(q.shape[:3]) * k.shape[2] * 4 > 4 << 30:
            continue
        call = through(torch, torch._C._nn.scaled_dot_product_attention, q, k, v, grad, mode, extra)
        try:
            with chosen(name):
                call()
        except RuntimeError:  # this path does not take this call
            continue
        found[name] = call
    runtime = onnx_runtime(torch, q, k, v, mode)
    if runtime:
        found["ONNX Runtime"] = runtime
    return found


def chosen(name):
    """Makes torch take the path of that name. Outside of what is timed: it costs as much as a short call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch math": SDPBackend.MATH}
    return sdpa_kernel(backends[name]) if name in backends else contextlib.nullcontext()


def onnx_runtime(torch, q, k, v, mode):
    if mode != "forward" or q.dtype != torch.float32:
        return None
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    batch, heads, length, dim = q.shape
    names = ["query", "key", "value"]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, length, heads * dim]) for n in (*names, "out")]
    node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=heads)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx_model = helper.make_model(helper.make_graph([node], "attention", info[:3], info[3:]), opset_imports=opsets, ir_version=9)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(onnx_model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    feed = {n: t.transpose(1, 2).reshape(batch, length, heads * dim).numpy() for n, t in zip(names, (q, k, v))}

    def call():
        out = torch.from_numpy(session.run(None, feed)[0])
        return (out.unflatten(-1, (heads, dim)).transpose(1, 2),)

    return call


def error(torch, results, q, k, v, grad, mode, extra):
    """Largest difference from float64, over the largest element; of one batch and at most two heads, in slices."""
    leaves = [t[:1, :2].double().requires_grad_(mode == "backward") for t in (q, k, v)]
    if "attn_mask" in extra and extra["attn_mask"].dtype != torch.bool:
        extra = {**extra, "attn_mask": extra["attn_mask"].double()}
    want = (torch._C._nn.scaled_dot_product_attention(*leaves, **extra),)
    if mode == "backward":
        want = torch.autograd.grad(want[0], leaves, grad[:1, :2].double())
    return max(float((got[:1, :2].double() - w).abs().max() / w.abs().max()) for got, w in zip(results, want))


def interval(ratios):
    """The median, and the order statistics that hold it in 95 of 100 cases."""
    ratios, n = sorted(ratios), len(ratios)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return {"median": statistics.median(ratios), "low": ratios[low], "high": ratios[high]}


def verdict(ratio):
    return "won" if ratio["low"] > 1 else "lost" if ratio["high"] < 1 else "tie"


def cells(row):
    shape = "x".join(str(n) for n in row["shape"])
    compared = [f"{name} {r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}] {verdict(r)}" for name, r in row["peers"].items()]
    worst = max(row["error"].values(), default=None)
    return [row["dtype"], row["mode"], shape, f"{row['ours_ms']:.3f}", str(row["pairs"]), "; ".join(compared) or "no peer",
            "-" if worst is None else f"{row['error']['ours']:.1e} (worst {worst:.1e})"]


def line(row):
    return "  ".join(cells(row))


def table(report):
    head = ["dtype", "mode", "B x H x N x D", "ours ms", "rounds", "peer's time over ours: median [95 %]", "error against f64"]
    lines = [f"{report['machine']['ours']}; torch {report['machine']['torch']}; {report['threads']} threads; "
             f"`{report['command']}`", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in report["rows"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
