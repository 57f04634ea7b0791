"""compare.py: what it says of its numbers, and one small run with the peers that are installed."""

import argparse
import json
import math
import os
import random
import subprocess
import sys

import pytest

BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, BENCH)

import compare  # noqa: E402
from peers import cases, plots, report, timing  # noqa: E402

# A small row of each option, and one of dropout in each mode.
OPTION_ROWS = ["f32 causal window 1x2x300x32", "f32 window 1x2x300x32", "f32 causal window backward 1x2x300x32",
               "f32 causal alibi 1x4x64x32", "f32 alibi backward 1x4x64x32", "f32 softcap 1x2x64x32",
               "f32 causal softcap backward 1x2x64x32", "f32 sinks 1x4/2x64x32", "f32 causal window sinks 1x2x300x32",
               "f32 varlen 3x4/2x64x32", "f32 causal varlen backward 3x2x64x32", "f32 causal paged 2x4/2x40/200x32",
               "f32 causal window paged 1x2x40/400x32", "f32 sparse 50% blocks64 1x2x256x32",
               "f32 causal sparse backward 1x2x256x32", "f32 strided 2x2x64x32", "f32 causal strided backward 2x2x64x32",
               "f32 dropout 2x4/2x64x32", "f32 dropout backward 1x2x64x32", "f32 dropout training 1x2x64x32"]


def _torch():
    if "torch" not in os.environ.get("OPST_REQUIRE", "").split(","):
        pytest.importorskip("torch", reason="torch is not installed (OPST_TEST_TORCH=1 installs it)")


def test_interval_of_few_values_is_all_of_them():
    assert timing.interval([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    assert timing.interval([5]) == {"median": 5, "low": 5, "high": 5}


@pytest.mark.parametrize("n", [6, 11, 30, 31, 101])
def test_interval_is_the_shortest_that_covers(n):
    """Counted from the binomial distribution: 95 of 100, and one value further in would be less."""

    def coverage(low):  # of the order statistics low and n - 1 - low
        return 1 - 2 * sum(math.comb(n, i) for i in range(low + 1)) / 2**n

    got = timing.interval(random.Random(n).sample(range(n), n))
    assert got["median"] == (n - 1) / 2
    assert got["high"] == n - 1 - got["low"]
    assert coverage(got["low"]) >= 0.95 > coverage(got["low"] + 1)


def test_verdict_needs_the_whole_interval():
    ratio = {"median": 1.3, "low": 1.1, "high": 1.5}
    assert timing.verdict(ratio) == "won"
    assert timing.verdict(ratio, 1.1) == "tie"
    assert timing.verdict(ratio, 1.5) == "tie"
    assert timing.verdict(ratio, 1.6) == "lost"


def test_case_as_text():
    text = "bf16 causal backward 2x32/8x1/4096x192/128"
    case = cases.parse(text)
    assert str(case) == text
    assert (case.heads, case.kv_heads, case.query_len, case.kv_len, case.value_head_dim) == (32, 8, 1, 4096, 128)
    assert str(cases.parse("f32 forward 1x8x64x64")) == "f32 forward 1x8x64x64"
    for wrong in ("f32 1x8x64", "f3 1x8x64x64", "f32 sideways 1x8x64x64", "f32 1x8/3x64x64", "f32 1x8x64x0", "f32 1/2x8x64x64",
                  "f32 window 1x8x64/128x64", "f32 paged backward 1x8x64x64", "f32 paged 1x8x128/64x64",
                  "f32 alibi dropout 1x8x64x64", "f32 50% 1x8x64x64", "f32 blocks64 1x8x64x64", "f32 sparse 50% 2% 1x8x64x64"):
        with pytest.raises(ValueError):
            cases.parse(wrong)


def test_mixture_as_text():
    case = cases.parse("bf16 moe training 512x32/4x1024x512")
    assert (case.tokens, case.experts, case.top_k, case.hidden, case.intermediate) == (512, 32, 4, 1024, 512) and case.training
    for wrong in ("bf16 moe 512x32x1024x512", "bf16 moe 512x4/8x1024x512", "f3 moe 5x4/2x8x8", "f32 moe causal 5x4/2x8x8",
                  "f32 moe 0x4/2x8x8", "f32 moe 5x4/2x8"):
        with pytest.raises(ValueError):
            cases.parse(wrong)
    ratio = {"torch loop": _ratio(4), "vLLM": _ratio(2)}
    assert report.judge(_row("f32 moe training 8x4/2x8x8", ratio=ratio), amx=False)[3] == "met"
    assert report.judge(_row("bf16 moe 512x4/2x8x8", ratio=ratio), amx=False)[1::2] == ("vLLM", "missed")
    assert report.judge(_row("bf16 moe 1x4/2x8x8", ratio=ratio), amx=False) is None
    with pytest.raises(SystemExit):
        compare.arguments(["--memory", "--groups", "moe"])


def test_mixtures_are_measured_beside_a_loop_and_compared(tmp_path):
    _torch()
    out = tmp_path / "out.json"
    texts = [f"{dtype} moe {words}9x4/2x32x24" for dtype in ("f32", "bf16") for words in ("", "training ")]
    subprocess.run([sys.executable, os.path.join(BENCH, "compare.py"), "--cases", ",".join(texts), "--pairs", "2", "--json", out],
                   check=True)
    rows = {row["case"]: row for row in report.read(out)["rows"]}
    assert list(rows) == texts
    for row in rows.values():
        assert row["wrong"] == [] and set(row["error"]) == {"ours", *row["ratio"]} and "torch loop" in row["ratio"], row


def test_a_wrong_layer_of_ours_is_named(monkeypatch):
    _torch()
    from peers import mixture

    class Wrong(mixture.Ours):
        def prepare(self, case, inputs):
            return super().prepare(case, inputs._replace(weights=inputs.weights.roll(1, 1)))

    for text in ("f32 moe 9x4/2x32x24", "bf16 moe training 9x4/2x32x24"):
        row = compare.measure(cases.parse(text), [Wrong(), mixture.TorchLoop()], argparse.Namespace(threads=1, pairs=1, seconds=1))
        assert row["wrong"] == ["ours"]
        row = compare.measure(cases.parse(text), [mixture.OURS, mixture.TorchLoop()],
                              argparse.Namespace(threads=1, pairs=1, seconds=1))
        assert row["wrong"] == []


@pytest.mark.parametrize("text", ["f32 moe 9x4/2x32x24", "f16 moe 33x8/3x64x40", "bf16 moe 1x4/1x40x33", "bf16 moe 70x5/5x32x24"])
def test_experts_of_ggml(text):
    _torch()
    pytest.importorskip("libggml", reason="libggml-python is not installed (scripts/requirements-peer-ggml.txt)")
    from peers import adapters, mixture

    class WithAnotherExpert(mixture.Ggml):
        name = "ggml with another expert"

        def prepare(self, case, inputs):
            ids = inputs.ids.clone()
            ids[-1, 0] = (ids[-1, 0] + 1) % case.experts
            return super().prepare(case, inputs._replace(ids=ids))

    case, options = cases.parse(text), argparse.Namespace(threads=1, pairs=1, seconds=1)
    row = compare.measure(case, [mixture.OURS, mixture.Ggml(), WithAnotherExpert()], options)
    assert row["refused"] == {} and row["wrong"] == ["ggml with another expert"], row
    assert set(row["error"]) == {"ours", "ggml", "ggml with another expert"}
    training = cases.parse(text.replace("moe", "moe training"))
    assert adapters.prepare(mixture.Ggml(), training, mixture.make_inputs(training)) == (None, "has no gradients of mul_mat_id")


def test_every_case_of_every_group_is_one():
    for texts in cases.GROUPS.values():
        assert [str(cases.parse(text)) for text in texts] == texts


def test_blocks_of_sparse_cases():
    _torch()
    from peers import calls

    for text, block, share in (("f32 sparse 1x8x2048x64", 128, 0.1), ("f32 sparse 25% blocks64 1x8x2048x64", 64, 0.25)):
        case = cases.parse(text)
        table, n = calls.block_table(case), 2048 // block
        assert (case.block, case.share) == (block, share) and table.shape == (n, n)
        assert (table.sum(1) == round(share * n)).all() and not (table[0] == table[1]).all()
        seen = calls.visible(case)[0, 0]
        assert (seen[::block, ::block] == table).all() and seen.sum() == table.sum() * block**2
    causal = cases.parse("f32 causal sparse 50% 1x8x2048x64")
    table = calls.block_table(causal)
    assert not table.triu(1).any() and (table.sum(1) >= 1).all() and calls.visible(causal).any(-1).all()
    assert calls.masked(causal, calls.make_inputs(causal)).mask is not None


def test_lengths_of_sequences():
    assert cases.parse("f32 varlen 4x8x512x64").lengths == (512, 384, 256, 128)
    assert cases.parse("f32 varlen 3x1x2x64").lengths == (2, 1, 1)
    assert cases.parse("f32 forward 2x8x512x64").lengths == (512, 512)


def test_every_option_has_a_group_and_a_small_row():
    for word in (*cases.OPTIONS, "strided", "dropout"):
        assert any(word in cases.parse(text).words for text in cases.GROUPS[word]), word
        assert any(word in cases.parse(text).words for text in OPTION_ROWS), word


def _row(case, threads=1, **parts):
    return {"case": case, "threads": threads, **parts}


def _ratio(median, spread=0.01):
    return {"median": median, "low": median - spread, "high": median + spread}


def test_bar_of_sparse_blocks_is_against_flex_attention():
    ratio = {"torch flash": _ratio(2), "torch flex": _ratio(4)}
    bar, name, _, verdict = report.judge(_row("f32 sparse 10% 1x8x8192x64", ratio=ratio), amx=False)
    assert (bar.least, name, verdict) == (3, "torch flex", "met")
    assert "| torch flex 3: met |" in report.table({"machine": {}, "commands": [], "rows": [
        _row("f32 sparse 10% 1x8x8192x64", ms={"ours": 1}, ratio=ratio)]})
    assert report.judge(_row("bf16 sparse 10% 1x8x8192x64", ratio=ratio), amx=True) is None
    assert report.judge(_row("f32 sparse backward 1x8x8192x64", ratio=ratio), amx=False) is None


@pytest.mark.parametrize("name", ["f32 sparse 10% 1x1x1024x64", "f32 causal sparse 10% 1x1x1024x64", "bf16 sparse 50% blocks64 1x2/1x256x32"])
def test_flex_attention_takes_every_sparse_row(name):
    """Its call is made (compiled at its first run): a peer that refuses is named under the table only."""
    _torch()
    from peers import adapters, calls

    case = cases.parse(name)
    assert callable(adapters.TorchFlex().prepare(case, calls.make_inputs(case)).run)


def test_bars_are_judged_against_the_right_peer():
    ratio = {"ours, 1 thread": _ratio(0.5), "torch math": _ratio(4), "ONNX Runtime MHA": _ratio(1.15)}
    bar, name, _, verdict = report.judge(_row("f32 forward 1x8x64x64", ratio=ratio), amx=False)
    assert (bar.least, name, verdict) == (1.2, "ONNX Runtime MHA", "missed")
    bar, name, _, verdict = report.judge(_row("f32 dropout 1x8x64x64", ratio=ratio), amx=False)
    assert (bar.least, name, verdict) == (3, "torch math", "met")
    assert report.judge(_row("bf16 forward 1x8x64x64", ratio=ratio), amx=True) is None
    assert report.judge(_row("f32 forward 1x8x64x64", ratio={}), amx=False) is None


def test_reports_merge_row_by_row():
    def of(machine, *rows):
        return {"machine": machine, "commands": ["c"], "rows": list(rows)}

    merged = report.merge([of({"torch": "1"}, _row("f32 forward 1x8x64x64", ms={"ours": 1}), _row("f32 forward 1x8x64x64", 2)),
                           of({"jax": "2"}, _row("f32 forward 1x8x64x64", peak_bytes={"ours": 5}))])
    assert merged["machine"] == {"torch": "1", "jax": "2"}
    assert merged["commands"] == ["c"]
    assert merged["rows"] == [_row("f32 forward 1x8x64x64", ms={"ours": 1}, peak_bytes={"ours": 5}),
                              _row("f32 forward 1x8x64x64", 2)]


def test_losing_rows_are_shown():
    row = _row("f32 forward 1x8x64x64", ms={"ours": 1}, ratio={"JAX": _ratio(0.5)}, error={"ours": 1e-7, "JAX": 2e-7})
    table = report.table({"machine": {}, "commands": [], "rows": [row]})
    assert "| JAX | 0.50 (0.49 - 0.51) | lost | 1.2: missed |" in table
    assert "| 1.0e-07, 2.0e-07 |" in table


def test_plot_of_three_lengths(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (scripts/requirements-plots.txt)")
    rows = [_row(f"f32 causal 1x1x{n}x64", ms={"ours": n, "torch math": n * n}) for n in (64, 128, 256)]
    del rows[-1]["ms"]["torch math"]
    paths = plots.draw({"rows": rows}, tmp_path)
    assert [os.path.basename(path) for path in paths] == ["time-f32-causal-1-1-1-64-64-1.png"]
    assert os.path.getsize(paths[0]) > 0


def test_small_run_with_what_is_installed(tmp_path):
    _torch()
    out = tmp_path / "out.json"
    texts = "f32 forward 1x2x64x32,f32 causal backward 1x2x64x32,f32 bool_mask 1x2x64x32,f32 dropout 1x2x64x32"

    def run(*words):
        subprocess.run([sys.executable, os.path.join(BENCH, "compare.py"), *words, "--json", out], check=True)

    run("--cases", texts, "--pairs", "3", "--threads", "2", "--markdown", tmp_path / "table.md")
    run("--cases", texts.split(",")[0], "--memory", "--peers", "torch", "--threads", "2")
    rows = {row["case"]: row for row in report.read(out)["rows"]}
    assert list(rows) == texts.split(",")
    for text, row in rows.items():
        assert row["pairs"] == 3
        assert "torch math" in row["ratio"]
        assert set(row["error"]) == {"ours", *row["ratio"]} and row["wrong"] == [], row
        assert text in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert rows[texts.split(",")[0]]["peak_bytes"]["ours"] >= 0


def test_options_are_compared_with_float64(tmp_path):
    """Every row of every option, dropout included, has an error of ours that the rule allows; who has no such call says so."""
    _torch()
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, os.path.join(BENCH, "compare.py"), "--cases", ",".join(OPTION_ROWS), "--pairs", "1",
                    "--json", out], check=True)
    rows = {row["case"]: row for row in report.read(out)["rows"]}
    assert list(rows) == OPTION_ROWS
    for text, row in rows.items():
        assert set(row["error"]) == {"ours", *row["ratio"]} and row["wrong"] == [], row
        softcap = "softcap" in text
        assert ("torch math" in row["ratio"]) != softcap, row
        assert (row["refused"].get("torch math") == "has no softcap") == softcap, row


@pytest.fixture
def wrong_peers(monkeypatch):
    """Ours with a window of one key more than the case says, and torch's math path as it is: (adapters, options)."""
    _torch()
    from peers import adapters

    def prepare(case, inputs):
        monkeypatch.setattr(cases, "WINDOW", cases.WINDOW + 1)
        try:
            call = adapters.Ours().prepare(case, inputs)
            call.run()
        finally:
            monkeypatch.setattr(cases, "WINDOW", cases.WINDOW - 1)
        return call

    wrong = adapters.Ours()
    wrong.prepare = prepare
    return adapters, wrong, argparse.Namespace(threads=1, pairs=1, seconds=1)


def test_wrong_output_of_ours_is_named_and_ends_in_failure(monkeypatch, tmp_path, wrong_peers):
    adapters, wrong, options = wrong_peers
    case = cases.parse("f32 causal window 1x2x300x32")
    math_path = adapters.TorchPath("torch math", "MATH")
    assert compare.measure(case, [adapters.OURS, math_path], options)["wrong"] == []
    monkeypatch.setattr(adapters, "OURS", wrong)
    row = compare.measure(case, [wrong, math_path], options)
    assert row["wrong"] == ["ours"]
    assert "ours is WRONG" in report.table({"machine": {}, "commands": [], "rows": [row]})
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"machine": {}, "commands": [], "rows": [row]}), encoding="utf-8")
    with pytest.raises(SystemExit, match="our output is wrong: f32 causal window 1x2x300x32"):
        compare.main(["--report", str(path)])


def test_wrong_output_of_a_peer_is_named_and_no_bar(wrong_peers):
    adapters, wrong, options = wrong_peers
    wrong.name = "torch that misreads windows"
    case = cases.parse("f32 causal window 1x2x300x32")
    row = compare.measure(case, [adapters.OURS, wrong], options)
    assert row["wrong"] == [wrong.name]
    assert report.best_peer(row) is None
    assert compare.ours_is_wrong({"rows": [row]}) == []


class _Changed:
    """Ours, of inputs that `change` has made others."""

    package, words = "ops-transformer", set(cases.WORDS)

    def __init__(self, name, change):
        self.name, self.change = name, change

    def prepare(self, case, inputs):
        from peers import adapters

        return adapters.Ours().prepare(*self.change(case, inputs._replace(key=inputs.key.clone(), value=inputs.value.clone())))


def _without_the_last_key(case, inputs):
    inputs.key[:, :, -1] = inputs.value[:, :, -1] = 0
    return case, inputs


def _with_other_blocks(case, inputs):
    return case._replace(words=tuple(word for word in case.words if word != "50%") + ("25%",)), inputs


@pytest.mark.parametrize("text, change", [("f32 forward 2x4/2x1/200x32", _without_the_last_key),
                                          ("f32 causal paged 1x4/2x3/200x32", _without_the_last_key),
                                          ("f32 sparse 50% blocks64 1x2x512x32", _with_other_blocks),
                                          ("f32 causal sparse 50% blocks64 1x2x512x32", _with_other_blocks)])
def test_decoding_and_blocks_that_differ_are_named(text, change):
    """A token that misses one of 200 keys, and a query block that sees half of its blocks, are different; ours and torch's dense
    call with a mask are not."""
    _torch()
    from peers import adapters

    case, options = cases.parse(text), argparse.Namespace(threads=1, pairs=1, seconds=1)
    chosen = [adapters.OURS, adapters.TorchPath("torch math", "MATH"), _Changed("torch that is changed", change)]
    row = compare.measure(case, chosen, options)
    assert row["wrong"] == ["torch that is changed"], row
    assert set(row["error"]) == {peer.name for peer in chosen} and row["refused"] == {}
    assert report.best_peer(row)[0] == "torch math"


GQA_ROWS = ["f32 forward 1x4/2x1/70x32", "f32 forward 3x6/2x1/200x64", "f32 causal 1x4/2x64x32", "f32 causal paged 1x4/2x5/70x32",
            "f32 causal softcap 1x4x40x32", "f32 causal window paged 1x4/2x1/400x32"]


@pytest.fixture
def onnx_runtime():
    _torch()
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed (scripts/requirements-peer-onnxruntime.txt)")
    from peers import onnx_runtime

    return onnx_runtime


@pytest.mark.parametrize("text", GQA_ROWS)
def test_group_query_attention_of_onnx_runtime(onnx_runtime, text):
    from peers import adapters

    case, options = cases.parse(text), argparse.Namespace(threads=1, pairs=1, seconds=1)
    row = compare.measure(case, [adapters.OURS, onnx_runtime.GroupQueryAttention()], options)
    assert row["refused"] == {} and row["wrong"] == [] and set(row["error"]) == {"ours", "ONNX Runtime GQA"}, row


def test_a_cache_with_one_key_less_is_wrong(onnx_runtime):
    """ONNX Runtime told of 69 of 70 keys."""
    from peers import adapters

    class Shorter(onnx_runtime.GroupQueryAttention):
        def prepare(self, case, inputs):
            call = super().prepare(case, inputs)
            call.kept["last"] -= 1  # the memory that the graph is bound to
            return call

    case, options = cases.parse("f32 forward 1x4/2x1/70x32"), argparse.Namespace(threads=1, pairs=1, seconds=1)
    assert compare.measure(case, [adapters.OURS, Shorter()], options)["wrong"] == ["ONNX Runtime GQA"]


def test_calls_that_group_query_attention_has_not(onnx_runtime):
    from peers import adapters, calls

    for text, why in (("f32 forward 1x4x8x32", "is causal"), ("f32 causal 1x4x8/16x32", "its last query sees the last key"),
                      ("bf16 forward 1x4x1/8x32", "has no bf16"), ("f32 forward 1x4x1/8x32/16", "has no value_head_dim"),
                      ("f32 alibi 1x4x8x32", "has no alibi")):
        case = cases.parse(text)
        assert adapters.prepare(onnx_runtime.GroupQueryAttention(), case, calls.make_inputs(case)) == (None, why)


@pytest.mark.parametrize("text", ["f32 forward 2x4/2x1/70x64", "bf16 forward 1x4/2x1/20x128", "f16 causal 1x4/2x40x32",
                                  "f32 causal softcap 1x2x33x32", "f32 causal window paged 1x4/2x5/400x32", "f32 bool_mask 1x2x40x32"])
def test_ggml(text):
    _torch()
    pytest.importorskip("libggml", reason="libggml-python is not installed (scripts/requirements-peer-ggml.txt)")
    from peers import adapters, ggml

    class WithoutTheFirstKey(ggml.Ggml):
        name = "ggml without a key"

        def prepare(self, case, inputs):
            key, value = (torch.nn.functional.pad(t[:, :, 1:], (0, 0, 1, 0)) for t in (inputs.key, inputs.value))
            return super().prepare(case, inputs._replace(key=key, value=value))

    import torch

    case, options = cases.parse(text), argparse.Namespace(threads=1, pairs=1, seconds=1)
    row = compare.measure(case, [adapters.OURS, ggml.Ggml(), WithoutTheFirstKey()], options)
    assert row["refused"] == {} and set(row["error"]) == {"ours", "ggml", "ggml without a key"}
    hidden = "window" in text  # from every query
    assert row["wrong"] == ([] if hidden else ["ggml without a key"]), row


@pytest.mark.parametrize("text", ["f32 dropout 1x2x64x32", "f32 dropout backward 1x2x64x32", "bf16 forward 1x2x64x32"])
def test_one_wrong_element_is_not_right(text):
    _torch()
    import torch
    from peers import adapters, calls, exact

    case = cases.parse(text)
    inputs = calls.make_inputs(case)
    expected = exact.Expected(case, inputs, adapters.OURS.kept(case, inputs, 1) if "dropout" in case.words else None)
    for wrong, right in ((0, True), (0.1, False), (math.nan, False)):
        outputs = [want.clone() for want in expected.want]
        outputs[-1][0, 0, 3, 5] += wrong * outputs[-1].abs().max()
        assert expected.judge(outputs).right is right, wrong
    other = torch.roll(expected.want[0], 1, dims=2)
    assert not expected.judge([other, *expected.want[1:]]).right


def test_weights_that_dropout_keeps_decide():
    """With another mask than the one that was drawn the same output is wrong."""
    _torch()
    from peers import adapters, calls, exact

    case = cases.parse("f32 dropout 1x2x64x32")
    inputs = calls.make_inputs(case)
    for peer in (adapters.OURS, adapters.TorchPath("torch math", "MATH")):
        kept = peer.kept(case, inputs, 1)
        assert 0.85 < kept.double().mean() < 0.95
        call = adapters.checked(peer, case, inputs)
        calls.torch.manual_seed(calls.SEED)
        with call.chosen():
            outputs = call.outputs(call.run())
        assert exact.Expected(case, inputs, kept).judge(outputs).right, peer.name
        assert not exact.Expected(case, inputs, kept.roll(1, dims=3)).judge(outputs).right, peer.name
