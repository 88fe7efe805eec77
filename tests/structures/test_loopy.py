"""Loopy belief propagation: exact on forests, close on weak loops, its gradient the beliefs."""

from __future__ import annotations

import pytest
import torch
from tests.structures.graphs import batch_of, grid, random_scores

from structgp.errors import InputError, StructgpWarning
from structgp.structures.graph.loopy import Loopy
from structgp.structures.graph.program import Enumeration
from structgp.structures.semirings import LOG, MAX

CLOSE = {"atol": 1e-8, "rtol": 1e-8}


@pytest.mark.parametrize("shared", [False, True])
def test_forests_are_exact(shared: bool) -> None:
    layout = batch_of(
        [(6, [[(1, 0), (4, 1)], [(2, 1, 3)]]), (4, [[(0, 3)], [(3, 2, 1)]])], [(2, 2), (2, 2, 2)]
    )
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0), shared=shared)
    scores[0][:, 1, 4:] = torch.nan
    scores[0][:, 0, 2, 1] = -torch.inf
    scores[1][..., 0, 1] = -torch.inf
    program, exact = Loopy(layout, tolerance=1e-12), Enumeration(layout)
    torch.testing.assert_close(program.log_partition(scores), exact.log_partition(scores), **CLOSE)
    torch.testing.assert_close(program.marginals(scores), exact.marginals(scores), **CLOSE)


def test_weak_loops_are_close_and_the_gradient_is_the_beliefs() -> None:
    layout = grid(3, 3, 2, B=2)
    f, g = random_scores(layout, 2, torch.Generator().manual_seed(1))
    g = 0.3 * g
    program, exact = Loopy(layout, tolerance=1e-12), Enumeration(layout)
    torch.testing.assert_close(
        program.log_partition((f, g)), exact.log_partition((f, g)), atol=0.02, rtol=0
    )
    torch.testing.assert_close(program.marginals((f, g)), exact.marginals((f, g)), atol=0.02, rtol=0)
    leaves = [f.clone().requires_grad_(), g.clone().requires_grad_()]
    slopes = torch.autograd.grad(program.log_total(leaves, LOG).sum(), leaves)
    generator = torch.Generator().manual_seed(2)
    along = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (f, g)]
    up, down = (
        program.log_partition([x + step * a for x, a in zip((f, g), along, strict=True)]).sum()
        for step in (1e-4, -1e-4)
    )
    told = sum(float((a * b).sum()) for a, b in zip(slopes, along, strict=True))
    assert told == pytest.approx(float(up - down) / 2e-4, abs=1e-6)
    assert bool((program.decode((f, g)) == exact.decode((f, g))).all())


def test_refusals_and_a_warning() -> None:
    layout = grid(3, 3, 2)
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0))
    for ask in (
        lambda p: p.n_best(scores, 2),
        lambda p: p.sample(scores, torch.Generator()),
        lambda p: p.log_total(scores, MAX),
    ):
        with pytest.raises(InputError, match="loopy belief propagation has no"):
            ask(Loopy(layout))
    with pytest.warns(StructgpWarning, match="did not settle in 2 sweeps"):
        Loopy(layout, sweeps=2).log_partition(scores)
