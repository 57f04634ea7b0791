"""OPST_REQUIRE: where something that it names is missing, no test passes."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("names, model, refusal", [
    ("numpy", "", None),
    ("numpy,no_such_package", "", "OPST_REQUIRE names no_such_package, which is not installed"),
    ("model", "/no/such/file.gguf", "OPST_REQUIRE names model, which is not at OPST_MODEL"),
])
def test_required_things_are_there(names, model, refusal):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", TESTS / "test_docs.py"], text=True,
        capture_output=True, env={**os.environ, "OPST_REQUIRE": names, "OPST_MODEL": model})
    assert (result.returncode == 0) == (refusal is None), result.stdout
    if refusal is not None:
        assert refusal in result.stdout + result.stderr
