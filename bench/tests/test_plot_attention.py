"""plot_attention.py: the forms end where their state says so, and the picture is small and holds its words as text."""

import json
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import plot_attention  # noqa: E402


def _rows():
    """Lengths 1024 to 8192; naive stops for time behind 2048, standard for memory behind 4096."""
    return [{"kv_len": n, "flash_ms": n / 1e3, "flash_scratch_bytes": n * 100, "standard_ms": n / 5e2 if n <= 4096 else None,
             "standard_bytes": n * n * 4, "standard_fits": n <= 4096, "naive_ms": n / 1e2 if n <= 2048 else None,
             "naive_state": "measured" if n <= 2048 else "time", "naive_bytes": n * n * 8} for n in (8192, 1024, 4096, 2048)]


def test_forms_end_where_they_stop():
    found = plot_attention.series(_rows())
    assert {form: (points[-1][0], end) for form, (points, end) in found.items()} == {
        "naive": (2048, "takes over 5 s"), "standard": (4096, "does not fit"), "flash": (8192, "")}
    assert found["flash"][0][0] == (1024, 1.024, 102400)
    assert found["standard"][0][0] == (1024, 2.048, 4 << 20)


def test_a_form_that_never_ran_has_no_line():
    rows = [{**row, "naive_state": "option", "naive_ms": None} for row in _rows()]
    assert set(plot_attention.series(rows)) == {"standard", "flash"}


def test_picture(tmp_path):
    if "matplotlib" not in os.environ.get("OPST_REQUIRE", "").split(","):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (scripts/requirements-plots.txt)")
    given, picture = tmp_path / "length.json", tmp_path / "length.svg"
    given.write_text(json.dumps({"machine": "avx2, 2 cores", "threads": 2, "rows": _rows()}), encoding="utf-8")
    plot_attention.main([str(given), str(picture), "--machine", "a processor"])
    text = picture.read_text(encoding="utf-8")
    for words in ("naive", "standard", "flash", "4K takes over 5 s", "8K does not fit", "a processor, level avx2, 2 threads", "trend"):
        assert words in text, words
    assert len(text) < 60_000
