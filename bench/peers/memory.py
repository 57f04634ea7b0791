"""Peak memory of one call, in a process that does nothing else; and a limit, so that a call that needs too much fails."""

import json
import resource
import subprocess
import sys

_MEASURE = "import sys; from peers import memory; memory.report_growth(sys.argv[1], sys.argv[2])"
_WARM_UP_LEN = 64


def limit():
    """From here on this process gets at most half of the memory that is free now: a library whose scores do not fit is
    refused them, and its line ends there."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + free // 2, hard))


def growth(case, peer_name, folder, seconds=300):
    """(bytes, ""): by how much resident memory grows at most during one call, its outputs included; or (None, why not)."""
    command = [sys.executable, "-c", _MEASURE, str(case), peer_name]
    try:
        child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None, f"took more than {seconds} s"
    if child.returncode != 0:
        return None, (child.stderr.strip().splitlines() or [f"ended by signal {-child.returncode}"])[-1][:200]
    return json.loads(child.stdout.splitlines()[-1])


def report_growth(text, peer_name):
    """In the child: prints what `growth` returns."""
    from . import adapters, calls, cases

    limit()
    case = cases.parse(text)
    peer = next(p for p in (adapters.OURS, *adapters.PEERS) if p.name == peer_name)
    # What a library sets up at its first call is not the call's.
    small = case._replace(query_len=min(case.query_len, _WARM_UP_LEN), kv_len=min(case.kv_len, _WARM_UP_LEN))
    adapters.prepare(peer, small, calls.make_inputs(small))
    try:
        call = adapters.checked(peer, case, calls.make_inputs(case))
    except adapters.NoSuchCall as refusal:
        print(json.dumps((None, str(refusal))))
        return
    with call.chosen():
        _forget_peak()
        before = _status("VmRSS")
        _value = call.run()  # its outputs live until the peak is read
        peak = _status("VmHWM")
    print(json.dumps((peak - before, "")))


def _forget_peak():
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _status(name):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
