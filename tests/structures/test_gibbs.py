"""Gibbs sampling: estimates within their own error of enumeration."""

from __future__ import annotations

import pytest
import torch
from tests.structures.graphs import batch_of, grid_edges, random_scores

from structgp.errors import InputError
from structgp.structures.graph.gibbs import Gibbs
from structgp.structures.graph.program import Enumeration
from structgp.structures.semirings import LOG


@pytest.mark.parametrize("blocks", ["colour", "forest"])
@pytest.mark.parametrize("shared", [False, True])
def test_marginals_within_their_error(blocks: str, shared: bool) -> None:
    layout = batch_of(
        [(6, [grid_edges(2, 3), [(1, 0, 5)]]), (4, [[(3, 0), (0, 1)], []])], [(2, 2), (2, 2, 2)]
    )
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0), S=1, shared=shared, size=0.7)
    exact, chains = Enumeration(layout).marginals(scores), 100
    many = [x.expand(chains, *x.shape[1:]) for x in scores]
    found, errors = Gibbs(layout, sweeps=40, burn_in=10, blocks=blocks).estimates(many)
    for p, error, q in zip(found, errors, exact, strict=True):
        spread = p.std(0, keepdim=True)
        assert bool(((p.mean(0) - q[0]).abs() <= 5 * spread[0] / chains**0.5 + 2e-3).all())
        # Errors told by each chain are about what chains differ by.
        some = spread[0] > 0.01
        ratio = error.square().mean(0).sqrt()[some] / spread[0][some]
        assert 0.6 < float(ratio.mean()) < 1.4


def test_impossible_labels_are_never_drawn() -> None:
    layout = batch_of([(6, [grid_edges(2, 3)])], [(3, 3)])
    f, g = random_scores(layout, 3, torch.Generator().manual_seed(1), S=40)
    f[:, :, 2, 0] = -torch.inf
    y = Gibbs(layout, burn_in=20).sample((f, g), torch.Generator().manual_seed(0))
    assert not bool((y[:, :, 2] == 0).any())
    assert len(y[:, 0].unique(dim=0)) > 5


def test_decoding() -> None:
    layout = batch_of([(9, [grid_edges(3, 3)]), (4, [grid_edges(2, 2)])], [(2, 2)])
    scores = random_scores(layout, 2, torch.Generator().manual_seed(5), S=4)
    assert torch.equal(Gibbs(layout).decode(scores), Enumeration(layout).decode(scores))


def test_refusals() -> None:
    layout = batch_of([(4, [grid_edges(2, 2)])], [(2, 2)])
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0))
    program = Gibbs(layout)
    for ask in (
        lambda: program.log_total(scores, LOG),
        lambda: program.log_prob(scores, torch.zeros((1, 4), dtype=torch.long)),
        lambda: program.entropy(scores),
        lambda: program.n_best(scores, 3),
    ):
        with pytest.raises(InputError, match="Gibbs sampling has no"):
            ask()
    with pytest.raises(InputError, match="blocks"):
        Gibbs(layout, blocks="row")
