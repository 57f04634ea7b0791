#!/usr/bin/env python3
"""The fuzz target of the Python package: calls every public function that takes arrays with arguments out of a seed.

    python python/fuzz/operators.py --seconds 60               # or --calls 1000; --seed 7: the first call's
    python python/fuzz/operators.py --seed 12345 --calls 1     # one call again (with its --no-torch and --only); --show prints it

Call number n has the seed `--seed` + n. judge.py says what a call must keep. The first broken promise is printed with its
seed and its call, and ends the program with 1; so do a crash and a call of more than --timeout seconds.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import os
import pathlib
import resource
import shlex
import signal
import struct
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

_FOUND = 3  # the child's exit code after a broken promise; a hang ends it with 1


def limit_memory(more_bytes: int) -> None:
    """At most so much address space more, so that results of extreme sizes are MemoryError at once. Sanitizers map
    terabytes of their own and have limits of their own."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return
    with open("/proc/self/statm") as pages:
        now = int(pages.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def draw_call(seed: int, only: str = "", with_torch: bool = False):
    """(the case's name, its Call) of a seed."""
    import attention_cases  # noqa: F401  their cases are entered as they are imported
    import moe_cases  # noqa: F401
    from cases import CASES
    from draws import Draw

    draw = Draw(seed, with_torch)
    draw.with_torch = with_torch and draw.rarely(3)
    names = [name for name in sorted(CASES) if only in name]
    name = draw.pick(names)
    return name.rstrip("_"), CASES[name](draw)


def again(options: argparse.Namespace, seed: int) -> str:
    """The options that draw the call of a seed once more. Which case is drawn depends on --only, which arrays on torch."""
    only = f" --only {shlex.quote(options.only)}" if options.only else ""
    return f"--seed {seed} --calls 1{' --no-torch' if options.no_torch else ''}{only} --show repeats it"


def run(options: argparse.Namespace, seed_now: mmap.mmap) -> int:
    import faulthandler

    import hostile
    from judge import BrokenPromise, judge

    with_torch = not options.no_torch and hostile.load_torch()
    if with_torch:
        import ops_transformer.torch  # noqa: F401  what it imports needs address space
    warnings.simplefilter("ignore")
    faulthandler.enable()
    limit_memory(2 << 30)
    counts, refused = collections.Counter(), collections.Counter()
    start, calls, found = time.monotonic(), 0, 0
    while (options.calls is None or calls < options.calls) and (options.seconds is None or time.monotonic() - start < options.seconds):
        seed = options.seed + calls
        calls += 1
        seed_now[:8] = struct.pack("<q", seed)
        faulthandler.dump_traceback_later(options.timeout, exit=True)
        name, call = draw_call(seed, options.only, with_torch)
        if options.show:
            print(f"seed {seed}: {call.shown()}", flush=True)
        try:
            verdict = judge(call)
        except BrokenPromise as promise:
            found += 1
            print(f"seed {seed}: broken promise: {promise}\n{call.shown()}\n{again(options, seed)}", flush=True)
            if not options.go_on:
                break
            continue
        if options.show:
            print(verdict)
        counts[name] += 1
        refused[name] += verdict == "refused"
    faulthandler.cancel_dump_traceback_later()
    if not options.quiet:
        for name in sorted(counts):
            print(f"{name:32} {counts[name]:8} calls {refused[name]:8} refused {counts[name] - refused[name]:8} accepted")
    total = sum(counts.values())
    print(f"seeds {options.seed} to {options.seed + calls - 1}: {calls} calls in {time.monotonic() - start:.1f} s"
          f"{', torch tensors too' if with_torch else ''}: {total - sum(refused.values())} accepted, {sum(refused.values())} refused, "
          f"{found} broken promises")
    return _FOUND if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, help="how many (default: until --seconds)")
    parser.add_argument("--seconds", type=float, help="for how long (default: until --calls, 60 without either)")
    parser.add_argument("--seed", type=int, help="of the first call (default: of the clock)")
    parser.add_argument("--only", default="", help="only cases with this in their names")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a call may take")
    parser.add_argument("--no-torch", action="store_true", help="no torch tensors, also where torch is installed")
    parser.add_argument("--go-on", action="store_true", help="do not end with the first broken promise")
    parser.add_argument("--show", action="store_true", help="print each call")
    parser.add_argument("--quiet", action="store_true", help="no line for each function")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = time.time_ns() // 1000 % 2**40
    if options.calls is None and options.seconds is None:
        options.seconds = 60.0
    # In a child, so that a crash or a hang has a seed.
    seed_now = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        sys.exit(run(options, seed_now))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (0, _FOUND):
        return 1 if status else 0
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    seed = struct.unpack("<q", seed_now[:])[0]
    print(f"the call of seed {seed} ended the process with {how}: {again(options, seed)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
