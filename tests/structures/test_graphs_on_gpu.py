"""Programs of declared structures give on a GPU what they give on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp import Graph, Prior, StructuredGPClassifier, chain, edges, grid, layers, same, segments, tree
from structgp.data.layout import GraphLayout, Tuples
from structgp.structures import Segments, SpanScheme
from structgp.structures.graph.elimination import Elimination
from structgp.structures.graph.loopy import Loopy
from structgp.structures.graph.reweighted import Reweighted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROGRAMS: dict[str, Any] = {
    "elimination": Elimination,
    "paths": Reweighted,
    "trees": lambda layout: Reweighted(layout, forests="trees"),
    "loopy": Loopy,
}


def pixels(B: int, H: int, W: int, V: int, S: int) -> tuple[GraphLayout, list[Tensor]]:
    """B grids with a shared table to the right and tables of their own below."""
    place = torch.arange(H * W).view(H, W)
    pairs = [
        torch.stack([place[:, :-1].flatten(), place[:, 1:].flatten()], -1),
        torch.stack([place[:-1].flatten(), place[1:].flatten()], -1),
    ]
    tuples = tuple(
        Tuples(name, p.expand(B, -1, -1), torch.ones(B, len(p), dtype=torch.bool), (0, 0), (V, V))
        for name, p in zip(("right", "down"), pairs, strict=True)
    )
    layout = GraphLayout(torch.ones(B, H * W, dtype=torch.bool), tuples)
    generator = torch.Generator().manual_seed(0)
    shapes = [(S, B, H * W, V), (S, V, V), (S, B, len(pairs[1]), V, V)]
    return layout, [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def value_and_gradients(program: Any, scores: list[Tensor], y: Tensor) -> list[Tensor]:
    leaves = [s.clone().requires_grad_() for s in scores]
    value = program.log_prob(leaves, y)
    return [value.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(value.sum(), leaves))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    layout, scores = pixels(3, 4, 5, 3, 6)
    y = torch.randint(3, layout.mask.shape, generator=torch.Generator().manual_seed(1))
    here = value_and_gradients(PROGRAMS[name](layout), scores, y)
    there = value_and_gradients(PROGRAMS[name](layout.to("cuda")), [s.cuda() for s in scores], y.cuda())
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_segments() -> None:
    structure = Segments(SpanScheme.of(["B-X", "I-X", "O"]))
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 7, 3), (4, 3, 3), (4, 1, 5)]
    scores = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    mask, y = torch.ones(3, 7, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.long)
    here = structure.log_prob(*scores, y, mask)
    there = structure.log_prob(*(s.cuda() for s in scores), y.cuda(), mask.cuda())
    torch.testing.assert_close(here, there.cpu(), rtol=1e-4, atol=1e-4)


def examples(form: str) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    X: list[Any] = []
    y: list[Any] = []
    for _ in range(12):
        labels = rng.integers(2, size=6)
        tokens = [
            {"w": "ab"[v] if rng.random() < 0.8 else "c", "u": "xyz"[t % 3]} for t, v in enumerate(labels)
        ]
        names = ["AB"[v] for v in labels]
        if form == "grid":
            X.append([tokens[:3], tokens[3:]])
            y.append([names[:3], names[3:]])
        elif form in ("tree", "graph"):
            pairs = [(t // 2, t) for t in range(1, 6)]
            X.append(Graph(tokens, parents=[-1, 0, 1, 1, 2, 2], edges={"a": pairs}))
            y.append(names)
        else:
            X.append(tokens)
            y.append({"one": names, "two": names[::-1]} if form == "layers" else names)
    return X, y


STRUCTURES = {
    "order 2": (chain(order=2), "sequence"),
    "skip-chain": (chain() + same("u"), "sequence"),
    "segments": (segments(3), "sequence"),
    "tree": (tree(), "tree"),
    "grid": (grid(features="both ends"), "grid"),
    "reweighted": (grid().using("reweighted"), "grid"),
    "edges": (edges("a", symmetric=True), "graph"),
    "layers": (layers(one=chain(), two=chain()), "layers"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_fits(name: str) -> None:
    spec, form = STRUCTURES[name]
    X, y = examples(form)
    found = []
    for device in ("cpu", "cuda"):
        model = StructuredGPClassifier(
            structure=spec, prior=Prior(data_weight=1), device=device, n_draws=16
        )
        model.fit(X, y)
        found.append((model.training_log_["elbo"], model.sequence_log_probs(X, y)))
    (elbo, log_probs), (other, others) = found
    assert elbo == pytest.approx(other, rel=1e-4)
    np.testing.assert_allclose(log_probs, others, rtol=2e-3, atol=2e-3)
