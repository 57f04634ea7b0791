#!/usr/bin/env python3
"""Draws time and memory of attention against its length: docs/attention_length.svg.

    opst bench attention --json --causal --heads 1 --head-dim 64 --seq 1024,2048,4096,8192,16384,32768,65536 > length.json
    bench/plot_attention.py length.json docs/attention_length.svg --machine "Intel Xeon with AMX"

The standard and the naive form end at a cross, where they do not fit in memory or take too long for the bench.
"""

import argparse
import json

FORMS = {"naive": "#c0392b", "standard": "#d68910", "flash": "#1f6fb2"}
# Why a form has no time at a length, by the words of the JSON.
_ENDS = {"memory": "does not fit", "time": "takes over 5 s"}


def series(rows):
    """{form: ([(length, milliseconds, bytes)], why it ends there or "")}, with the lengths in order."""
    found = {}
    rows = sorted(rows, key=lambda row: row["kv_len"])
    for form in FORMS:
        points, end = [], ""
        for row in rows:
            state = "measured"
            if form == "naive":
                state = row["naive_state"]
            elif form == "standard" and not row["standard_fits"]:
                state = "memory"
            if state != "measured":
                end = _ENDS.get(state, "")
                break
            memory = row["flash_scratch_bytes" if form == "flash" else f"{form}_bytes"]
            points.append((row["kv_len"], row[f"{form}_ms"], memory))
        if points:
            found[form] = points, end
    return found


def length(number):
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


def plotting():
    """matplotlib's pyplot, for files that are the same for the same figures."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "opst", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def draw_panel(axes, drawn, column, factor, title, style="-"):
    """Lines of `drawn` (as series gives them): entry `column` of the points times `factor`; crosses where forms end."""
    from matplotlib import ticker

    for form, (points, end) in drawn.items():
        lengths, values = [p[0] for p in points], [p[column] * factor for p in points]
        axes.plot(lengths, values, style, color=FORMS[form], marker="o", markersize=3, label=form)
        if end:
            axes.plot(lengths[-1], values[-1], color=FORMS[form], marker="x", markersize=10, markeredgewidth=2)
            axes.annotate(f"{length(2 * lengths[-1])} {end}", (lengths[-1], values[-1]), color=FORMS[form], fontsize=8,
                          textcoords="offset points", xytext=(-8, -14 if form == "flash" else 4), ha="right")
    lengths = sorted({p[0] for points, _ in drawn.values() for p in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [length(n) for n in lengths])
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("keys and queries")
    axes.set_title(title, fontsize=9)
    axes.grid(True, alpha=0.3)
    axes.minorticks_off()
    axes.margins(y=0.12)  # room for the words at the crosses


def machine_text(result, machine=""):
    level, threads = result["machine"].split(",")[0], result["threads"]
    thread = "thread" if threads == 1 else "threads"
    return ", ".join([*([machine] if machine else []), f"level {level}", f"{threads} {thread}"])


def save(pyplot, figure, caption, path):
    figure.text(0.5, 0.01, caption, ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(result, path, machine=""):
    pyplot = plotting()
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.9))
    drawn = series(result["rows"])
    draw_panel(panels[0], drawn, 1, 1, "time of one call, ms")
    draw_panel(panels[1], drawn, 2, 2**-20, "memory beyond inputs and outputs, MiB")
    panels[0].legend(loc="lower right", frameon=False)
    caption = f"causal, f32, one head of 64; {machine_text(result, machine)}; a shared machine: the trend counts"
    save(pyplot, figure, caption, path)


def main(words=None, description=__doc__, draw_file=draw, command="opst bench attention --json"):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help=f"what `{command}` printed")
    parser.add_argument("picture", help="the file to write, .svg or .png")
    parser.add_argument("--machine", default="", help="named in the caption, beside level and threads")
    options = parser.parse_args(words)
    with open(options.json, encoding="utf-8") as file:
        draw_file(json.load(file), options.picture, options.machine)


if __name__ == "__main__":
    main()
