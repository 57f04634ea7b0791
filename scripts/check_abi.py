#!/usr/bin/env python3
"""The binary interface of the C library (include/opst/opst.h) against the list in the tree, scripts/opst_1.abi.

    check_abi.py LIBRARY          compares headers and library (libopst.a or libopst.so) with the list
    check_abi.py --write LIBRARY  writes the list anew, for an interface that is meant to grow
    check_abi.py --self-test      checks the checker: a change of each kind must be found

The list has a line for each function with its types, each number, each member of a struct with type and place, and each
macro. A line that vanishes or changes breaks programs that were compiled before; one that is new joins the list. In the
shared library the functions have the version OPST_1.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "scripts/opst_1.abi"
VERSION = "OPST_1"
HEADER = "opst/opst.h"


def run(*command, **more):
    return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout


def preprocessed(include):
    source = f'#include "{HEADER}"\n'
    text = run("cc", "-std=c11", "-E", "-P", f"-I{include}", "-xc", "-", input=source)
    macros = run("cc", "-std=c11", "-E", "-dM", f"-I{include}", "-xc", "-", input=source)
    return text[text.index("opst_status;") :], macros


def functions_of(text):
    """name -> "status name(types)" """
    found = {}
    for result, name, arguments in re.findall(r"([\w*\s]+?)\s*\b(opst_\w+)\(([^()]*)\);", text):
        types = [re.sub(r"\s*\b\w+$", "", a.strip()) if a.strip() != "void" else "void" for a in arguments.split(",")]
        found[name] = f"{' '.join(result.split()).split(';')[-1].strip()} {name}({', '.join(' '.join(t.split()) for t in types)})"
    return found


def members_of(text):
    """(struct, type, member) of every struct"""
    found = []
    for body, name in re.findall(r"typedef struct \w+ \{([^}]*)\} (\w+);", text):
        for kind, member in re.findall(r"([\w\s*]+?)\s*(\w+(?:\[\d+\])?);", body):
            found.append((name, " ".join(kind.split()), member))
    return found


def interface(include):
    """the list's lines, and the names of the functions"""
    text, macros = preprocessed(include)
    functions, members = functions_of(text), members_of(text)
    lines = [f"function {line}" for line in functions.values()]
    lines += [f"number {name} = {value}" for name, value in re.findall(r"\b(OPST_\w+) = (-?\d+)", text)]
    lines += [f"type {' '.join(kind.split())} {name}" for kind, name in re.findall(r"typedef ([\w\s]+?) (opst_\w+);", "typedef int32_t " + text)]
    lines += [f"macro {name} {' '.join(value.split())}" for name, value in re.findall(r"#define (OPST_\w+) (.+)", macros)]
    places = [f'printf("struct {name} %zu bytes\\n", sizeof({name}));' for name in dict.fromkeys(m[0] for m in members)]
    for name, kind, member in members:
        bare = member.split("[")[0]
        places.append(f'printf("member {name}.{member} {kind} at %zu\\n", offsetof({name}, {bare}));')
    program = f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {"".join(places)} return 0; }}\n'
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/places"
        run("cc", "-std=c11", f"-I{include}", "-xc", "-", "-o", binary, input=program)
        lines += run(binary).splitlines()
    return sorted(lines), set(functions)


def symbols(library):
    """name -> version (None in a static library) of what the library defines"""
    shared = ".so" in library.name
    options = ["-D", "--with-symbol-versions"] if shared else []
    found = {}
    for name, version in re.findall(r" T (opst_\w+)(?:@@?(\w+))?$", run("nm", "--defined-only", *options, str(library)), re.M):
        found[name] = version or None
    return found, shared


def compare(lines, listed, functions, defined, shared):
    problems = [f"vanished or changed: {line}" for line in sorted(set(listed) - set(lines))]
    problems += [f"not in the list: {line}" for line in sorted(set(lines) - set(listed))]
    problems += [f"declared, but not in the library: {name}" for name in sorted(functions - set(defined))]
    problems += [f"in the library, but not declared: {name}" for name in sorted(set(defined) - functions)]
    if shared:
        problems += [f"has version {v}, not {VERSION}: {n}" for n, v in sorted(defined.items()) if v != VERSION]
    return problems


def self_test():
    listed, functions = interface(ROOT / "include")
    defined = dict.fromkeys(functions, VERSION)
    if compare(listed, listed, functions, defined, True):
        sys.exit("check_abi: an interface like its list is refused")
    faults = {
        "OPST_BF16 = 2": "OPST_BF16 = 12",
        "int32_t rank;": "int64_t rank;",
        "int64_t strides[OPST_MAX_RANK];\n": "",
        "opst_executor_destroy(opst_executor* executor)": "opst_executor_destroy(opst_executor* executor, int32_t now)",
        "const char* opst_version(void);": "",
        "#define OPST_MAX_RANK 5": "#define OPST_MAX_RANK 6",
        "typedef int32_t opst_dtype": "typedef int64_t opst_dtype",
    }
    for old, new in faults.items():
        with tempfile.TemporaryDirectory() as folder:
            times = 0
            for name in ("opst.h", "opst_types.h"):
                text = (ROOT / "include/opst" / name).read_text()
                times += text.count(old)
                path = pathlib.Path(folder) / "opst" / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text.replace(old, new))
            if times == 0:
                sys.exit(f"check_abi: the fault in {old!r} cannot be planted")
            changed, declared = interface(folder)
            if not any(p.startswith("vanished") for p in compare(changed, listed, declared, defined, True)):
                sys.exit(f"check_abi: {old!r} became {new!r}, which was not found")
    name = min(functions)
    for what, wrong in {
        "a symbol that vanished": {k: v for k, v in defined.items() if k != name},
        "a symbol that nobody declares": {**defined, "opst_secret": VERSION},
        "a symbol of another version": {**defined, name: "OPST_2"},
        "a symbol without a version": {**defined, name: None},
    }.items():
        if len(compare(listed, listed, functions, wrong, True)) != 1:
            sys.exit(f"check_abi: {what} is not found")
    print(f"check_abi: finds all {len(faults) + 4} faults")


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    lines, functions = interface(ROOT / "include")
    defined, shared = symbols(pathlib.Path(arguments[-1]))
    if arguments[0] == "--write":
        LIST.write_text("\n".join(lines) + "\n")
    problems = compare(lines, LIST.read_text().splitlines(), functions, defined, shared)
    print("\n".join(problems + [f"check_abi: {len(lines)} lines, {len(defined)} symbols, {len(problems)} problems"]))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
