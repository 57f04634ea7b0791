"""Rows of results: merged over runs, judged by the bars, written as a Markdown table."""

import json
import os

from . import cases
from .timing import verdict


def merge(reports):
    """One report of several; of a row measured twice the later one counts, part by part."""
    merged = {"machine": {}, "commands": [], "rows": []}
    rows = {}
    for report in reports:
        merged["machine"].update(report["machine"])
        merged["commands"] += [c for c in report["commands"] if c not in merged["commands"]]
        for row in report["rows"]:
            rows.setdefault((row["case"], row["threads"]), {}).update(row)
    merged["rows"] = list(rows.values())
    return merged


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write(path, report):
    """Adds to what the file holds."""
    report = merge([read(path), report] if os.path.exists(path) else [report])
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)


def best_peer(row, of=""):
    """(name, ratio) of the fastest peer whose name starts with `of`; ours on fewer threads is none, and who gives wrong outputs
    is none. None without any."""
    ratios = {n: r for n, r in row.get("ratio", {}).items()
              if n.startswith(of) and not n.startswith("ours") and n not in row.get("wrong", ())}
    return min(ratios.items(), key=lambda item: item[1]["median"], default=None)


def judge(row, amx):
    """(bar, name, ratio, verdict) of the bar that this row has to pass, or None."""
    bar = cases.bar(cases.parse(row["case"]), row["threads"], amx)
    against = bar and best_peer(row, "" if bar.against == "best" else bar.against)
    if not against:
        return None
    return bar, *against, {"won": "met", "lost": "missed", "tie": "open"}[verdict(against[1], bar.least)]


def text_of(ratio):
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})"


_HEAD = ("call", "threads", "ours, ms", "best peer", "its time over ours", "", "bar", "the other peers",
         "error: ours, largest", "peak MiB: ours, others")


def cells(row, amx):
    best = best_peer(row)
    judged = judge(row, amx)
    others = sorted((r["median"], name) for name, r in row.get("ratio", {}).items() if not best or name != best[0])
    errors, peaks = row.get("error", {}), {name: f"{b / 2**20:.1f}" for name, b in row.get("peak_bytes", {}).items()}
    return [row["case"], str(row["threads"]), f"{row['ms']['ours']:.3f}" if "ms" in row else "", best[0] if best else "none",
            text_of(best[1]) if best else "", verdict(best[1]) if best else "",
            f"{'' if judged[0].against == 'best' else judged[0].against + ' '}{judged[0].least:g}: {judged[3]}" if judged else "",
            "; ".join(f"{name} {median:.2f}" for median, name in others),
            ". ".join([f"{errors['ours']:.1e}, {max(errors.values()):.1e}", *(f"{name} is WRONG" for name in row.get("wrong", ()))])
            if errors else "",
            "; ".join([peaks.pop("ours"), *(f"{name} {peak}" for name, peak in peaks.items())]) if "ours" in peaks else ""]


def table(report):
    amx = report["machine"].get("amx", False)
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = [machine, "", *(f"`{command}`" for command in report["commands"]), "",
             "| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    lines += ["| " + " | ".join(cells(row, amx)) + " |" for row in report["rows"]]
    refused = {}
    for row in report["rows"]:
        for name, why in {**row.get("refused", {}), **row.get("memory_refused", {})}.items():
            refused.setdefault((name, why), []).append(row["case"])
    lines += ["", "Not measured:", ""]
    lines += [f"- {name}, {why}: {len(of)} calls, first {of[0]}" for (name, why), of in sorted(refused.items())]
    return "\n".join(lines) + "\n"
