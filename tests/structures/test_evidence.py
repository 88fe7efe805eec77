"""Evidence in the place of labels: log Z(f + E) - log Z(f), against an enumeration of all labellings."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.structures import Chain, Rules, Structure
from structgp.structures.masks import keep_known, shrunk

V, T = 3, 4
MASK = torch.tensor([[True] * T, [True, True, False, False]])


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_enumeration(oracles: ModuleType, f: Tensor, g: Tensor, evidence: Tensor) -> float:
    """log of the mean of exp(evidence of a labelling) over labellings as probable as the chain makes
    them."""
    table = oracles.chain_table(f.numpy(), g.numpy())
    told = evidence.numpy()[np.arange(len(f)), table.labels].sum(-1)
    return float(np.log((table.prob * np.exp(told)).sum()))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_likelihood_of_evidence(seed: int, oracles: ModuleType) -> None:
    f, g, evidence = numbers(seed, 2, 2, T, V), numbers(seed + 1, 2, V, V), numbers(seed + 2, 2, T, V)
    found = Chain().log_prob(f, g, evidence, MASK)
    for s in range(2):
        for b, length in enumerate((T, 2)):
            right = by_enumeration(oracles, f[s, b, :length], g[s], evidence[b, :length])
            assert float(found[s, b]) == pytest.approx(right, abs=1e-10)


def test_hard_evidence_is_a_label_and_none_says_nothing() -> None:
    f, g = numbers(0, 2, 2, T, V), numbers(1, 2, V, V)
    y = torch.tensor([[0, 2, 1, 1], [1, -1, 0, 0]])
    hard = keep_known(torch.zeros((1, 2, T, V), dtype=torch.float64), y, MASK)[0]
    chain = Chain()
    torch.testing.assert_close(chain.log_prob(f, g, hard, MASK), chain.log_prob(f, g, y, MASK))
    nothing = torch.zeros((2, T, V), dtype=torch.float64)
    torch.testing.assert_close(
        chain.log_prob(f, g, nothing, MASK), torch.zeros((2, 2), dtype=torch.float64), atol=1e-12, rtol=0
    )
    for of_hard, of_labels in zip(
        vars(chain.local_curvature(f, g, hard, MASK)).values(),
        vars(chain.local_curvature(f, g, y, MASK)).values(),
        strict=True,
    ):
        torch.testing.assert_close(of_hard, of_labels)


def test_slopes_in_scores_and_in_evidence() -> None:
    f, g, evidence = (
        x.requires_grad_() for x in (numbers(0, 1, 2, T, V), numbers(1, 1, V, V), numbers(2, 2, T, V))
    )
    assert torch.autograd.gradcheck(lambda *x: Chain().log_prob(*x, MASK), (f, g, evidence))
    (truth,) = torch.autograd.grad(Chain().log_prob(f, g, evidence, MASK).sum(), evidence)
    right = Chain().marginals(keep_known(f, evidence, MASK).detach(), g.detach(), MASK)[0]
    torch.testing.assert_close(truth, right)


def test_rules_hold_for_the_true_labels() -> None:
    follows = torch.ones((V, V), dtype=torch.bool)
    follows[0, 1] = False
    rules = Rules(follows, torch.ones(V, dtype=torch.bool), torch.ones(V, dtype=torch.bool))
    f, g, evidence = numbers(0, 1, 2, T, V), numbers(1, 1, V, V), numbers(2, 2, T, V)
    barred = g.masked_fill(~follows, -torch.inf)
    found, right = Chain(rules).log_prob(f, g, evidence, MASK), Chain().log_prob(f, barred, evidence, MASK)
    torch.testing.assert_close(found, right)


def test_curvature_between_positions_stays_positive() -> None:
    f, g, evidence = numbers(0, 3, 2, T, V), numbers(1, 3, V, V), 3 * numbers(2, 2, T, V)
    found = Chain().curvature(f, g, evidence, MASK)
    local = Chain().local_curvature(f, g, evidence, MASK)
    torch.testing.assert_close(found.node.diagonal(dim1=-1, dim2=-2).mT, local.node)
    assert float(torch.linalg.eigvalsh(found.node).min()) > -1e-12
    assert bool((local.node > 0).any())


def test_nothing_is_shrunk_where_evidence_says_all() -> None:
    whole = torch.tensor([[[[2.0, 1.0], [1.0, 0.0]]]])
    kept = shrunk(whole, torch.tensor([[[2.0], [0.0]]]))
    torch.testing.assert_close(kept, torch.tensor([[[[2.0, 0.0], [0.0, 0.0]]]]))


def test_structures_say_whether_they_take_evidence() -> None:
    taking = {
        kind.__name__
        for kind in (Structure, *Structure.__subclasses__())
        if kind.takes_evidence and kind.__module__.startswith("structgp.")
    }
    assert taking == {"Chain", "Declared", "Segments"}
