"""Scores as sums of functions, and the way back of a gradient: each the other's adjoint."""

from __future__ import annotations

import torch
from gpytorch.kernels import RBFKernel
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.gp import Inducing, Posterior, Table, Weights, contrasts
from structgp.gp.block import Block
from structgp.gp.kernels import RelevanceKernel


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([(2,), (3,), (2, 2), (3, 3), (2, 3)]),
    st.one_of(st.none(), st.integers(1, 5)),
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 1000),
)
def test_scores_and_pull_back_are_adjoint(
    labels: tuple[int, ...], n_functions: int | None, batch: list[int], seed: int
) -> None:
    """<scores(h), s> = <h, pull_back(s)> for every shape of labels, with and without a basis."""
    P = torch.Size(labels).numel()
    basis = None if n_functions is None else normal(P, n_functions, seed=seed)
    block = Block(labels, basis)
    R = P if n_functions is None else n_functions
    assert (block.n_scores, block.n_functions) == (P, R)
    assert block.has_own_functions == (basis is None)
    h, s = normal(*batch, R, seed=seed + 1), normal(*batch, *labels, seed=seed + 2)
    scores, pulled = block.scores(h), block.pull_back(s)
    assert scores.shape == s.shape
    assert pulled.shape == h.shape
    torch.testing.assert_close((scores * s).sum(), (h * pulled).sum())


def test_scores_are_the_basis_times_the_functions() -> None:
    """Row by row of the joint labels: score (i, j) is row 3 i + j of the basis."""
    basis, h = normal(6, 4), normal(4, seed=1)
    scores = Block((2, 3), basis).scores(h)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(scores[i, j], basis[3 * i + j] @ h)
    assert torch.equal(Block((2, 3)).scores(normal(6))[1, 2], normal(6)[5])


def test_the_basis_is_a_copy() -> None:
    """Amplitudes of its columns are learned in place."""
    basis = contrasts(torch.ones(3))
    block = Block((3,), basis)
    block.basis.mul_(2)
    torch.testing.assert_close(basis, contrasts(torch.ones(3)))
    assert torch.equal(Block((3,), torch.eye(3)).basis, torch.eye(3).double())
    assert Block((3,), torch.eye(3)).has_own_functions


def test_a_posterior_is_the_sum_of_its_blocks() -> None:
    kernel = RBFKernel().double()
    q = Posterior(
        {
            "node": Inducing(kernel, normal(4, 1), (3,), basis=contrasts(torch.ones(3))),
            "next": Weights(RelevanceKernel([2]).double(), (3, 3)),
            "skip": Table((3, 3), 0.7),
        }
    )
    assert list(q) == ["node", "next", "skip"]
    assert q.blocks == [q.node, q["next"], q["skip"]]
    assert (q.node.n_scores, q.n_components) == (3, 1)
    assert q.mixing.tolist() == [1.0]
    with torch.no_grad():
        assert float(q.divergence()) == 0
        before = q.snapshot()
        for k, block in enumerate(q.blocks):
            block.m += k + 1
            block.factor *= 0.5
        for entropy in ("bhattacharyya", "jensen"):
            expected = sum(block.kl(entropy) for block in q.blocks)
            torch.testing.assert_close(q.divergence(entropy), expected)
        for block in q.blocks:
            block.round_factor()
        assert q.node.m[0, 0] == 1
        q.load_state_dict(before)
        assert float(q.divergence()) == 0
