#!/usr/bin/env python3
"""Draws what `opst bench tables` measured: time and memory of standard and flash attention against length, for
inference and training.

    opst bench tables --json > tables.json
    bench/plot_tables.py tables.json tables.png --machine "Intel Xeon with AMX"

Rows are run with as many heads as the budget allows, so time and memory are shown for one head. Only what was measured
is drawn; the third column is computed, and says so: the memory of one batch of the published shape. A form ends at a
cross.
"""

import plot_attention

MODES = {"inference": "inference: forward", "training": "training: forward and backward"}
_ENDS = {"memory": "does not fit", "time": "takes longer than the budget"}


def _by_length(rows, mode):
    """Rows of a mode, from whichever table, one for each length."""
    found = {row["kv_len"]: row for row in rows if row["mode"] == mode}
    return [found[n] for n in sorted(found)]


def series(rows, mode):
    """{form: ([(length, milliseconds, bytes)] of one head, why it ends there or "")}: as plot_attention.series."""
    found = {}
    for form in ("standard", "flash"):
        points, end = [], ""
        for row in _by_length(rows, mode):
            side, heads = row[form], row["batch"] * row["heads"]
            if side["state"] != "measured":
                end = _ENDS.get(side["state"], "")
                break
            points.append((row["kv_len"], side["ms"] / heads, side["bytes"] / heads))
        if points:
            found[form] = points, end
    return found


def published(rows, mode):
    """{form: ([(length, bytes)], "")} of one batch of all heads of the published shape, computed."""
    return {form: ([(row["kv_len"], row["published"][f"computed_{form}_bytes"] / row["published"]["batch"])
                    for row in _by_length(rows, mode)], "") for form in ("standard", "flash")}


def draw(result, path, machine=""):
    rows = result["rows"]
    modes = [mode for mode in MODES if series(rows, mode)]
    if not modes:
        raise SystemExit("plot_tables: nothing in the file was measured")
    heads = rows[0]["published"]["heads"]
    pyplot = plot_attention.plotting()
    figure, panels = pyplot.subplots(len(modes), 3, figsize=(13, 3.9 * len(modes)), squeeze=False)
    for (time, memory, computed), mode in zip(panels, modes):
        drawn = series(rows, mode)
        plot_attention.draw_panel(time, drawn, 1, 1, f"{MODES[mode]}, ms for each head")
        plot_attention.draw_panel(memory, drawn, 2, 2**-20, "memory for each head, MiB")
        plot_attention.draw_panel(computed, published(rows, mode), 1, 2**-30,
                                  f"memory of batch 1, {heads} heads, GiB: computed, not measured", "--")
        time.legend(loc="lower right", frameon=False)
    caption = f"{result['dtype']}, head_dim {result['head_dim']}, full; {plot_attention.machine_text(result, machine)}"
    plot_attention.save(pyplot, figure, f"{caption}; standard: operators one after the other", path)


def main(words=None):
    plot_attention.main(words, __doc__, draw, "opst bench tables --json")


if __name__ == "__main__":
    main()
