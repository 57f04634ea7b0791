#!/usr/bin/env python3
"""How large the library's files and functions are, against the bounds below. Prints every number, fails beyond a bound.

    check_house.py [ROOT]        measures the tree
    check_house.py --self-test   checks the measure: a small tree with one file, function and sum too large

The library is what include/ and src/ hold without tests, benches, references and src/testing (check_layers.py tells
them apart). Lines are lines of the file, comments and blank ones too. Functions are found by ctags.
"""

import pathlib
import subprocess
import sys
import tempfile

import check_layers

FILE_LINES = 500  # a file is read at one sitting
FUNCTION_LINES = 80
# Lines of each room, headers in include/opst among them. A room may grow by what a new family of operators needs: whoever
# raises a bound says in the commit what the lines buy, and why the room's furniture did not hold it already.
ROOM_LINES = {
    "articles": 160,
    "attention": 10980,
    "c_api": 1550,
    "core": 1350,
    "graph": 2080,
    "kv_cache": 2000,
    "machine": 1560,
    "matmul": 4920,
    "mc2": 4750,
    "model": 3800,
    "moe": 2955,
    "quant": 1000,
    "rowwise": 1250,
    "simd": 1510,
    "tile": 640,
}
# The examples in src/extending: how their files begin, and what each costs its author, without its tests.
EXAMPLES = {
    "the fused operator": (("normed_matmul",), 160),
    "the weight format": (("block_w5", "weight_format"), 80),
    "the attention source": (("scaled_rows",), 120),
}
SHOWN = 5  # the largest files and functions are printed, whether too large or not


def library_files(root):
    files = check_layers.read_tree(root)
    check_layers.find_test_headers(root, files)
    tests = lambda f: f.is_test or f.is_bench or f.is_reference or f.room == "testing"
    return [f for f in files.values() if f.path.startswith(("include/", "src/")) and not tests(f)]


def count_lines(root, file):
    return len((root / file.path).read_text(encoding="utf-8").splitlines())


def functions(root, files):
    """(lines, "path:line name") of every function"""
    form = "%{input}\t%{line}\t%{end}\t%{name}"
    command = ["ctags", "-x", "--languages=C++", "--langmap=C++:+.h", "--kinds-C++=f", "--fields=+ne", f"--_xformat={form}"]
    result = subprocess.run(command + [f.path for f in files], cwd=root, capture_output=True, text=True, check=True)
    found = []
    for line in result.stdout.splitlines():
        path, first, last, name = line.split("\t")
        if last.isdigit():
            found.append((int(last) - int(first) + 1, f"{path}:{first} {name}"))
    return sorted(found, reverse=True)


def measure(root):
    """(lines of the report, number of excesses)"""
    report, excesses = [], 0

    def bounded(what, value, bound):
        nonlocal excesses
        excesses += value > bound
        report.append(f"{value:7d} of {bound:6d}  {what}{'  TOO LARGE' if value > bound else ''}")

    files = library_files(root)
    lines = {f.path: count_lines(root, f) for f in files}
    rooms = {f.path: f.room for f in files}
    for room in sorted(set(rooms.values()) - {"extending"}):
        bounded(f"lines of room {room}", sum(n for p, n in lines.items() if rooms[p] == room), ROOM_LINES.get(room, 0))
    examples = {pathlib.Path(p).name: n for p, n in lines.items() if rooms[p] == "extending"}
    for what, (names, bound) in EXAMPLES.items():
        bounded(f"lines of {what} in docs/extending.md", sum(n for p, n in examples.items() if p.startswith(names)), bound)
    every_name = sum((names for names, _ in EXAMPLES.values()), ())
    for name in sorted(p for p in examples if not p.startswith(every_name)):
        bounded(f"lines of {name} in src/extending, which belongs to no example", examples[name], 0)
    for kind, bound, measured in (
        ("file", FILE_LINES, sorted(((n, p) for p, n in lines.items()), reverse=True)),
        ("function", FUNCTION_LINES, functions(root, files)),
    ):
        for i, (n, name) in enumerate(measured):
            if i < SHOWN or n > bound:
                bounded(f"{kind} {name}", n, bound)
    return report, excesses


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        (root / "src/tile").mkdir(parents=True)
        room, extending = root / "src/tile", root / "src/extending"
        extending.mkdir()
        statement = "  x += 1;\n"
        (room / "function.cc").write_text(f"int f(int x) {{\n{statement * (FUNCTION_LINES - 2)}}}\n")
        (room / "tile_test.cc").write_text("\n" * 2 * ROOM_LINES["tile"])
        (room / "file.h").write_text("\n" * FILE_LINES)
        (extending / "normed_matmul.cc").write_text("\n" * EXAMPLES["the fused operator"][1])
        (extending / "weight_format_isa.cc").write_text("\n" * EXAMPLES["the weight format"][1])
        (extending / "normed_matmul_test.cc").write_text("\n" * 400)
        if measure(root)[1]:
            sys.exit("check_house: a tree within its bounds is refused")
        faults = {
            "a long function": lambda: (room / "function.cc").write_text(f"int f(int x) {{\n{statement * FUNCTION_LINES}}}\n"),
            "a long file": lambda: (room / "file.h").write_text("\n" * (FILE_LINES + 1)),
            "a long operator": lambda: (extending / "normed_matmul.h").write_text("\n"),
            "a long format": lambda: (extending / "block_w5.h").write_text("\n"),
            "an example without a name": lambda: (extending / "other.h").write_text("\n"),
            "a large room": lambda: [(room / f"{i}.cc").write_text("\n" * 400) for i in range(ROOM_LINES["tile"] // 400)],
            "a room without a bound": lambda: ((root / "src/attic").mkdir(), (root / "src/attic/file.h").write_text("\n")),
        }
        for i, (name, make) in enumerate(faults.items(), 1):
            make()
            if measure(root)[1] != i:
                sys.exit(f"check_house: {name} is not found")
    print(f"check_house: finds all {len(faults)} faults")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    report, excesses = measure(pathlib.Path(sys.argv[1] if sys.argv[1:] else ".").resolve())
    print("\n".join(report))
    if excesses:
        sys.exit(f"check_house: {excesses} numbers beyond their bounds")


if __name__ == "__main__":
    main()
