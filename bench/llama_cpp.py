#!/usr/bin/env python3
"""opst beside llama.cpp: the same GGUF file, the same threads, caches of 16 bits, in turns.

    bench/llama_cpp.py --model model.gguf --llama-bench build/bin/llama-bench [--opst build/release/tools/opst/opst]

llama-bench is built by the user; from its Python package (needs cmake, ninja and a C++ compiler):
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-bench
g++ 12 on a processor with AMX needs a patch first: its _tile_loadconfig passes 8 of 64 bytes.

Cells: prefill of a prompt, and decoding behind so many keys; for each number of threads. A round measures every cell
once with each contender; llama.cpp with flash attention off and on, of which the better one counts. Reported: the
medians of the rounds, their range, and the median of the rounds' ratios.

With --first-token: seconds from the start of `opst generate` to its first text, a prompt of 32 tokens, one thread.
With --memory: the peak memory of `opst generate` beyond the file and the KV cache, after few and after many tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def fail(message):
    sys.exit(f"llama_cpp.py: {message}")


def run(command, prefix=()):
    result = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        fail(f"{' '.join(command)} failed ({result.returncode}):\n{result.stderr[-2000:]}")
    return result.stdout


class Opst:
    name = "opst"

    def __init__(self, options):
        self.options = options

    def measure(self, kind, tokens, threads):
        lengths = ["--prompt-tokens", str(tokens if kind == "prefill" else 1)]
        lengths += ["--context", str(tokens if kind == "decode" else 1)]
        command = [self.options.opst, "bench", "model", "-m", self.options.model, *lengths]
        command += ["--threads", str(threads), "--kv-dtype", self.options.kv_dtype, "--json"]
        command += ["--activations", self.options.activations]
        rows = json.loads(run(command, self.options.prefix))["rows"]
        return next(row["tokens_per_s"] for row in rows if row["test"] == kind and row["tokens"] == tokens)


class LlamaCpp:
    def __init__(self, options, flash):
        self.options = options
        self.flash = flash
        self.name = f"llama.cpp, flash {'on' if flash else 'off'}"

    def measure(self, kind, tokens, threads):
        work = ["-p", str(tokens), "-n", "0"] if kind == "prefill" else ["-p", "0", "-n", "16", "-d", str(tokens)]
        command = [self.options.llama_bench, "-m", self.options.model, *work, "-t", str(threads), "-r", "3"]
        command += ["-fa", str(int(self.flash)), "-ctk", "f16", "-ctv", "f16", "-ngl", "0", "-o", "json"]
        return json.loads(run(command, self.options.prefix))[0]["avg_ts"]


def compare(options):
    cells = [("prefill", n, t) for t in options.threads for n in options.prompt_tokens]
    cells += [("decode", n, t) for t in options.threads for n in options.context]
    contenders = [Opst(options), LlamaCpp(options, False), LlamaCpp(options, True)]
    rates = {(cell, c.name): [] for cell in cells for c in contenders}
    for number in range(options.rounds):
        for cell in cells:
            # Nobody is always first.
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                rates[cell, contender.name].append(contender.measure(*cell))
                if options.verbose:
                    rate = rates[cell, contender.name][-1]
                    print(f"round {number + 1} {cell} {contender.name}: {rate:.1f}", flush=True)
    print(f"{'':8} {'tokens':>6} {'threads':>7}  {'opst':>22}  {'llama.cpp, the better':>28}  flash  ratio")
    for cell in cells:
        ours = rates[cell, contenders[0].name]
        better = max(contenders[1:], key=lambda c: statistics.median(rates[cell, c.name]))
        theirs = rates[cell, better.name]
        # Its best form of each round.
        best = [max(pair) for pair in zip(*(rates[cell, c.name] for c in contenders[1:]))]
        ratio = statistics.median(a / b for a, b in zip(ours, best))

        def text(values):
            return f"{statistics.median(values):8.1f} ({min(values):.1f} to {max(values):.1f})"

        flash = "on" if better.flash else "off"
        print(f"{cell[0]:8} {cell[1]:6} {cell[2]:7}  {text(ours):>22}  {text(theirs):>28}  {flash:>5}  {ratio:.2f}")


def generate(options, *arguments):
    command = [options.opst, "generate", "-m", options.model, "--threads", str(options.threads[0]), "--greedy"]
    return [*command, "--kv-dtype", options.kv_dtype, *arguments]


def prompt_of(options, tokens):
    """A text of so many tokens."""
    for words in range(1, 4 * tokens):
        text = " ".join(["word"] * words)
        used = json.loads(run(generate(options, "-p", text, "-n", "1", "--json")))["prompt_tokens"]
        if used == tokens:
            return text
    return fail(f"no text of {tokens} tokens was found")


def first_token(options):
    text = prompt_of(options, 32)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        with subprocess.Popen(generate(options, "-p", text, "-n", "1"), stdout=subprocess.PIPE) as process:
            process.stdout.read(1)
            seconds.append(time.perf_counter() - start)
            process.stdout.read()
        if process.returncode != 0:
            fail("opst generate failed")
    best, middle, worst = min(seconds), statistics.median(seconds), max(seconds)
    print(f"first token of 32: best {best:.3f} s, median {middle:.3f} s, worst {worst:.3f} s")


def memory(options):
    file_bytes = os.path.getsize(options.model)
    context = max(options.memory) + 64
    for tokens in options.memory:
        arguments = ["-p", "Once upon a time", "-n", str(tokens), "--context", str(context), "--ignore-eos", "--json"]
        result = json.loads(run(generate(options, *arguments)))
        peak, cache = result["peak_rss_bytes"], result["kv_cache_bytes"]
        # Of the cache only what was written is in memory.
        written = cache * min(1.0, len(result["tokens"]) / context)
        print(f"{len(result['tokens'])} tokens: peak {peak / 1e6:.1f} MB, file {file_bytes / 1e6:.1f} MB, KV cache "
              f"{cache / 1e6:.1f} MB ({written / 1e6:.1f} written): beyond file and cache "
              f"{(peak - file_bytes - cache) / 1e6:.1f} MB, beyond file and what is written "
              f"{(peak - file_bytes - written) / 1e6:.1f} MB")


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama-bench", help="without it only --first-token and --memory are measured")
    parser.add_argument("--opst", default="build/release/tools/opst/opst")
    parser.add_argument("--prompt-tokens", type=numbers, default=[512])
    parser.add_argument("--context", type=numbers, default=[128, 2048])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-token", action="store_true")
    parser.add_argument("--memory", type=numbers, nargs="?", const=[16, 500, 8000])
    parser.add_argument("--prefix", type=str.split, default=[], help="a command before each measurement")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.llama_bench:
        compare(options)
    if options.first_token:
        first_token(options)
    if options.memory:
        memory(options)


if __name__ == "__main__":
    main()
