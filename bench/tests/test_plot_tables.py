"""plot_tables.py: what was measured is drawn, for one head; forms end where their state says so; a PNG comes out."""

import json
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import plot_tables  # noqa: E402


def _form(state, ms, size):
    measured = state == "measured"
    return {"state": state, "ms": ms if measured else None, "bytes": size if measured else None,
            "computed_bytes": size, "predicted_ms": ms}


def _row(n, mode, heads, standard="measured", flash="measured"):
    published = {"batch": 4, "heads": 32, "computed_standard_bytes": n * n * 256, "computed_flash_bytes": n * 1024}
    return {"table": mode, "mode": mode, "kv_len": n, "batch": 1, "heads": heads, "published": published,
            "standard": _form(standard, n * heads / 1e2, n * n * heads),
            "flash": _form(flash, n * heads / 1e3, n * 100 * heads)}


def _result():
    """Inference: standard stops for memory behind 4096; training: for time behind 2048, flash behind 4096."""
    rows = [_row(8192, "inference", 1, "memory"), _row(2048, "inference", 4), _row(4096, "inference", 2),
            _row(2048, "training", 2), _row(4096, "training", 1, "time"), _row(8192, "training", 1, "time", "time"),
            _row(4096, "inference", 2), _row(8192, "decode", 8)]  # that of a video, and a decoded token
    return {"machine": "avx2, 2 cores", "threads": 2, "dtype": "bf16", "head_dim": 128, "rows": rows}


def test_lines_are_of_one_head_and_end_where_they_stop():
    found = plot_tables.series(_result()["rows"], "inference")
    assert found["standard"] == ([(2048, 20.48, 2048**2), (4096, 40.96, 4096**2)], "does not fit")
    assert found["flash"] == ([(2048, 2.048, 204800), (4096, 4.096, 409600), (8192, 8.192, 819200)], "")
    training = plot_tables.series(_result()["rows"], "training")
    assert {form: (points[-1][0], end) for form, (points, end) in training.items()} == {
        "standard": (2048, "takes longer than the budget"), "flash": (4096, "takes longer than the budget")}


def test_published_memory_is_of_one_batch():
    computed = plot_tables.published(_result()["rows"], "inference")
    assert computed["standard"] == ([(n, n * n * 64) for n in (2048, 4096, 8192)], "")
    assert computed["flash"][0][0] == (2048, 2048 * 256)


def test_rows_that_were_only_planned_are_refused():
    result = _result()
    result["rows"] = [_row(2048, "inference", 1, "planned", "planned")]
    assert plot_tables.series(result["rows"], "inference") == {}
    with pytest.raises(SystemExit, match="nothing in the file was measured"):
        plot_tables.draw(result, "nowhere.png")


def test_picture(tmp_path):
    if "matplotlib" not in os.environ.get("OPST_REQUIRE", "").split(","):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (scripts/requirements-plots.txt)")
    given = tmp_path / "tables.json"
    given.write_text(json.dumps(_result()), encoding="utf-8")
    plot_tables.main([str(given), str(tmp_path / "tables.svg"), "--machine", "a processor"])
    text = (tmp_path / "tables.svg").read_text(encoding="utf-8")
    for words in ("standard", "flash", "8K does not fit", "4K takes longer than the budget",
                  "8K takes longer than the budget", "inference: forward", "training: forward and backward",
                  "computed, not measured", "bf16, head_dim 128", "a processor, level avx2, 2 threads"):
        assert words in text, words
    plot_tables.main([str(given), str(tmp_path / "tables.png")])
    assert (tmp_path / "tables.png").read_bytes().startswith(b"\x89PNG\r\n")
