"""Calls in turns, and what may be said about the ratio of their times."""

import gc
import math
import statistics
import time

_SHORT_CALL = 0.05  # below it each turn starts with a call that is not timed, so that inputs are in the caches
_BURST = 0.001  # calls of one turn take at least so long together
# On several threads, before each turn: so long do threads of the library before spin (ONNX Runtime's for 20 to 40 ms),
_REST = 0.05
# and so long are calls not timed, until this library's threads are awake and on cores of their own.
_AWAKE = 0.02


def time_in_turns(calls, pairs, seconds, threads):
    """{name: Call} -> {name: [seconds of one call, round by round]}. Ends after `pairs` rounds, or after `seconds` once
    there were 5."""
    bursts = {name: _Turn(call, threads) for name, call in calls.items()}
    times = {name: [] for name in calls}
    names = list(calls)
    start = time.perf_counter()
    for done in range(pairs):
        turn = done % len(names)  # nobody is always first
        for name in names[turn:] + names[:turn]:
            times[name].append(bursts[name].seconds())
        if done >= 4 and time.perf_counter() - start > seconds:
            break
    return times


class _Turn:
    def __init__(self, call, threads):
        self.call = call
        self.rest = _REST if threads > 1 else 0
        with call.chosen():
            call.run()
            once = min(self._timed(1) for _ in range(2))
        self.warm_ups = 0 if once > _SHORT_CALL else math.ceil(_AWAKE / once) if threads > 1 else 1
        self.burst = max(1, math.ceil(_BURST / once))

    def _timed(self, burst):
        run = self.call.run
        start = time.perf_counter()
        for _ in range(burst):
            run()
        return (time.perf_counter() - start) / burst

    def seconds(self):
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.call.chosen():
                time.sleep(self.rest)
                for _ in range(self.warm_ups):
                    self.call.run()
                return self._timed(self.burst)
        finally:
            if collects:
                gc.enable()


def interval(values):
    """The median, and the order statistics around it that hold it in at least 95 of 100 cases (fewer than 6 values: all)."""
    values, n = sorted(values), len(values)
    # Both ends one further in as long as the true median lies outside of them in at most 5 of 100 cases.
    out, outside = 0, 0.0
    while out < (n - 1) // 2:
        outside += math.comb(n, out) / 2 ** (n - 1)
        if outside > 0.05:
            break
        out += 1
    low = max(out - 1, 0)
    return {"median": statistics.median(values), "low": values[low], "high": values[n - 1 - low]}


def verdict(ratio, least=1.0):
    """Whether a peer's time over ours is above `least`: only where the whole interval is."""
    return "won" if ratio["low"] > least else "lost" if ratio["high"] < least else "tie"
