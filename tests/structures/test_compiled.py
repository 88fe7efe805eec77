"""Compiled loops: the same numbers as torch operations, and when they are used. ``test_chain`` and
``test_masks`` try them against enumeration."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp import threads
from structgp.structures import Chain, Rules
from structgp.structures.linear_chain import messages
from structgp.structures.linear_chain.messages import Logs, Scaled, log_partition, pass_messages

if messages.compiled_loops() is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from structgp.structures.linear_chain import lane_exp
from structgp.structures.linear_chain.compiled import Compiled

CLOSE = {torch.float64: 1e-11, torch.float32: 2e-5}


def potentials(
    S: int, B: int, T: int, V: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """With lengths from 0 to T."""
    generator = torch.Generator().manual_seed(S + B + T + V)
    f = torch.randn(S, B, T, V, generator=generator, dtype=dtype)
    g = torch.randn(S, V, V, generator=generator, dtype=dtype)
    lengths = torch.linspace(0, T, B).round().flip(0)
    return f, g, torch.arange(T) < lengths[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(8, 50, 60, 17), (300, 1, 25, 14), (4, 8, 500, 10), (3, 40, 9, 1)])
def test_same_numbers_as_torch_operations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    f, g, mask = potentials(*shape, dtype)
    weight = torch.linspace(-1, 2, shape[1], dtype=dtype).expand(shape[0], -1)
    one, other = Compiled(f, g, mask), Scaled(f.masked_fill(~mask[..., None], 0), g, mask)
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    torch.testing.assert_close(one.log_z, other.log_z, **close)
    for ours, theirs in zip(
        (*one.gradients(weight), *one.walk(), one.node_marginals(), *one.next_variances()),
        (*other.gradients(weight), *other.walk(), other.node_marginals(), *other.next_variances()),
        strict=True,
    ):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE[dtype] * max(1, scale))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_exp_to_two_units_in_the_last_place(dtype: type) -> None:
    lowest = lane_exp.LOWEST[np.dtype(dtype).name]
    x = np.linspace(lowest, 0, 200_001).astype(dtype)
    found = x.copy()
    lane_exp.exp_in_place(found)
    expected = np.exp(x.astype(np.longdouble)).astype(dtype)
    assert (np.abs(found - expected) <= 2 * np.spacing(expected)).all()
    odd = np.array([0.0, -0.0, -np.inf, np.nan, lowest * 1.01], dtype)
    lane_exp.exp_in_place(odd)
    np.testing.assert_array_equal(odd, [1, 1, 0, np.nan, 0])
    assert -lowest > messages.SAFE_SPREAD[torch.from_numpy(x).dtype]


def test_threads_share_the_work_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    f, g, mask = potentials(3, 37, 8, 5)
    weight = torch.ones(3, 37, dtype=f.dtype)
    started = []
    submit = threads.ThreadPoolExecutor.submit

    def counted(*given: Any) -> Any:
        started.append(1)
        return submit(*given)

    monkeypatch.setattr(threads.ThreadPoolExecutor, "submit", counted)
    results = []
    for n, worth in ((1, 1), (2, 1), (4, 1), (4, 10**9)):
        monkeypatch.setattr(threads, "WORTH_A_THREAD", worth)
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        before = len(started)
        found = Compiled(f, g, mask)
        results.append([found.log_z, *found.gradients(weight), *found.walk()])
        assert len(started) - before == (3 * (n - 1) if worth == 1 else 0)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_used_by_the_amount_of_work_alone() -> None:
    large, small = potentials(8, 20, 20, 7), potentials(2, 3, 4, 5)
    assert isinstance(pass_messages(*large), Compiled)
    assert isinstance(pass_messages(*small), Scaled)
    assert isinstance(pass_messages(1000 * large[0], *large[1:]), Logs)
    f, g, mask = large
    assert isinstance(pass_messages(f, g.masked_fill(torch.eye(7) > 0, -torch.inf), mask), Compiled)
    free = torch.ones(7, dtype=torch.bool)
    rules = Rules(~torch.eye(7, dtype=torch.bool), free, free)
    marginals = Chain(rules).marginals(f, g, mask)
    g = g.masked_fill(torch.eye(7) > 0, -torch.inf)
    expected = Logs(f.masked_fill(~mask[..., None], 0), g, mask).node_marginals()
    torch.testing.assert_close(marginals, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("where", ["f", "g"])
def test_a_score_that_is_no_number_says_so(where: str) -> None:
    f, g, mask = potentials(8, 20, 20, 7)
    (f[:, 0] if where == "f" else g)[0, 1, 2] = torch.nan
    value = log_partition(f, g, mask)
    assert value[0, 0].isnan()
    assert value[1:].isfinite().all()


def test_layouts_that_are_not_contiguous() -> None:
    f, g, mask = potentials(8, 20, 20, 7)
    expected = log_partition(f, g, mask)
    turned = f.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(log_partition(turned, g.mT.contiguous().mT, mask), expected)
    one = f[:1].expand(8, -1, -1, -1).requires_grad_()
    value = log_partition(one, g, mask)
    (grad,) = torch.autograd.grad(value, one, torch.ones(8, 1, dtype=f.dtype).expand(8, 20))
    torch.testing.assert_close(grad, Chain().marginals(one, g, mask), rtol=0, atol=1e-12)


def test_scores_changed_between_the_passes_are_noticed() -> None:
    f, g, mask = potentials(8, 20, 20, 7)
    g.requires_grad_()
    moved = f * 1
    value = log_partition(moved, g, mask)
    moved += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("kind", ["Compiled", "Scaled", "Logs"])
def test_nothing_outlives_the_value(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cycle through the graph, which no collector sees."""
    f, g, mask = potentials(8, 20, 20, 7)
    if kind != "Compiled":
        monkeypatch.setattr(messages, "WORTH_COMPILING", float("inf"))
    f = (f * (1000 if kind == "Logs" else 1)).requires_grad_()
    alive = []

    def watched(*given: Tensor) -> messages.Messages:
        found = pass_messages(*given)
        assert type(found).__name__ == kind
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(messages, "pass_messages", watched)
    value = log_partition(f, g, mask)
    assert alive[0]() is not None
    del value
    assert alive[0]() is None


def test_numba_waits_for_work_and_can_be_absent() -> None:
    code = """
import sys
import torch
from structgp.structures.linear_chain.messages import pass_messages
def kind(S, B, T, V):
    f, g, mask = torch.zeros(S, B, T, V), torch.zeros(S, V, V), torch.ones(B, T, dtype=torch.bool)
    return type(pass_messages(f, g, mask)).__name__
print(kind(2, 3, 4, 5), "numba" in sys.modules)
sys.modules["numba"] = None
print(kind(8, 20, 20, 7))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Scaled", "False", "Scaled"]
