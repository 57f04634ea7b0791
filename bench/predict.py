#!/usr/bin/env python3
"""Predicted beside measured time over a grid of 60 attention and matmul shapes, and how the costs of the time model are fitted.

    bench/predict.py --opst build/release/tools/opst/opst --threads 1            the grid, and its errors
    bench/predict.py --opst build/release/tools/opst/opst --threads 1 --fit      other shapes, and costs fitted to them

Every row is one of `opst bench attention|matmul --predict`, whose prediction comes from rates that the machine shows beside the
call (tools/opst/time_model.h). --fit prints what the constants of tools/opst/time_model.cc would be: for each kind of call the
non-negative multiples of its units' times with the least sum of squared relative errors. Its shapes are none of the grid's.
"""

import argparse
import json
import subprocess

GOAL = 0.15
DTYPES = ("f32", "bf16")
# Options of opst bench attention; each length is a row.
GRID = ["--heads 8 --head-dim 64 --seq 256,1024,4096", "--heads 8 --head-dim 64 --causal --seq 256,1024,4096",
        "--heads 4 --head-dim 128 --seq 512,2048", "--heads 4 --head-dim 128 --causal --seq 512,2048",
        "--heads 8 --kv-heads 2 --head-dim 128 --causal --seq 1024", "--batch 4 --heads 4 --head-dim 64 --causal --seq 512",
        "--heads 4 --head-dim 96 --causal --seq 1536", "--heads 8 --head-dim 32 --seq 1024",
        "--heads 4 --head-dim 128 --query-len 256 --causal --seq 4096", "--heads 8 --head-dim 128 --query-len 1 --seq 4096,32768",
        "--heads 32 --kv-heads 8 --head-dim 128 --query-len 1 --seq 8192"]
PRODUCTS = ["--m 1,4,16,64,256,1024 --n 1024,4096 --k 2048"]
FIT_GRID = ["--heads 6 --head-dim 64 --seq 384,768,1536,3072", "--heads 6 --head-dim 64 --causal --seq 384,768,1536,3072",
            "--heads 3 --head-dim 128 --seq 320,1280,2560", "--heads 3 --head-dim 128 --causal --seq 320,1280,2560",
            "--heads 12 --kv-heads 4 --head-dim 128 --causal --seq 640", "--batch 3 --heads 6 --head-dim 80 --causal --seq 448",
            "--heads 6 --head-dim 48 --seq 896", "--heads 6 --head-dim 96 --query-len 384 --causal --seq 3072",
            "--heads 6 --head-dim 128 --query-len 1 --seq 3072,12288,24576", "--heads 12 --head-dim 64 --query-len 1 --seq 6144,16384",
            "--heads 24 --kv-heads 4 --head-dim 128 --query-len 1 --seq 5120"]
FIT_PRODUCTS = ["--m 1,2,3,6,8,12,24,48,96,192,384,768 --n 1536,3072 --k 1024", "--m 1,5,20,40,128,512 --n 2048 --k 3072"]
UNITS = ("matrix", "vector", "keys", "rows", "start")


def rows_of(opst, operator, options, dtype, threads):
    words = [opst, "bench", operator, "--predict", "--json", "--dtype", dtype, *options.split()]
    if operator == "attention":
        words += ["--memory-limit", "1"]  # neither the naive nor the standard form
    if threads:
        words += ["-t", str(threads)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(words)}: {result.stderr}")
    for row in json.loads(result.stdout)["rows"]:
        if operator == "attention":
            name = f"{options.split(' --seq')[0]} --seq {row['kv_len']}"
            yield {"name": f"attention {dtype} {name}", "measured": row["flash_ms"], **predicted(row)}
        else:
            name = f"matmul {dtype} {row['m']} x {row['n']} x {row['k']}"
            yield {"name": name, "measured": row["ms"], **predicted(row)}


def predicted(row):
    return {"predicted": row["predicted_ms"], "units": row["predicted_units_ms"], "kind": row["predicted_kind"]}


def measure(opst, attention, products, threads):
    rows = []
    for operator, grid in (("attention", attention), ("matmul", products)):
        for options in grid:
            for dtype in DTYPES:
                rows += rows_of(opst, operator, options, dtype, threads)
    return rows


def fit(rows):
    """{kind: {unit: cost}}: non-negative least squares of sum over units (cost * unit / measured) = 1, by coordinate descent."""
    fitted = {}
    for kind in sorted({row["kind"] for row in rows}):
        shares = [[row["units"][unit] / row["measured"] for unit in UNITS] for row in rows if row["kind"] == kind]
        costs = [1.0] * len(UNITS)
        for _ in range(20000):
            for u in range(len(UNITS)):
                square = sum(s[u] * s[u] for s in shares)
                rest = sum(s[u] * (1 - sum(c * x for c, x in zip(costs, s)) + costs[u] * s[u]) for s in shares)
                costs[u] = max(0.0, rest / square) if square > 0 else 0.0
        fitted[kind] = dict(zip(UNITS, costs))
    return fitted


def errors(rows, costs=None):
    """|predicted / measured - 1|; with `costs`, of what they would predict."""
    found = []
    for row in rows:
        guess = sum(costs[row["kind"]][u] * row["units"][u] for u in UNITS) if costs else row["predicted"]
        found.append(abs(guess / row["measured"] - 1))
    return found


def summary(values):
    ordered = sorted(values)
    pick = lambda part: ordered[min(len(ordered) - 1, int(part * len(ordered)))]
    inside = sum(v <= GOAL for v in values)
    return (f"{len(values)} shapes: {inside} within {GOAL:.0%}; error mean {sum(values) / len(values):.1%}, median {pick(0.5):.1%}, "
            f"p90 {pick(0.9):.1%}, largest {ordered[-1]:.1%}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opst", required=True, help="the program")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: the program's)")
    parser.add_argument("--fit", action="store_true", help="measure other shapes and print costs fitted to them")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--rows", nargs="*", help="with --fit: files that --json wrote, in place of measuring")
    options = parser.parse_args(arguments)
    if options.rows:
        rows = [row for path in options.rows for row in json.load(open(path, encoding="utf-8"))]
    else:
        grid = (FIT_GRID, FIT_PRODUCTS) if options.fit else (GRID, PRODUCTS)
        rows = measure(options.opst, *grid, options.threads)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    for row in rows:
        print(f"{row['name']:75s} {row['measured']:10.3f} ms  predicted {row['predicted']:10.3f}  {row['predicted'] / row['measured'] - 1:+7.1%}")
    for operator in ("attention", "matmul", ""):
        print(f"{operator or 'all':10s}{summary(errors([row for row in rows if row['name'].startswith(operator)]))}")
    if options.fit:
        costs = fit(rows)
        for kind, units in costs.items():
            print(f"{kind:20s}" + ", ".join(f"{unit} {cost:.3f}" for unit, cost in units.items()))
        print("with these:", summary(errors(rows, costs)))
        for kind in costs:
            print(f"  {kind:20s}", summary(errors([row for row in rows if row["kind"] == kind], costs)))


if __name__ == "__main__":
    main()
