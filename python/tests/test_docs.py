"""The Python examples of the documentation run, in order: a page's share their names."""

import os
import pathlib
import re

import numpy as np
import pytest
from conftest import import_torch, required

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
# What stands behind ```python.
KINDS = {"python.md": ("", "torch", "model"), "attention.md": ("",), "kv_cache.md": ("",), "npu.md": ("torch",),
         "flash_attn.md": ("torch",), "articles.md": ("torch",)}


def examples(page):
    """[(kind, code)] of a page."""
    return re.findall(r"^```python *(\w*)\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page, kind", [(page, kind) for page, kinds in KINDS.items() for kind in kinds])
def test_examples(page, kind):
    model_path = os.environ.get("OPST_MODEL", "")
    if kind == "torch":
        import_torch()
    if kind == "model" and not os.path.isfile(model_path) and not required("model"):
        pytest.skip("the model file is not there (OPST_MODEL)")
    blocks = [code for wanted, code in examples(page) if wanted == kind]
    assert blocks
    names = {"model_path": model_path, "np": np}
    for code in blocks:
        exec(compile(code, page, "exec"), names)


def test_every_example_is_run():
    """An example of another page, or of a kind that nobody runs, would be text."""
    for path in DOCS.glob("*.md"):
        assert {kind for kind, _ in examples(path.name)} <= set(KINDS.get(path.name, ())), path.name


def test_readmes_say_the_same():
    """The Chinese README has the links, commands, rows and code of the English one."""
    pages = [(DOCS.parent / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")]
    code = r"^(?:opst::|from |import |out = |q, k, v = )[^/\n]*"
    pages[0] = pages[0].replace("| room |", "| |")
    for what in (r"\]\(([^)]+)\)", r"^    ((?:\./x|opst|FetchContent_Declare|apt-get|python3) ?\S*)", r"^\| `?([A-Za-z_]\w*)", r"^(##) ", code,
                 r"\d+\.\d\d"):
        english, chinese = ([found for found in re.findall(what, page, re.M) if not found.startswith("README")] for page in pages)
        assert english and sorted(english) == sorted(chinese), what
