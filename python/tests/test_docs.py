"""The examples of docs/python.md and docs/npu.md run, in order."""

import os
import pathlib
import re

import numpy as np
import pytest
from conftest import import_torch, required

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python *(\w*)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("kind", ["", "torch", "model"])
def test_examples(kind):
    model_path = os.environ.get("OPST_MODEL", "")
    if kind == "torch":
        import_torch()
    if kind == "model" and not os.path.isfile(model_path) and not required("model"):
        pytest.skip("the model file is not there (OPST_MODEL)")
    blocks = [code for wanted, code in BLOCKS if wanted == kind]
    assert blocks
    names = {"model_path": model_path, "np": np}
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)


def test_examples_of_the_device_page():
    import_torch()
    page = PAGE.with_name("npu.md")
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    names = {}
    for code in blocks:
        exec(compile(code, str(page), "exec"), names)
