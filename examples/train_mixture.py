#!/usr/bin/env python3
"""Trains a small language model with a mixture of experts twice, with our operators and with a loop over the experts as
people write it in torch, and compares losses and times.

Both start from the same weights and see the same bytes in the same order. Each of 2 layers has 16 experts, of which 4 serve
a token: gating, routing, the experts' products with SwiGLU and the weighted sum are one call of ops_transformer.moe, forward
and backward; the experts are kept busy by the balancing loss of Fedus, Zoph and Shazeer, "Switch
Transformers" (2021), 2.2, through the gradient of the scores.

    pip install . && pip install -r scripts/requirements-examples.txt
    python examples/train_mixture.py

Prints what it finds, draws it (--plot) and exits with 1 where the losses of one step differ by more than 2e-2, or those of
the first 8 by more than 1e-4: beyond, an expert that is chosen by the last bit makes the two models different ones. The text
is what lies in /usr/share/common-licenses of every Debian; a token is a byte.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ops_transformer import moe, set_num_threads

SEED = 1234
LEARNING_RATE = 1e-3  # AdamW, betas 0.9 and 0.95, weight decay 0.1; the first 20 steps rise to it
DIM, LAYERS, HEADS = 128, 2, 2
EXPERTS, TOP_K, WIDTH = 16, 4, 96
BALANCE = 0.01  # weight of the balancing loss
LARGEST_DIFFERENCE, FIRST_STEPS, LARGEST_AT_FIRST = 2e-2, 8, 1e-4
KINDS = ("ours", "torch loop")


class Mixture(torch.nn.Module):
    """Experts with SwiGLU. forward(x [tokens, DIM]) gives (out, balancing loss)."""

    def __init__(self, kind):
        super().__init__()
        self.layer = self.ours if kind == "ours" else self.loop
        self.router = torch.nn.Parameter(torch.randn(EXPERTS, DIM) * DIM**-0.5)
        self.gate_up = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, DIM) * DIM**-0.5)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH) * WIDTH**-0.5)

    def forward(self, x):
        out, counts, scores = self.layer(x)
        share = counts.to(x.dtype) / counts.sum()
        return out, EXPERTS * (share * scores.mean(0)).sum()

    def ours(self, x):
        logits = F.linear(x, self.router)
        layer = moe.moe_layer(x, self.gate_up, self.down, logits, TOP_K, renormalise=True, return_routes=True)
        return layer.out, layer.expert_tokens, logits.softmax(-1)

    def loop(self, x):
        scores = F.linear(x, self.router).softmax(-1)
        weights, ids = scores.topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            tokens, choice = (ids == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], self.gate_up[e]).chunk(2, -1)
            out = out.index_add(0, tokens, weights[tokens, choice, None] * F.linear(F.silu(gate) * up, self.down[e]))
        return out, torch.bincount(ids.flatten(), minlength=EXPERTS), scores


class Block(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm_attention, self.norm_mixture = torch.nn.RMSNorm(DIM), torch.nn.RMSNorm(DIM)
        self.qkv = torch.nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = torch.nn.Linear(DIM, DIM, bias=False)
        self.mixture = Mixture(kind)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        of_experts, balance = self.mixture(self.norm_mixture(x).flatten(0, 1))
        return x + of_experts.view_as(x), balance


class Model(torch.nn.Module):
    def __init__(self, kind, tokens):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, DIM)
        self.positions = torch.nn.Parameter(torch.randn(tokens, DIM) * 0.02)
        self.blocks = torch.nn.ModuleList(Block(kind) for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(DIM)
        self.head = torch.nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens):
        x, balance = self.embedding(tokens) + self.positions, 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        return self.head(self.norm(x)), balance


def read_text():
    folder = pathlib.Path("/usr/share/common-licenses")
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.is_symlink())
    if not files:  # not a Debian
        files = sorted(pathlib.Path(os.__file__).parent.glob("[a-d]*.py"))
    data = b"\n".join(f.read_bytes() for f in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Training:
    """One model on its way: step() gives (loss, seconds). The same seed gives the same weights and the same bytes."""

    def __init__(self, text, kind, tokens):
        torch.manual_seed(SEED)
        self.text, self.tokens, self.steps = text, tokens, 0
        self.model = Model(kind, tokens)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self.generator = torch.Generator().manual_seed(SEED)

    def step(self):
        begin = int(torch.randint(len(self.text) - self.tokens, (1,), generator=self.generator))
        window = self.text[None, begin : begin + self.tokens + 1]
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, self.steps / 20)
        self.optimizer.zero_grad()
        start = time.perf_counter()
        logits, balance = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[0, 1:])
        (loss + BALANCE * balance).backward()
        seconds = time.perf_counter() - start
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), seconds


def draw(path, losses, seconds, args, worst):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, times) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 1))
    curves.plot(losses[KINDS[1]], label=KINDS[1], linewidth=3, color="C1", alpha=0.5)
    curves.plot(losses[KINDS[0]], label=KINDS[0], linewidth=1, color="C0")
    curves.set(xlabel="step", ylabel="loss (nats a byte)", title=f"{args.tokens} tokens: largest difference {worst:.1e}")
    curves.legend()
    bars = times.bar(KINDS, [1e3 * seconds[kind] for kind in KINDS], color=["C0", "C1"])
    times.bar_label(bars, fmt="%.4g")
    times.set(title="forward and backward", ylabel="ms a step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and ours (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="8 steps of 128 tokens: does it run?")
    parser.add_argument("--plot", default="train_mixture.png")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.tokens = 8, 128
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)

    text = read_text()
    parameters = sum(p.numel() for p in Model(KINDS[0], args.tokens).parameters())
    print(f"text: {len(text)} bytes; model: {LAYERS} layers, dim {DIM}, {TOP_K} of {EXPERTS} experts of width {WIDTH}, {parameters} "
          f"parameters; AdamW, learning rate {LEARNING_RATE}, seed {SEED}, batch 1; {args.threads} threads")
    losses, seconds = {}, {}
    for kind in KINDS:
        training = Training(text, kind, args.tokens)
        steps = [training.step() for _ in tqdm(range(args.steps), desc=f"{kind}, {args.tokens} tokens")]
        losses[kind] = [loss for loss, _ in steps]
        seconds[kind] = statistics.median(time for _, time in steps)
    differences = [abs(a - b) for a, b in zip(*losses.values())]
    worst, at_first = max(differences), max(differences[:FIRST_STEPS])
    print(f"{args.steps} steps of {args.tokens} tokens: loss {losses['ours'][0]:.4f} -> {losses['ours'][-1]:.4f}; "
          f"largest difference {worst:.2e} at step {differences.index(worst) + 1} (at most {LARGEST_DIFFERENCE:g}), "
          f"{at_first:.2e} in the first {FIRST_STEPS} (at most {LARGEST_AT_FIRST:g})")
    print(f"forward and backward: {1e3 * seconds['ours']:.1f} ms a step, {seconds[KINDS[1]] / seconds['ours']:.2f} times as fast as the loop")
    draw(args.plot, losses, seconds, args, worst)
    print(f"drawn: {args.plot}")
    if worst <= LARGEST_DIFFERENCE and at_first <= LARGEST_AT_FIRST:
        return 0
    print("one of the bounds is broken", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
