"""The package as a whole: what is imported when, and whose number of threads is heard."""

import ast
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

import ops_transformer


def said(program, **environment):
    """What a program prints in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OPST_NUM_THREADS")}
    return subprocess.check_output([sys.executable, "-c", program], text=True, env={**inherited, **environment}).split()


def test_submodules_are_there_when_they_are_named():
    program = """
import sys, ops_transformer
assert not any("ops_transformer." + name in sys.modules for name in ("flash_attention", "matmul", "quant", "rowwise", "torch"))
assert "torch" not in sys.modules
print(*(getattr(ops_transformer, name).__name__ for name in ("flash_attention", "kv_cache", "matmul", "quant", "rowwise")))
print(set(ops_transformer.__all__) <= set(dir(ops_transformer)), {"hf", "npu", "rowwise", "torch"} <= set(dir(ops_transformer)))
"""
    names = ["flash_attention", "kv_cache", "matmul", "quant", "rowwise"]
    assert said(program) == [f"ops_transformer.{name}" for name in names] + ["True", "True"]
    with pytest.raises(AttributeError, match="no attribute 'rowwize'"):
        ops_transformer.rowwize


THREADS = "import ops_transformer as o; print(o.default_context().num_threads)"
CORES = ops_transformer.Context(num_threads=1).cores


def test_variables_that_say_how_many_threads():
    assert said(THREADS) == [str(CORES)]
    assert said(THREADS, OMP_NUM_THREADS="1") == ["1"]
    assert said(THREADS, OMP_NUM_THREADS="4096") == [str(CORES)]
    assert said(THREADS, OMP_NUM_THREADS="1", OPST_NUM_THREADS="3") == ["3"]


def test_torchs_number_of_threads_is_heard(torch):
    program = """
import torch
import ops_transformer as o
counts = [o.default_context().num_threads]
for n in (1, 2, 1000, 1):
    torch.set_num_threads(n)
    counts.append(o.default_context().num_threads)
same = o.default_context() is o.default_context()
o.set_num_threads(3)
counts.append(o.default_context().num_threads)
torch.set_num_threads(2)
counts.append(o.default_context().num_threads)
o.set_num_threads(0)
torch.set_num_threads(1)
print(*counts, o.default_context().num_threads, same)
"""
    at_most = [str(min(n, CORES)) for n in (1, 2, 1000, 1)]
    assert said(program)[1:] == [*at_most, "3", "3", "1", "True"]
    assert said(program, OPST_NUM_THREADS="2")[:5] == ["2"] * 5
    # torch may come after the first call.
    late = "import ops_transformer as o; o.default_context(); import torch; torch.set_num_threads(1); " + THREADS
    assert said(late) == ["1"]


def test_workers_of_a_data_loader_take_one_thread_each(torch):
    program = """
import torch, ops_transformer as o
class Threads(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return o.default_context().num_threads
o.default_context()
if __name__ == "__main__":
    print(*(int(n) for n in torch.utils.data.DataLoader(Threads(), num_workers=2)))
"""
    assert said(program) == ["1", "1"]


def test_imports_go_one_way():
    """Those inside functions too: the floors are in docs/architecture.md."""
    # `./x check python` links folders, which rglob does not enter.
    package = pathlib.Path(ops_transformer.__file__).resolve().parent
    below = {path.relative_to(package).with_suffix("").as_posix().replace("/", "."): set() for path in package.rglob("*.py")}
    for name in set(below) - {"__init__", "npu.__init__", "flash_attn.__init__"}:
        source = (package / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level:
                home = f"{name.partition('.')[0]}." if "." in name and node.level == 1 else ""
                below[name].update(home + other for other in ([node.module] if node.module else [alias.name for alias in node.names]))
    assert below["npu.fusion_attention"] > {"npu._edge", "flash_attention"}
    assert below["flash_attn.flash_attn_interface"] > {"flash_attn._checks", "flash_attention", "kv_cache"}
    assert below["torch"] and below["_calls"]
    graphlib.TopologicalSorter(below).prepare()  # an error that names the files of a circle
