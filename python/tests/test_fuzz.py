"""The fuzz target of the package (python/fuzz): some of its calls, and that its oracle says no to each planted fault."""

import functools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from ops_transformer.rowwise import rms_norm

FUZZ = pathlib.Path(__file__).resolve().parents[1] / "fuzz"
sys.path.insert(0, str(FUZZ))

from draws import Draw  # noqa: E402
from judge import GENERIC, ONE, BrokenPromise, Call, judge  # noqa: E402
from operators import draw_call  # noqa: E402


def test_calls_out_of_a_seed_keep_their_promises():
    seed = 1000003  # a fixed one: a test says the same of the same tree; ./x fuzz draws new calls, by the clock
    command = [sys.executable, str(FUZZ / "operators.py"), "--calls", "1000", "--seed", str(seed), "--no-torch", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(f"seed {seed}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_call_is_drawn_again_by_its_seed():
    def shown(*options):
        return subprocess.run([sys.executable, str(FUZZ / "operators.py"), "--show", "--no-torch", *options], capture_output=True,
                              text=True, check=True).stdout

    calls = shown("--seed", "100", "--calls", "3")
    assert calls.count("seed 102: ") == 1
    alone = shown("--seed", "102", "--calls", "1")
    assert alone.splitlines()[:4] == calls[calls.index("seed 102: "):].splitlines()[:4]


def contiguous(draw, *arguments, **options):
    while True:
        operand = draw.array(*arguments, **options)
        if operand.view.flags.c_contiguous:
            return operand


def usual_call(function, out=False):
    draw = Draw(5)
    draw.wildness = 1e9
    arguments = {"x": contiguous(draw, "f32", (3, 8)), "weight": contiguous(draw, "f32", (8,))}
    if out:
        arguments["out"] = contiguous(draw, "f32", (3, 8), written=True)
    return Call(functools.wraps(rms_norm)(function), arguments)


def writes_and_refuses(x, weight, context):
    x.reshape(-1).view(np.uint8)[0] ^= 1
    raise ValueError("rms_norm: x is refused")


def writes_out_and_refuses(x, weight, context, out):
    out[0, 0] = 1
    raise ValueError("rms_norm: x is refused")


def writes_an_input(x, weight, context):
    weight[0] += 1
    return rms_norm(x, weight, context=context)


def writes_beside_out(x, weight, context, out):
    result = rms_norm(x, weight, out=out, context=context)
    np.lib.stride_tricks.as_strided(out, (out.size + 1,), (4,))[-1] += 1
    return result


def gives_wrong_values(x, weight, context):
    return rms_norm(x, weight, context=context) * (1 if context is GENERIC else 1.01)


def gives_other_bits_on_one_thread(x, weight, context):
    return rms_norm(x, weight, context=context) * np.float32(1.000001 if context is ONE else 1)


def gives_other_zeros_on_one_thread(x, weight, context):
    return np.full_like(x, -0.0 if context is ONE else 0.0)


def gives_an_input(x, weight, context):
    return x


def refuses_copies(x, weight, context):
    if context is GENERIC:
        raise ValueError("rms_norm: x is refused")
    return rms_norm(x, weight, context=context)


def raising(error):
    def function(x, weight, context):
        raise error

    return function


@pytest.mark.parametrize("function, out, promise", [
    (writes_and_refuses, False, "a refused call wrote 1 bytes of x"),
    (writes_out_and_refuses, True, "bytes of out"),
    (writes_an_input, False, "of an input, weight"),
    (writes_beside_out, True, "beside the elements of an output, out"),
    (gives_wrong_values, False, "contiguous copies at the generic level"),
    (gives_other_bits_on_one_thread, False, "the same bits on one thread"),
    (gives_other_zeros_on_one_thread, False, r"the same bits on one thread: result 0: element \[0, 0\] is 0 and -0"),
    (gives_an_input, False, "memory of the input x"),
    (refuses_copies, False, "copies are refused"),
    (raising(AttributeError("rms_norm: x has none")), False, "ended as AttributeError"),
    (raising(KeyError("rms_norm")), False, "ended as KeyError"),
    (raising(AssertionError("rms_norm")), False, "ended as AssertionError"),
    (raising(SystemError("rms_norm")), False, "ended as SystemError"),
    (raising(UnicodeDecodeError("utf-8", b"x", 0, 1, "rms_norm")), False, "ended as UnicodeDecodeError"),
    (raising(ValueError("")), False, "says nothing"),
    (raising(ValueError("x is refused")), False, "not of rms_norm"),
    (raising(TypeError("rms_norm: incompatible function arguments")), False, "speaks of the inside"),
], ids=lambda value: getattr(value, "__name__", None))
def test_the_oracle_says_no(function, out, promise):
    with pytest.raises(BrokenPromise, match=promise):
        judge(usual_call(function, out))


def test_the_oracle_says_yes_to_what_is_right():
    def right(x, weight, context, out=None):
        return rms_norm(x, weight, out=out, context=context)

    assert judge(usual_call(right)) == "accepted"
    assert judge(usual_call(right, out=True)) == "accepted"
    assert judge(usual_call(raising(ValueError("rms_norm: x is refused")))) == "refused"


def test_a_call_that_hangs_is_named_with_its_seed(tmp_path):
    (tmp_path / "hang.py").write_text(f"""
import sys, time
sys.path.insert(0, {str(FUZZ)!r})
import judge, operators
judge.judge = lambda call: time.sleep(60)
sys.argv = ["operators.py", "--seed", "9", "--calls", "1", "--timeout", "0.5", "--no-torch"]
sys.exit(operators.main())
""")
    done = subprocess.run([sys.executable, tmp_path / "hang.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the call of seed 9 ended the process" in done.stdout
    assert "exit code 1: --seed 9 --calls 1 --no-torch --show repeats it" in done.stdout
    assert "Timeout" in done.stderr


def test_a_broken_promise_is_drawn_again_by_the_options_beside_it(tmp_path):
    (tmp_path / "break.py").write_text(f"""
import sys
sys.path.insert(0, {str(FUZZ)!r})
import judge, operators

def broken(call):
    raise judge.BrokenPromise("planted")

judge.judge = broken
sys.exit(operators.main())
""")

    def printed(*options):
        done = subprocess.run([sys.executable, tmp_path / "break.py", *options], capture_output=True, text=True)
        assert done.returncode == 1
        return done.stdout.splitlines()

    first = printed("--seed", "5", "--calls", "9", "--no-torch", "--only", "quant", "--go-on")
    *options, repeats, it = next(line for line in first if line.startswith("--seed 7 ")).split()
    assert (repeats, it) == ("repeats", "it")
    call = first[first.index("seed 7: broken promise: planted") + 1:]
    second = printed(*options)
    assert second[0] == f"seed 7: {call[0]}"
    assert call[:call.index(")")] == second[second.index("seed 7: broken promise: planted") + 1:][:call.index(")")]


def test_static_quantisation_is_reached():
    static = [call for name, call in (draw_call(seed, "quantize") for seed in range(600)) if name == "quantize" and "scales" in call.arguments]
    assert sum(judge(call) == "accepted" for call in static) > 40
