"""Time and memory against the length, log-log."""

import os

from . import cases, mixture_cases


def draw(report, folder):
    """One time-N.png and memory-N.png for each kind of call measured at three or more lengths; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    series = {}
    for row in report["rows"]:
        case = cases.parse(row["case"])
        if not isinstance(case, mixture_cases.Case) and case.query_len == case.kv_len:
            kind = (case.dtype, case.mode, case.batch, case.heads, case.kv_heads, case.head_dim, case.value_head_dim,
                    row["threads"])
            series.setdefault(kind, []).append((case.query_len, row))
    paths = []
    for kind, rows in series.items():
        rows.sort(key=lambda item: item[0])
        for what, values, unit in (("time", "ms", "ms"), ("memory", "peak_bytes", "MiB beyond the inputs")):
            lines = _lines(rows, values, 1 if what == "time" else 2**-20)
            if max((len(line) for line in lines.values()), default=0) < 3:
                continue
            paths.append(os.path.join(folder, f"{what}-{'-'.join(str(k).replace(' ', '_') for k in kind)}.png"))
            _plot(lines, kind, what, unit, paths[-1])
    return paths


def _lines(rows, values, factor):
    """{name: [(length, value)]}; a line ends where its library took no longer call."""
    lines = {}
    for length, row in rows:
        for name, value in row.get(values, {}).items():
            lines.setdefault(name, []).append((length, max(value * factor, 1e-3)))
    return lines


def _plot(lines, kind, what, unit, path):
    from matplotlib import pyplot

    dtype, mode, batch, heads, _, dim, value_dim, threads = kind
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in lines.items():
        axes.plot(*zip(*points), marker="o", markersize=3, linewidth=2 if name == "ours" else 1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("N")
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_title(f"{dtype} {mode}, {batch} x {heads} heads, head_dim {dim}{'' if dim == value_dim else f'/{value_dim}'}, "
                   f"{threads} thread{'' if threads == 1 else 's'}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
