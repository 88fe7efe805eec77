"""What several test files share."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Before the libraries that start threads: on a busy machine those that wait cost several times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Sums then have one order, matrices this small are slower on several threads, and the workers of
# pytest-xdist do not wait for each other's.
torch.set_num_threads(1)

with warnings.catch_warnings():
    # Warnings are errors here, and GPyTorch's import compiles a function in a way torch gives up.
    warnings.filterwarnings("ignore", "`torch.jit.script")  # of one category or another
    import gpytorch  # noqa: F401

from structgp.plan import held_out  # noqa: E402
from structgp.plan.choices import Choice  # noqa: E402

CHOOSE = held_out.choose


@pytest.fixture(scope="session", autouse=True)
def _plain_fits() -> Iterator[None]:
    """Fits count every sequence once: to choose how often takes several times as long. In tests marked
    ``held_out`` they choose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "choose", _count_once)
        yield


def _count_once(options: Any, plan: Any, *_: Any) -> tuple[Any, None]:
    return replace(plan, data_weight=Choice(plan.data_weight.value or 1.0, plan.data_weight.reason)), None


@pytest.fixture(autouse=True)
def _choosing_fits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("held_out"):
        monkeypatch.setattr(held_out, "choose", CHOOSE)


@pytest.fixture(scope="session")
def oracles() -> ModuleType:
    """``oracles.py``: everything by enumeration."""
    return _load("oracles.py")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """``inference/cases.py``: small problems that every optimiser is tried on."""
    return _load("inference/cases.py")


@pytest.fixture(scope="session")
def mixtures() -> ModuleType:
    """``answers/mixtures.py``: chains with several draws, and their average by enumeration."""
    return _load("answers/mixtures.py")


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


# Seconds each, and what they try is tried by others of their kind in less: `slow` without a mark there.
LONG = re.compile(
    r"test_the_reported_variance_is_honest\[surrogate.*-(near|wrong)\]"
    r"|test_components_with_every_inference\[lbfgs\]"
    r"|test_one_seed_one_fit_to_the_last_bit\[adam\]"
    r"|test_every_inference_fits\[paper-stochastic-True\]"
    r"|test_every_gradient_fits\[pathwise-surrogate\]"
    r"|test_the_chains_bound\[(blocks-full table|adam-no transitions)\]"
    r"|test_a_full_table_of_regression\[saga-full\]"
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LONG.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
