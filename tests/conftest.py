"""What several test files share."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; threads of several processes that wait for each other are slower than one.
    torch.set_num_threads(1)

with warnings.catch_warnings():
    # Warnings are errors here, and GPyTorch's import compiles a function in a way torch gives up.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    import gpytorch  # noqa: F401


@pytest.fixture(scope="session")
def oracles() -> ModuleType:
    """The module ``oracles.py`` beside this file."""
    name = "structgp_test_oracles"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("oracles.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
