#!/usr/bin/env python3
"""Attention, and layers of mixtures of experts, beside other libraries: the same inputs, equal threads, calls in turns, every output compared with float64.

    bench/compare.py                                                  a short selection
    bench/compare.py --groups short,long --threads 2 --json out.json  adds to what the file holds
    bench/compare.py --cases "bf16 causal 1x32/8x2048x128"
    bench/compare.py --groups length --memory --json out.json         peak memory instead of time
    bench/compare.py --report out.json more.json --markdown table.md --plots folder

A row is one call (peers/cases.py tells how it is written and which groups there are). The rounds of a row go through all
libraries in turn; shown is a peer's time over ours within the same round: the median of at least 30 and the interval that
holds it in 95 of 100 cases (order statistics). Above 1 ours is faster. A row is won, and a bar met, only where the whole
interval lies above; lost rows are shown like any other.

The process is bound to as many cores as there are threads. Inputs lie in each library's own layout; graphs, plans and page
tables are made before. Peak memory is that of a process for each row and library: by how much its resident memory grows
during one call, outputs included.

Outputs are compared with float64 by the rule of the C++ tests (peers/exact.py); with dropout, beside the weights that the
library's own mask keeps. A library whose output is wrong is named so, and no peer in that row; where it is ours, the exit
code is 1.

Peers, each where it is installed (scripts/requirements-torch.txt, scripts/requirements-peer-*.txt): torch's flash and math
path, torch's compiled flex_attention (in rows of sparse blocks), ONNX Runtime's MultiHeadAttention,
its Attention of opset 23 and its GroupQueryAttention over a cache, ggml, OpenVINO, vLLM's kernels, zentorch, JAX.
In rows of the group moe: a loop over the experts in torch, vLLM's cpu_fused_moe, zentorch's zentorch_fused_moe,
ggml's mul_mat_id.
"""

import argparse
import glob
import os
import platform
import statistics
import sys
import warnings

from peers import cases, memory, mixture_cases, plots, report, timing

FOLDER = os.path.dirname(os.path.abspath(__file__))


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=31, help="rounds of each row (default 31)")
    parser.add_argument("--seconds", type=float, default=60, help="a row ends after so long and 5 rounds (default 60)")
    parser.add_argument("--groups", default="", help="of " + ", ".join(cases.GROUPS))
    parser.add_argument("--cases", default="", help="comma separated")
    parser.add_argument("--peers", default="", help="only those whose name has one of these, comma separated")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--json", help="add all numbers to this file")
    parser.add_argument("--report", nargs="+", metavar="JSON", help="measure nothing: put these files together")
    parser.add_argument("--markdown", help="write the table here")
    parser.add_argument("--plots", help="write the drawings into this folder")
    options = parser.parse_args(words)
    groups = [name for name in options.groups.split(",") if name]
    for name in groups:
        if name not in cases.GROUPS:
            parser.error(f"--groups: {name} is none of {', '.join(cases.GROUPS)}")
    texts = [text for name in groups for text in cases.GROUPS[name]] + [t for t in options.cases.split(",") if t.strip()]
    try:
        options.cases = [cases.parse(text) for text in texts or cases.GROUPS["quick"]]
    except ValueError as error:
        parser.error(f"--cases: {error}")
    if options.memory and any(map(is_mixture, options.cases)):
        parser.error("--memory: is of attention alone")
    return options


def bind_to_cores(threads):
    """As many cores as threads, no two of one core's hardware threads, and limits for every runtime that reads one. Before
    any library is loaded."""
    first_of_core = set()
    for path in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        with open(path, encoding="ascii") as file:
            first_of_core.add(int(file.read().replace("-", ",").split(",")[0]))
    usable = sorted(first_of_core & os.sched_getaffinity(0)) or sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[-threads:])  # the first core has the most interrupts
    os.environ.update(OPST_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads), KMP_BLOCKTIME="1")


def machine(adapters):
    import ops_transformer
    import torch

    versions = {peer.package: version for peer, version in adapters.installed().items()}
    return {"processor": ops_transformer.default_context().machine, "system": platform.platform(),
            "amx": torch.cpu._is_amx_tile_supported(), "torch level": torch.backends.cpu.get_cpu_capability(), **versions}


def is_mixture(case):
    return isinstance(case, mixture_cases.Case)


def contenders(case, wanted):
    """Ours and the installed peers of such a case, of whose names `wanted` has a part."""
    from peers import adapters, mixture

    kind = mixture if is_mixture(case) else adapters
    return [kind.OURS] + [p for p in adapters.installed(kind.PEERS) if not wanted or any(w in p.name.lower() for w in wanted)]


def judge(case, inputs, calls):
    """{peer's name: Verdict} on what each call of {peer: Call} gives. With dropout each beside the weights that it keeps."""
    if is_mixture(case):
        from peers import mixture

        return mixture.judge(case, inputs, {peer.name: call for peer, call in calls.items()})
    import torch
    from peers.calls import SEED
    from peers.exact import PEER_SLACK, Expected, cut

    expected = None if "dropout" in case.words else Expected(case, inputs)
    verdicts = {}
    for peer, call in calls.items():
        of_peer = expected or Expected(case, inputs, peer.kept(case, inputs, cut(case, inputs)[0].heads))
        with call.chosen():
            torch.manual_seed(SEED)
            verdicts[peer.name] = of_peer.judge(call.outputs(call.run()), 1 if peer.name.startswith("ours") else PEER_SLACK)
    return verdicts


def measure(case, chosen, options):
    """Times and errors of one row."""
    from peers import adapters, mixture
    from peers import calls as attention

    inputs = (mixture if is_mixture(case) else attention).make_inputs(case)
    calls, refused = {"ours": adapters.checked(chosen[0], case, inputs)}, {}
    for peer in chosen[1:]:
        call, why = adapters.prepare(peer, case, inputs)
        if call is None:
            refused[peer.name] = why
        else:
            calls[peer.name] = call
    verdicts = judge(case, inputs, {peer: calls[peer.name] for peer in chosen if peer.name in calls})
    row = {"case": str(case), "threads": options.threads, "refused": refused,
           "error": {name: verdict.error for name, verdict in verdicts.items()},
           "wrong": [name for name, verdict in verdicts.items() if not verdict.right]}
    times = timing.time_in_turns(calls, options.pairs, options.seconds, options.threads)
    row["pairs"] = len(times["ours"])
    row["ms"] = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    row["ratio"] = {name: timing.interval([theirs / mine for theirs, mine in zip(values, times["ours"])])
                    for name, values in times.items() if name != "ours"}
    return row


def measure_memory(case, chosen, options):
    grown = {peer.name: memory.growth(case, peer.name, FOLDER) for peer in chosen}
    return {"case": str(case), "threads": options.threads,
            "peak_bytes": {name: peak for name, (peak, _) in grown.items() if peak is not None},
            "memory_refused": {name: why for name, (peak, why) in grown.items() if peak is None}}


def run(options):
    bind_to_cores(options.threads)
    memory.limit()
    try:
        import torch
    except ImportError:
        sys.exit("compare.py: torch is not installed (scripts/requirements-torch.txt)")
    from peers import adapters  # imports torch, which reads what bind_to_cores set

    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="(?!ops_transformer)", module="peers")  # of paths that refuse a call
    wanted = [word.lower() for word in options.peers.split(",") if word]
    result = {"machine": machine(adapters), "commands": [" ".join(["bench/compare.py", *sys.argv[1:]])], "rows": []}
    for case in options.cases:
        row = (measure_memory if options.memory else measure)(case, contenders(case, wanted), options)
        result["rows"].append(row)
        print(" | ".join(cell for cell in report.cells(row, result["machine"]["amx"]) if cell), flush=True)
    if options.json:
        report.write(options.json, result)
    return result


def ours_is_wrong(result):
    """The rows in which what is measured as ours is not what should come out."""
    return [row["case"] for row in result["rows"] if any(name.startswith("ours") for name in row.get("wrong", ()))]


def main(words=None):
    options = arguments(words)
    result = report.merge([report.read(path) for path in options.report]) if options.report else run(options)
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(report.table(result))
    if options.plots:
        os.makedirs(options.plots, exist_ok=True)
        for path in plots.draw(result, options.plots):
            print(path)
    if wrong := ours_is_wrong(result):
        sys.exit("compare.py: our output is wrong: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
