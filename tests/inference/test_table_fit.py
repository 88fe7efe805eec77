"""Tables fitted to examples whose other scores are given."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from structgp import chain, same
from structgp.data.examples import read_examples
from structgp.gp import Posterior, Table
from structgp.inference.bound import lower_bound
from structgp.inference.loop import make_batches
from structgp.inference.table_fit import GivenScores, fit_tables
from structgp.structures import structure_for

SPEC = chain() + same("w")
V, S = 2, 4


def given(n: int = 5, weights: Any = None, seed: int = 0) -> list[GivenScores]:
    """Sequences of 2 to 4 tokens with links, and draws of their scores; padded in batches of two or so."""
    rng = np.random.default_rng(seed)
    X = [[{"w": "ab"[rng.integers(2)]} for _ in range(int(rng.integers(2, 5)))] for _ in range(n)]
    y = [["AB"[rng.integers(2)] for _ in x] for x in X]
    examples = read_examples([*X, X[0], X[0]], [*y, ["A"] * len(X[0]), ["B"] * len(X[0])], spec=SPEC)
    structure, found = structure_for(SPEC, None, examples.labels.classes, True), []
    for batch in make_batches(examples.rows, examples.y, examples.encoder.pad_row, 8, weights):
        B, T = batch.mask.shape
        f, g = (torch.from_numpy(rng.normal(size=size)) for size in ((S, B, T, V), (S, V, V)))
        found.append(GivenScores(structure, examples.as_graphs(batch), (f, g, None)))
    return found


def table(sd: float = 1.0) -> Table:
    return Table((V, V), sd, True).requires_grad_(False)


def enumerated(part: GivenScores, h: torch.Tensor) -> torch.Tensor:
    """(S, B) log p(y), by a sum over all labellings; h : (S, V, V) scores of links."""
    f, g, batch = part.scores[0], part.scores[1], part.batch
    assert f is not None
    assert g is not None
    links, found = batch.layout.tuples[1], torch.zeros(S, len(batch))
    for s, b in product(range(S), range(len(batch))):
        T = int(batch.mask[b].sum())

        def score(y: Any, s: int = s, b: int = b, T: int = T) -> float:
            total = sum(float(f[s, b, t, y[t]]) for t in range(T))
            total += sum(float(g[s, y[t - 1], y[t]]) for t in range(1, T))
            some = links.index[b][links.mask[b]].tolist()
            return total + sum(float(h[s, y[i], y[j]]) for i, j in some)

        every = torch.tensor([score(y) for y in product(range(V), repeat=T)], dtype=torch.float64)
        found[s, b] = score(batch.y[b, :T].tolist()) - every.logsumexp(0)
    return found


def test_values_and_slopes_are_those_of_an_enumeration() -> None:
    weights = np.array([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0])
    h = torch.from_numpy(np.random.default_rng(1).normal(size=(S, V, V)))
    for part in given(weights=weights):
        value, (slope,) = part.slopes([h])
        assert float(value) == pytest.approx(
            float(enumerated(part, h).mean(0).double() @ part.weight), abs=1e-5
        )
        step = torch.zeros_like(h)
        step[1, 0, 1] = 1e-5
        ends = [float(part.slopes([h + way * step])[0]) for way in (1, -1)]
        assert float(slope[1, 0, 1]) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6)


def test_the_fit_ends_where_the_bound_is_flat() -> None:
    """In every mean; and the spread is what the curvature asks for."""
    data, block = given(), table()
    torch.manual_seed(0)
    fit_tables({"links": block}, data, torch.Generator().manual_seed(0), learn=False)
    noise = block.fixed_noise(S // 2, (), torch.Generator().manual_seed(0))

    def bound() -> float:
        functions = block.scale * (block.m[:, 0] + block.factor[:, 0] * noise)
        expected = sum((part.slopes([block.scores(functions)])[0] for part in data), torch.zeros(()))
        return float(lower_bound(expected, Posterior({"links": block})))

    for r in range(block.n_functions):
        ends = []
        for step in (1e-4, -1e-4):
            block.m[r] += step
            ends.append(bound())
            block.m[r] -= step
        assert ends[0] == pytest.approx(ends[1], abs=2e-6)
    before = block.factor.clone()
    fit_tables({"links": block}, data, torch.Generator().manual_seed(0), learn=False)
    assert torch.allclose(block.factor, before, atol=2e-2)
    assert bool((block.factor.abs() < 1).all())


def test_scales_are_learned_unless_they_are_to_stay() -> None:
    for learn in (True, False):
        block = table(2.0)
        fit_tables({"links": block}, given(), torch.Generator().manual_seed(0), learn=learn)
        assert (block.prior_sd != pytest.approx(2.0)) == learn


def test_without_data_a_table_stays_its_prior() -> None:
    block = table()
    assert fit_tables({"links": block}, [], torch.Generator()) == 0
    assert bool((block.m == 0).all() and (block.factor == 1).all())
