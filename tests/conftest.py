"""What several test files share."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

# Before the libraries that start threads: on a busy machine those that wait cost several times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Sums then have one order, matrices this small are slower on several threads, and the workers of
# pytest-xdist do not wait for each other's.
torch.set_num_threads(1)

with warnings.catch_warnings():
    # Warnings are errors here, and GPyTorch's import compiles a function in a way torch gives up.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    import gpytorch  # noqa: F401


@pytest.fixture(scope="session")
def oracles() -> ModuleType:
    """``oracles.py``: everything by enumeration."""
    return _load("oracles.py")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """``optimizers/cases.py``: small problems that every optimiser is tried on."""
    return _load("optimizers/cases.py")


@pytest.fixture(scope="session")
def mixtures() -> ModuleType:
    """``predict/mixtures.py``: chains with several draws, and their average by enumeration."""
    return _load("predict/mixtures.py")


def _load(path: str) -> ModuleType:
    """A module of this folder that is no test; importlib mode puts none on the path."""
    name = "structgp_tests." + path.removesuffix(".py").replace("/", ".")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
