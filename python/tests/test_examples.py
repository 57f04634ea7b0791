"""The examples in Python run, in their quick form."""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import required

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["train_long_context", "train_mixture", "diffusion_shapes"])
def test_example(name, tmp_path):
    for package in ("torch", "matplotlib", "tqdm"):
        if not required("torch"):
            pytest.importorskip(package, reason=f"{package} is not installed (scripts/requirements-examples.txt)")
    plot = tmp_path / "plot.png"
    result = subprocess.run([sys.executable, FOLDER / f"{name}.py", "--quick", "--plot", plot], text=True,
                            capture_output=True, env={**os.environ, "MPLCONFIGDIR": str(tmp_path), "OMP_WAIT_POLICY": "passive"})
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    if name == "train_mixture":
        assert "times as fast as the loop" in result.stdout
    if name == "train_long_context":
        assert "largest difference" in result.stdout and "MiB extra at the peak" in result.stdout


def test_select_keys():
    result = subprocess.run([sys.executable, FOLDER / "select_keys.py", "--quick"], text=True, capture_output=True)
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    assert "largest difference" in result.stdout
