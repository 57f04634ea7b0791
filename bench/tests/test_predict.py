"""bench/predict.py: costs that are fitted, and what it says of predictions that are off."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import predict  # noqa: E402

COSTS = dict(matrix=1.2, vector=0.8, keys=1.5, rows=2.0, start=1.0)


def rows(scale=1.0):
    """Rows whose time is exactly COSTS times their units' times, `scale` times as long as predicted."""
    found = []
    for i in range(12):
        units = dict(matrix=1.0 + i, vector=0.5 + i % 3, keys=0.1 + 0.3 * (i % 5), rows=0.2 * (i % 4), start=0.05)
        time = sum(COSTS[unit] * units[unit] for unit in predict.UNITS)
        found.append(dict(name=f"attention {i}", kind="a kind", units=units, predicted=time, measured=time * scale))
    return found


def test_the_fit_finds_the_costs():
    fitted = predict.fit(rows())["a kind"]
    for unit in ("matrix", "vector", "keys", "rows"):
        assert fitted[unit] == pytest.approx(COSTS[unit], rel=0.05), unit
    assert max(predict.errors(rows(), {"a kind": fitted})) < 1e-3
    assert all(cost >= 0 for cost in predict.fit(rows(0.1))["a kind"].values())


def test_what_is_off_is_said():
    assert predict.summary(predict.errors(rows())).startswith("12 shapes: 12 within 15%")
    late = predict.errors(rows(1.25))  # predictions of 80 % of the time
    assert late == pytest.approx([0.2] * 12)
    assert predict.summary(late).startswith("12 shapes: 0 within 15%; error mean 20.0%")


def test_the_grid_has_sixty_shapes_and_the_fit_none_of_them():
    def shapes(attention, products):
        found = set()
        for options in attention:
            head, _, lengths = options.rpartition("--seq ")
            found |= {(head.strip(), int(n)) for n in lengths.split(",")}
        for options in products:
            words = options.split()
            m, n, k = ([int(x) for x in words[words.index(name) + 1].split(",")] for name in ("--m", "--n", "--k"))
            found |= {(a, b, c) for a in m for b in n for c in k}
        return {(dtype, shape) for dtype in predict.DTYPES for shape in found}

    grid, fit = shapes(predict.GRID, predict.PRODUCTS), shapes(predict.FIT_GRID, predict.FIT_PRODUCTS)
    assert len(grid) == 60
    assert not grid & fit
