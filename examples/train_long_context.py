#!/usr/bin/env python3
"""Trains a small causal language model twice, with our attention and with torch's standard one, and compares.

1. At 2,048 tokens, 200 steps: both see the same bytes in the same order and start from the same weights. The losses of any
   step differ by at most 1e-3.
2. At 8,192 tokens, 3 steps, each kind in a process of its own: peak memory beyond what is there before the first step, and
   seconds a step. Ours takes at most a fifth of the standard form's memory.

    pip install . && pip install -r scripts/requirements-examples.txt
    python examples/train_long_context.py

Prints what it finds, draws it (--plot) and exits with 1 where one of the two does not hold. The text is what lies in
/usr/share/common-licenses of every Debian; a token is a byte.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

import ops_transformer.torch as ot
from ops_transformer import set_num_threads

SEED = 1234
LEARNING_RATE = 1e-3  # AdamW, betas 0.9 and 0.95, weight decay 0.1; the first 20 steps rise to it
DIM, LAYERS, HEADS = 128, 2, 2  # head_dim 64
LARGEST_DIFFERENCE = 1e-3
LARGEST_SHARE = 0.2
KINDS = ("ours", "torch math")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention, self.norm_mlp = torch.nn.RMSNorm(DIM), torch.nn.RMSNorm(DIM)
        self.qkv = torch.nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = torch.nn.Linear(DIM, DIM, bias=False)
        self.up = torch.nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = torch.nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # The plain call of torch: what runs behind it is decided outside of the model.
        heads = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


def turn(x, cos, sin):
    """Rotary positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, DIM)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(DIM)
        self.head = torch.nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens):
        half = DIM // HEADS // 2
        angles = torch.arange(tokens.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def read_text():
    folder = pathlib.Path("/usr/share/common-licenses")
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.is_symlink())
    if not files:  # not a Debian
        files = sorted(pathlib.Path(os.__file__).parent.glob("[a-d]*.py"))
    data = b"\n".join(f.read_bytes() for f in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def attention_of(kind):
    if kind == "ours":
        return ot.sdpa()
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


class Training:
    """One model on its way: step() gives the loss. The same seed gives the same weights and the same bytes."""

    def __init__(self, text, kind):
        torch.manual_seed(SEED)
        self.text, self.kind, self.steps = text, kind, 0
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self.generator = torch.Generator().manual_seed(SEED)

    def step(self, tokens):
        begin = int(torch.randint(len(self.text) - tokens, (1,), generator=self.generator))
        window = self.text[None, begin : begin + tokens + 1]
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, self.steps / 20)
        self.optimizer.zero_grad()
        with attention_of(self.kind):
            logits = self.model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[0, 1:])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def status(name):
    """A line of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))


def measure(kind, tokens, steps):
    """Peak memory of training steps beyond what is resident before, and the median of their times."""
    training = Training(read_text(), kind)
    training.step(64)  # libraries, threads, the optimizer's state
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = status("VmRSS")
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        training.step(tokens)
        seconds.append(time.perf_counter() - start)
    return {"kind": kind, "extra_bytes": status("VmHWM") - before, "seconds": statistics.median(seconds)}


def measured_apart(kind, tokens, steps, threads):
    command = [sys.executable, __file__, "--measure", kind, "--long-tokens", str(tokens), "--long-steps", str(steps),
               "--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def draw(path, losses, rows, args, worst):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, memory, times) = pyplot.subplots(1, 3, figsize=(13, 4), width_ratios=(3, 1, 1))
    curves.plot(losses[KINDS[1]], label=KINDS[1], linewidth=3, color="C1", alpha=0.5)
    curves.plot(losses[KINDS[0]], label=KINDS[0], linewidth=1, color="C0")
    curves.set(xlabel="step", ylabel="loss (nats a byte)", title=f"{args.tokens} tokens: largest difference {worst:.1e}")
    curves.legend()
    for axis, key, scale, label in ((memory, "extra_bytes", 2**20, "peak memory, MiB"), (times, "seconds", 1, "seconds a step")):
        bars = axis.bar([row["kind"] for row in rows], [row[key] / scale for row in rows], color=["C0", "C1"])
        axis.bar_label(bars, fmt="%.4g")
        axis.margins(y=0.1)
        axis.set(title=f"{args.long_tokens} tokens", ylabel=label)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--long-steps", type=int, default=3)
    parser.add_argument("--long-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and ours (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="8 steps of 256 tokens, then 1 of 2048: does it run?")
    parser.add_argument("--part", choices=("losses", "memory"), help="only this part")
    parser.add_argument("--plot", default="train_long_context.png")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.tokens, args.long_steps, args.long_tokens = 8, 256, 1, 2048
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    if args.measure:
        print(json.dumps(measure(args.measure, args.long_tokens, args.long_steps)))
        return 0

    text = read_text()
    parameters = sum(p.numel() for p in Model().parameters())
    print(f"text: {len(text)} bytes; model: {LAYERS} layers, dim {DIM}, {HEADS} heads of {DIM // HEADS}, {parameters} parameters; "
          f"AdamW, learning rate {LEARNING_RATE}, seed {SEED}, batch 1; {args.threads} threads")
    good, worst, losses, rows = True, 0.0, {}, []
    if args.part != "memory":
        for kind in KINDS:
            training = Training(text, kind)
            losses[kind] = [training.step(args.tokens) for _ in tqdm(range(args.steps), desc=f"{kind}, {args.tokens} tokens")]
        differences = [abs(a - b) for a, b in zip(*losses.values())]
        worst = max(differences)
        print(f"{args.steps} steps of {args.tokens} tokens: loss {losses['ours'][0]:.4f} -> {losses['ours'][-1]:.4f}; "
              f"largest difference {worst:.2e} at step {differences.index(worst) + 1} (at most {LARGEST_DIFFERENCE:g})")
        good = worst <= LARGEST_DIFFERENCE
    if args.part != "losses":
        for kind in tqdm(KINDS, desc=f"{args.long_tokens} tokens, {args.long_steps} steps"):
            rows.append(measured_apart(kind, args.long_tokens, args.long_steps, args.threads))
        for row in rows:
            print(f"{row['kind']:>10}: {row['extra_bytes'] / 2**20:7.0f} MiB extra at the peak, {row['seconds']:.2f} s a step")
        share = rows[0]["extra_bytes"] / rows[1]["extra_bytes"]
        # What is not attention grows with the tokens, the score matrix with their square.
        bound = LARGEST_SHARE if args.long_tokens >= 8192 else 1.0
        print(f"memory: {share:.3f} of the standard form's (at most {bound:g}); "
              f"time: {rows[1]['seconds'] / rows[0]['seconds']:.2f} times as fast")
        good = good and share <= bound
    if losses and rows:
        draw(args.plot, losses, rows, args, worst)
        print(f"drawn: {args.plot}")
    if not good:
        print("one of the bounds is broken", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
