"""Peak memory of one call, in a process that does nothing else."""

import json
import subprocess
import sys

_MEASURE = "import sys; from peers import memory; memory.report_growth(sys.argv[1], sys.argv[2])"
_WARM_UP_LEN = 64


def growth(case, peer_name, folder, seconds=300):
    """Bytes by which the resident memory grows at most during one call, its outputs included; None: no such call."""
    command = [sys.executable, "-c", _MEASURE, str(case), peer_name]
    try:
        child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(child.stdout.splitlines()[-1]) if child.returncode == 0 and child.stdout else None


def report_growth(text, peer_name):
    """In the child: prints what `growth` returns."""
    from . import adapters, cases

    case = cases.parse(text)
    peer = next(p for p in (adapters.OURS, *adapters.PEERS) if p.name == peer_name)
    # What a library sets up at its first call is not the call's.
    small = case._replace(query_len=min(case.query_len, _WARM_UP_LEN), kv_len=min(case.kv_len, _WARM_UP_LEN))
    adapters.prepare(peer, small, adapters.make_inputs(small))
    call = peer.prepare(case, adapters.make_inputs(case))
    if call is None:
        print("null")
        return
    with call.chosen():
        _forget_peak()
        before = _status("VmRSS")
        value = call.run()
        peak = _status("VmHWM")
    del value
    print(json.dumps(peak - before))


def _forget_peak():
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _status(name):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
