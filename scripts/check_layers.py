#!/usr/bin/env python3
"""Who may include whom. Fails with file:line and the rule for every include that breaks it.

    check_layers.py [ROOT]        checks the tree
    check_layers.py --self-test   checks the checker: a small tree with one violation of each rule

The table below is the house plan of docs/architecture.md. A room is a folder of src/. Kernel code, which is every source
that a CMakeLists.txt names in opst_kernels(SOURCE ...) and all that it includes, has a rule of its own: an inline
function compiled with AVX-512 flags may be the copy that the linker keeps for everyone, so it takes nothing that
defines functions outside the level's namespace.
"""

import pathlib
import re
import sys
import tempfile

# room -> rooms whose headers it may include besides its own, public ones counted (PUBLIC_HEADER_ROOMS)
ROOMS = {
    "core": set(),
    "simd": set(),
    "tile": {"simd"},
    "machine": {"core", "simd"},
    "quant": {"core", "machine", "simd", "tile"},
    "rowwise": {"core", "machine", "simd", "tile"},
    "kv_cache": {"core", "machine", "simd", "tile", "quant", "rowwise"},
    "attention": {"core", "machine", "simd", "tile", "quant", "kv_cache"},
    "matmul": {"core", "machine", "simd", "tile", "quant"},
    "moe": {"core", "machine", "simd", "tile", "quant", "rowwise", "matmul"},
    "mc2": {"core", "machine", "quant", "matmul", "moe", "attention"},
    # The examples of docs/extending.md.
    "extending": {"core", "machine", "simd", "tile", "quant", "matmul", "attention"},
    # What tests share. Measuring the peak needs vectors and threads.
    "testing": {"core", "machine", "simd"},
    # Ordinary users of the public headers; the graph checks declared tensors and pages as the operators check theirs.
    "graph": {"core", "kv_cache"},
    # Names of articles' samples, over public headers.
    "articles": {"core"},
    # The C interface translates; of the machine it takes contexts whose scratch memory is lent.
    "c_api": {"core", "machine"},
    # Its exceptions end where the operators' do (core/guarded.h).
    "model": {"core"},
    "tools": {"model"},
    "python": {"model"},
    "examples": set(),
}
USERS = {"graph", "articles", "c_api", "model", "tools", "python", "examples"}

# include/opst/NAME.h belongs to the room of that name, except:
PUBLIC_HEADER_ROOMS = {"status": "core", "tensor": "core", "dtype": "core", "context": "machine",
                       "attention_backward": "attention", "block_mask": "attention",
                       "block_patterns": "attention", "communicator": "mc2", "grouped_matmul": "matmul", "lightning_indexer": "attention",
                       "moe_layer": "moe", "sequence_parallel": "mc2", "expert_parallel": "mc2",
                        "opst": "c_api", "opst_types": "c_api",
                       "page_layout": "kv_cache", "quant_format": "quant", "rope_style": "rowwise", "sparse_indices": "attention"}

# Kernel code may also include these, which hold types and constants only.
PLAIN_DATA = {"include/opst/dtype.h", "include/opst/page_layout.h", "include/opst/quant_format.h", "src/quant/formats.h"}
# An example stands for what is written in another room.
KERNEL_EXAMPLES = {"extending": {"quant", "matmul", "attention"}}
KERNEL_STD = {"cstdint", "cstddef", "cstring", "cfloat", "climits", "type_traits", "immintrin.h", "arm_neon.h"}

# Vectors are written as Vec verbs everywhere else.
INTRINSICS = {"immintrin.h", "arm_neon.h", "x86intrin.h", "xmmintrin.h", "emmintrin.h"}
INTRINSICS_ROOMS = {"simd", "tile", "machine", "testing"}
INTRINSICS_RULE = "intrinsics belong in simd and tile"

STD = set(
    """algorithm any array atomic barrier bit bitset charconv chrono compare concepts condition_variable coroutine deque
    exception execution expected filesystem format forward_list fstream functional future initializer_list iomanip ios
    iosfwd iostream istream iterator latch limits list locale map memory memory_resource mutex new numbers numeric
    optional ostream queue random ranges ratio regex scoped_allocator semaphore set shared_mutex source_location span
    sstream stack stdexcept stop_token streambuf string string_view strstream syncstream system_error thread tuple
    type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector version
    cassert cctype cerrno cfenv cfloat cinttypes climits clocale cmath csetjmp csignal cstdarg cstddef cstdint cstdio
    cstdlib cstring ctime cuchar cwchar cwctype""".split()
)
C_STD = {"stdint.h"}  # in headers that C includes
SYSTEM = re.compile(r"(sys|linux|asm)/.*|(unistd|fcntl|sched|pthread|signal|errno|dlfcn|time|poll|termios|cpuid)\.h")

# header prefix -> who may use the package
PACKAGES = [
    (re.compile(r"(gtest|gmock)/"), "tests", lambda f: f.is_test or f.room == "testing"),
    (re.compile(r"benchmark/"), "benches", lambda f: f.is_bench or f.room == "testing"),
    (re.compile(r"Random123/"), "tests", lambda f: f.is_test),
    (re.compile(r"nlohmann/"), "tests and tools", lambda f: f.is_test or f.room == "tools"),
    (re.compile(r"CLI/"), "tools", lambda f: f.room == "tools"),
    (re.compile(r"nanobind/"), "python", lambda f: f.room == "python"),
    (re.compile(r"utf8proc\.h"), "model and tools", lambda f: f.room in {"model", "tools"}),
]

INTRINSIC = re.compile(
    r"\b(_mm(256|512)?_\w+|__m(128|256|512)\w*|__mmask\d+|_(pdep|pext)_u\d+|_cvt\w+_s[hs]"
    r"|b?float(16|32|64)x\d+_t|u?int\d+x\d+_t"
    r"|v(ld|st|dup|mov|add|sub|mul|fm|ml|div|sqrt|max|min|abs|neg|rnd|cvt|reinterpret|get|set|and|orr|eor|bsl|c[eglt][eqt]|zip"
    r"|uzp|trn|tbl|sh[lr]|dot|bfdot|ext|combine)\w*_(f|s|u|p|bf)(8|16|32|64))\b"
)
# Tables by level: the tests of simd, which lies below machine, take them from there.
LEVELS = "src/machine/levels.h"
BY_LEVEL = re.compile(r"OPST_KERNELS_BY_LEVEL\(\s*OPST_(\w+)_LEVELS\b")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>|(\S+))')
KERNEL_SOURCE = re.compile(r"opst_kernels\s*\(\s*(?:TARGET\s+\S+\s+)?SOURCE\s+(\S+)")
KERNEL_FAMILY = re.compile(r"opst_kernels\s*\([^)]*\bFAMILY\s+(\w+)")


class File:
    def __init__(self, root, path):
        self.path = path.relative_to(root).as_posix()
        parts = self.path.split("/")
        stem = path.stem
        self.is_public = self.path.startswith("include/")
        if self.is_public:
            self.room = PUBLIC_HEADER_ROOMS.get(stem, stem)
        else:
            self.room = parts[1] if parts[0] == "src" else parts[0]
        self.is_bench = stem.endswith("_bench")
        self.is_reference = stem in {"reference", "judge"} or stem.endswith("_reference")
        self.includes = []  # (line number, quoted path or None, angled path or None)
        self.intrinsics = []  # line numbers
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if match:
                self.includes.append((number, match.group(1), match.group(2)))
            if INTRINSIC.search(line.split("//")[0]):
                self.intrinsics.append(number)
        self.is_test_header = False  # find_test_headers
        self.is_test = stem.endswith(("_test", "_fuzz"))


def read_tree(root):
    files = {}
    for top in ("include", "src", "tools", "python", "examples"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in {".h", ".cc"} and path.is_file():
                file = File(root, path)
                files[file.path] = file
    return files


def resolve(root, file, name):
    for base in (root / "include", root / "src", root, (root / file.path).parent):
        path = base / name
        if path.is_file():
            return path.resolve().relative_to(root).as_posix()
    return None


def find_test_headers(root, files):
    """A room's header that includes the test framework, a reference or another such header is for tests itself."""
    headers = [
        f for f in files.values() if f.path.endswith(".h") and not (f.is_public or f.is_reference or f.room == "testing")
    ]
    grown = True
    while grown:
        grown = False
        for file in headers:
            for _, quoted, angled in file.includes:
                target = quoted and files.get(resolve(root, file, quoted))
                for_tests = target and (
                    target.is_test_header or (file.room != "tools" and (target.is_reference or target.room == "testing"))
                )
                if not file.is_test and (for_tests or re.match(r"(gtest|gmock)/", angled or "")):
                    file.is_test_header = file.is_test = grown = True


def kernel_files(root, files):
    """path -> the kernel source that includes it, for kernel code"""
    found = {}
    for cmake in sorted((root / "src").rglob("CMakeLists.txt")):
        text = re.sub(r"#.*", "", cmake.read_text(encoding="utf-8"))
        for name in KERNEL_SOURCE.findall(text):
            source = (cmake.parent / name).relative_to(root).as_posix()
            todo = [source] if source in files else []
            while todo:
                path = todo.pop()
                if path in found:
                    continue
                found[path] = source
                for _, quoted, _ in files[path].includes:
                    target = quoted and resolve(root, files[path], quoted)
                    # A header that must not be here is reported once, where it is included.
                    if target in files and kernel_may_include(files[path].room, files[target]):
                        todo.append(target)
    return found


def check_families(root, files):
    """A room selects its kernels (OPST_KERNELS_BY_LEVEL) from the families that its CMakeLists.txt compiles: a smaller
    one there would not link, a larger one would compile kernels that nothing selects."""
    problems = []
    for cmake in sorted((root / "src").rglob("CMakeLists.txt")):
        compiled = set(KERNEL_FAMILY.findall(re.sub(r"#.*", "", cmake.read_text(encoding="utf-8"))))
        room = cmake.parent.relative_to(root).as_posix() + "/"
        selected = set()
        for path in files:
            if path.startswith(room) and path.endswith(".cc"):
                selected |= {name.lower() for name in BY_LEVEL.findall((root / path).read_text(encoding="utf-8"))}
        if compiled != selected:
            listed = [", ".join(sorted(names)) or "none" for names in (compiled, selected)]
            problems.append(f"{room}CMakeLists.txt:1: compiles kernels of the families {listed[0]}, but the room selects from {listed[1]}")
    return problems


def kernel_may_include(room, target):
    if target.path in PLAIN_DATA:
        return True
    return not target.is_public and target.room in {"simd", "tile", room} | KERNEL_EXAMPLES.get(room, set())


def check_quoted(file, target):
    """The broken rule, or None."""
    if file.is_public:
        if not target.is_public:
            return "a public header includes public headers only"
    if target.is_test_header and not (file.is_test or file.is_bench):
        return "this header includes what is for tests, so it is for tests itself"
    may_compare = file.is_test or file.is_bench or file.is_reference or file.room in {"tools", "testing"}
    if target.is_reference and not may_compare:
        return "references are for tests, benches and tools"
    if target.room == "testing" and file.room != "testing":
        allowed = file.is_test or file.is_bench or file.is_reference or file.room == "tools"
        return None if allowed else "src/testing is for tests, benches and tools"
    if file.is_reference:
        same_room = target.is_public and target.room == file.room
        allowed = target.room == "core" or target.is_reference or same_room or target.path in PLAIN_DATA
        return None if allowed else "a reference shares nothing with the kernels: core, public headers of its room"
    if target.is_reference or target.is_test_header or target.room == file.room:
        return None
    if file.room in USERS and target.is_public:
        return None
    if target.room in ROOMS[file.room]:
        return None
    if file.is_test or file.is_bench:
        # A test may build its input with any operator's public header.
        if target.is_public or (target.path == LEVELS and file.room == "simd"):
            return None
    allowed = ", ".join(sorted(ROOMS[file.room])) or ("public headers" if file.room in USERS else "nothing else")
    return f"{file.room} may not include {target.room} (it may include: {allowed})"


def check_angled(file, name):
    if name in INTRINSICS:
        return None if file.room in INTRINSICS_ROOMS else INTRINSICS_RULE
    if name == "cpuid.h" and file.room not in {"machine", "testing"}:
        return "only machine asks the processor what it can do"
    if name in STD or SYSTEM.fullmatch(name):
        return None
    if name in C_STD and file.is_public and file.room == "c_api":
        return None
    for pattern, who, allowed in PACKAGES:
        if pattern.match(name):
            return None if allowed(file) else f"<{name}> is for {who}"
    return f"<{name}> is neither a standard header nor one of the chosen packages"


def check(root):
    root = root.resolve()
    files = read_tree(root)
    find_test_headers(root, files)
    kernels = kernel_files(root, files)
    problems = check_families(root, files)
    for file in files.values():
        if file.room not in ROOMS:
            problems.append(f"{file.path}:1: room {file.room} is not in the table of check_layers.py")
            continue
        source = kernels.get(file.path)
        if file.room not in INTRINSICS_ROOMS:
            problems += [f"{file.path}:{line}: {INTRINSICS_RULE}" for line in file.intrinsics]
        for line, quoted, angled in file.includes:
            rule = None
            if quoted is not None:
                path = resolve(root, file, quoted)
                target = files.get(path)
                if target is None:
                    rule = f'"{quoted}" is no header of this tree'
                elif target.room not in ROOMS:
                    continue
                elif source and not kernel_may_include(file.room, target):
                    rule = (
                        f'kernel code ({source}) may not include "{quoted}": simd, tile, its own room, '
                        "or plain data only"
                    )
                elif target.path not in PLAIN_DATA or not (source or file.room in {"simd", "tile"}):
                    rule = check_quoted(file, target)
            elif angled is not None:
                if source and angled not in KERNEL_STD:
                    rule = f"kernel code ({source}) may not include <{angled}>"
                else:
                    rule = check_angled(file, angled)
            else:
                rule = "an include names its header"
            if rule:
                problems.append(f"{file.path}:{line}: {rule}")
    return problems, len(files), len(kernels)


def self_test():
    tree = {
        "include/opst/dtype.h": "#include <cstdint>\n",
        "include/opst/tensor.h": '#include <string>\n#include "opst/dtype.h"\n',
        "include/opst/context.h": '#include "opst/tensor.h"\n',
        "include/opst/attention.h": '#include "opst/context.h"\n#include "attention/plan.h"\n',
        "src/core/int_math.h": "#include <cstdint>\n",
        "src/core/bad.cc": '#include "machine/pool.h"\n',
        "src/core/levels_test.cc": '#include "machine/levels.h"\n',
        "src/machine/levels.h": '#include "opst/context.h"\n',
        "src/simd/CMakeLists.txt": "opst_kernels(TARGET simd_test\n  SOURCE verbs_isa.cc FAMILY all)\n",
        "src/simd/verbs_isa.cc": '#include "simd/vec.h"\n',
        "src/simd/simd_test.cc": '#include "machine/levels.h"\nOPST_KERNELS_BY_LEVEL(OPST_ALL_LEVELS, simd_test, T, t, f)\n',
        "src/machine/pool.h": "#include <atomic>\n#include <linux/futex.h>\n",
        "src/simd/vec.h": "#include <cstdint>\n#include <immintrin.h>\n",
        "src/tile/softmax.h": '#include <algorithm>\n#include "simd/vec.h"\n',
        "src/rowwise/norm.h": '\n#include "core/int_math.h"\n',
        "src/rowwise/CMakeLists.txt": "opst_kernels(SOURCE rows_isa.cc FAMILY int8)\n",
        "src/rowwise/rows_isa.cc": "float32x4_t x = vld1q_f32(p);\nauto y = _pext_u32(1, 2);\n__mmask16 z;\nint32_t v_f32;\n",
        "src/rowwise/rowwise.cc": "OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, rowwise, Kernels, kKernels, kernels)\n",
        "src/attention/CMakeLists.txt": "opst_kernels(SOURCE kernels_isa.cc FAMILY float)  # FAMILY all\n",
        "src/attention/plan.h": '#include "opst/context.h"\n',
        "src/attention/forward.h": '#include "opst/dtype.h"\n#include "core/int_math.h"\n#include "tile/softmax.h"\n'
        "auto zero = _mm512_setzero_ps();\n// not _mm512_setzero_ps\n",
        "src/attention/kernels_isa.cc": '#include "attention/forward.h"\n#include "opst/tensor.h"\n#include <vector>\n',
        "src/attention/reference.h": '#include "opst/attention.h"\n#include "attention/forward.h"\n',
        "src/attention/attention.cc": (
            '#include "attention/plan.h"\n#include "core/int_math.h"\n#include <immintrin.h>\n#include "rowwise/norm.h"\n'
            '#include "attention/reference.h"\n#include "testing/compare.h"\n#include <gtest/gtest.h>\n#include "nowhere.h"\n'
            "#include <boost/any.hpp>\n#include WHAT\n"
            "OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, attention, Kernels, kKernels, kernels)\n"
        ),
        "src/attention/attention_test.cc": (
            '#include <gtest/gtest.h>\n#include "attention/reference.h"\n#include "testing/compare.h"\n'
            '#include "attention/cases.h"\n'
        ),
        "src/attention/cases.h": "#include <gtest/gtest.h>\n",
        "src/attention/leak.h": '#include "attention/reference.h"\n',
        "src/attention/plan.cc": '#include "attention/cases.h"\n#include "attention/leak.h"\n',
        "src/testing/compare.h": '#include "opst/tensor.h"\n',
        "src/model/llama.cc": '#include "opst/attention.h"\n#include <utf8proc.h>\n#include "quant/formats.h"\n',
        "src/lounge/sofa.h": "\n",
        "tools/opst/main.cc": '#include <CLI/CLI.hpp>\n#include "attention/reference.h"\n#include "attention/plan.h"\n',
    }
    expected = {
        "include/opst/attention.h:2",
        "src/core/bad.cc:1",
        "src/core/levels_test.cc:1",
        "src/rowwise/CMakeLists.txt:1",
        "src/rowwise/rows_isa.cc:1",
        "src/rowwise/rows_isa.cc:2",
        "src/rowwise/rows_isa.cc:3",
        "src/tile/softmax.h:1",
        "src/attention/forward.h:2",
        "src/attention/forward.h:4",
        "src/attention/kernels_isa.cc:2",
        "src/attention/kernels_isa.cc:3",
        "src/attention/reference.h:2",
        "src/attention/attention.cc:3",
        "src/attention/attention.cc:4",
        "src/attention/attention.cc:5",
        "src/attention/attention.cc:6",
        "src/attention/attention.cc:7",
        "src/attention/attention.cc:8",
        "src/attention/attention.cc:9",
        "src/attention/attention.cc:10",
        "src/attention/plan.cc:1",
        "src/attention/plan.cc:2",
        "src/model/llama.cc:3",
        "src/lounge/sofa.h:1",
        "tools/opst/main.cc:3",
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, text in tree.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        problems, _, num_kernel_files = check(pathlib.Path(folder))
    found = {":".join(problem.split(":")[:2]) for problem in problems}
    for place in sorted(expected - found):
        print(f"self-test: the violation at {place} was not found")
    for place in sorted(found - expected):
        print(f"self-test: {place} was reported: {[p for p in problems if p.startswith(place + ':')]}")
    if num_kernel_files != 7:
        print(f"self-test: {num_kernel_files} files counted as kernel code, not 7")
    return found == expected and num_kernel_files == 7


def main(arguments):
    if arguments == ["--self-test"]:
        if not self_test():
            return 1
        print("layers: the self-test found every planted violation and nothing else")
        return 0
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    problems, num_files, num_kernel_files = check(root)
    for problem in problems:
        print(problem)
    print(f"layers: {num_files} files, {num_kernel_files} of them kernel code, {len(problems)} broken rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
