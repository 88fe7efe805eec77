"""Curvature position by position: the diagonal of the whole, by enumeration for tables."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.gp import contrasts
from structgp.structures import Chain, Piecewise
from structgp.structures.base import Curvature

V = 3


def local_transitions(table: Any) -> np.ndarray:
    """(V, V) sum over neighbours of p (1 - p)."""
    both = table.on[:, :-1, :, None] * table.on[:, 1:, None, :]  # (V^T, T-1, V, V)
    p = np.tensordot(table.prob, both, 1)
    return (p * (1 - p)).sum(0).astype(float)


def some_scores(lengths: tuple[int, ...], seed: int, size: float = 1.0) -> list[Tensor]:
    """f, g, y, mask of two draws; nonsense at padding."""
    rng = np.random.default_rng(seed)
    B, T = len(lengths), max(lengths) + 1
    f = torch.from_numpy(size * rng.normal(size=(2, B, T, V)))
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    g = torch.from_numpy(size * rng.normal(size=(2, V, V)))
    return [f, g, torch.from_numpy(rng.integers(0, V, (B, T))), mask]


BASES = {"labels": None, "contrasts": contrasts(torch.tensor([4.0, 2.0, 1.0]))}


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("size", [1.0, 400.0], ids=["probabilities", "logarithms"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_local_curvature_is_the_diagonal(basis: str, size: float, lengths: list[int], seed: int) -> None:
    given = some_scores(tuple(lengths), seed, size)
    whole = Chain().curvature(*given, BASES[basis]).node
    found = Chain().local_curvature(*given, BASES[basis])
    expected = whole.diagonal(dim1=-1, dim2=-2).mT
    assert found.node.shape == (*given[3].shape, V if basis == "labels" else V - 1)
    torch.testing.assert_close(found.node, expected.clamp(min=0), rtol=0, atol=1e-14 * size)
    assert not found.node[~given[3]].any()
    assert (found.node >= 0).all()


def test_local_transitions_by_enumeration(oracles: ModuleType) -> None:
    """What neighbours say of each other, and not what pairs do; of one pair that is all there is."""
    for lengths in ((4, 2, 1), (2, 2, 2)):
        f, g, y, mask = given = some_scores(lengths, seed=5)
        found = Chain().local_curvature(*given).next.sum(0)
        expected = np.zeros((V, V))
        for s in range(2):
            for b, n in enumerate(lengths):
                expected += local_transitions(oracles.chain_table(f[s, b, :n], g[s])) / 2
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
        whole = Chain().curvature(f, g, y, mask).next.sum(0)
        same = torch.allclose(found, whole, rtol=1e-9)
        assert same == (lengths == (2, 2, 2))


@pytest.mark.parametrize("basis", BASES)
def test_by_default_it_is_read_off_the_whole(basis: str) -> None:
    given = some_scores((4, 2, 1), seed=6)
    whole = Piecewise().curvature(*given, BASES[basis])
    found = Piecewise().local_curvature(*given, BASES[basis])
    assert type(found) is Curvature
    assert found.node.shape == (3, 5, V if basis == "labels" else V - 1)
    assert torch.equal(found.node, torch.einsum("brtt->btr", whole.node))
    assert torch.equal(found.next, whole.next)
    assert found.node.max() > 0.1
