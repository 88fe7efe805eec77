"""What tests of GPU kernels share: they run on a CUDA device (marker ``gpu``), or without one in Triton's
interpreter, which is chosen before the kernels are imported, and so in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# What needs kernels to run on: deselected without a device, but by the interpreter's own process.
on_kernels = pytest.mark.gpu


def run_interpreted(path: str) -> None:
    """The tests of a module that are marked with ``on_kernels``."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install structgp[gpu-test]")
    if INTERPRETED:
        pytest.skip("this is the interpreter")
    command = [sys.executable, "-m", "pytest", path, "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
