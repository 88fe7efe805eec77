"""Joint draws of all potentials from a posterior, and their scores on a batch, which answers average over.

The draws are functions, fixed once from a seed: all examples see the same ones, so an answer does not
depend on what else is in the batch, on the order, or on padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.structures import ByValues, Structure

SALT = 1_000_003
"""Difference between the seeds of one block and the next, so that the noise in what their draws leave open
is unrelated."""


LARGEST_SCORE = 1e15
"""Largest score that is accepted: double precision rounds larger ones to whole numbers, and their
probabilities mean nothing."""


@dataclass(frozen=True)
class Draws:
    """S draws from a posterior, each with its mirror image, or the posterior mean as the only draw; one
    part per block. spread : a factor on how far draws lie from the posterior mean. middle : the parts of
    that mean, only needed if the factor is not 1."""

    posterior: Posterior
    parts: tuple[Any, ...]
    spread: float = 1.0
    middle: tuple[Any, ...] = ()

    def potentials(self, structure: Structure, batch: Batch, shift: Tensor | None = None) -> Potentials:
        """The scores of every template at the rows of a batch, drawn jointly over its tuples. shift : (V,),
        added to the scores of each position."""
        with torch.no_grad():
            scores = self._scores(self.parts, batch)
            if self.spread != 1:
                parts = zip(self._scores(self.middle, batch), scores, strict=True)
                scores = [torch.lerp(middle, drawn, self.spread) for middle, drawn in parts]
        if not all(map(_is_sound, scores)):
            problem = f"scores are not finite, or beyond {LARGEST_SCORE:g}"
            remedy = "rescale the features and fit again; the model may also be damaged"
            raise InputError("X", problem, remedy)
        if shift is not None:
            scores = structure.shifted(scores, shift)
        share = scores[0].new_full(scores[0].shape[:2], 1 / len(scores[0]))
        return Potentials(structure, tuple(scores), batch.layout, share)

    def _scores(self, parts: tuple[Any, ...], batch: Batch) -> list[Tensor]:
        found = zip(parts, self.posterior.blocks, batch.rows, batch.masks, strict=True)
        return [part.at(block, rows, mask) for part, block, rows, mask in found]


def sample(posterior: Posterior, n: int, seed: int, spread: float = 1.0) -> Draws:
    """n draws, rounded up to an even number."""
    generator = torch.Generator().manual_seed(seed)
    blocks, found = posterior.blocks, {}
    with torch.no_grad():
        # Blocks that all examples share are drawn first, so that a larger vocabulary does not change them.
        for k in sorted(range(len(blocks)), key=lambda k: not blocks[k].shared):
            found[k] = blocks[k].draws(n, seed + SALT * k, generator)
    middle = () if spread == 1 else mean(posterior).parts
    return Draws(posterior, tuple(found[k] for k in range(len(blocks))), spread, middle)


def mean(posterior: Posterior) -> Draws:
    """The posterior mean as one 'draw'."""
    with torch.no_grad():
        return Draws(posterior, tuple(block.mean_draw() for block in posterior.blocks))


def spread_out(S: int, n: int) -> Tensor:
    """Places of n of S draws, spread evenly; one fewer if n is odd, but at least two. A draw and its mirror
    image, S / 2 places later, stay together."""
    if n >= S:
        return torch.arange(S)
    pairs = max(1, n // 2)
    half = torch.arange(pairs) * (S // 2) // pairs
    return torch.cat([half, half + S // 2])


def _is_sound(scores: Tensor) -> bool:
    return not scores.numel() or all(-LARGEST_SCORE <= float(v) <= LARGEST_SCORE for v in scores.aminmax())


@dataclass(frozen=True)
class Potentials:
    """likelihood : the structure that answers as long as no labels are known. scores : those of each
    template, as the structure takes them: first those of nodes, (S, B, T, V), -inf at labels that known
    labels exclude; then (S, *labels), or (S, B, E, *labels). layout : the mask (B, T) of sequences or the
    layout of graphs. share : (S, B), how much each draw counts, which sums to 1 over draws. known : (B, T)
    known labels, negative where unknown, for a likelihood that cannot read them off the scores; else
    None."""

    likelihood: Structure
    scores: tuple[Tensor, ...]
    layout: Any
    share: Tensor
    known: Tensor | None = None

    @property
    def structure(self) -> Structure:
        """The structure that answers, given the known labels."""
        told = None if self.known is None else self.likelihood.given(self.known)
        return self.likelihood if told is None else told

    @property
    def f(self) -> Tensor:
        """(S, B, T, V) scores of nodes, those of the first layer."""
        return self.scores[0]

    @property
    def g(self) -> Tensor:
        """Scores of the second template, transitions in a chain."""
        return self.scores[1]

    @property
    def mask(self) -> Tensor:
        """(B, N) the variables that exist."""
        return self.layout if isinstance(self.layout, Tensor) else self.layout.mask

    @property
    def n_draws(self) -> int:
        return len(self.share)

    def given(self, y: Tensor) -> Potentials:
        """The same given known labels y (B, T), negative where unknown, or given evidence y (B, T, V). The
        probability of an answer is then that of the answer together with the known labels, divided by that
        of the known labels, and each draw counts in proportion to the probability that it gave to them."""
        if not y.is_floating_point() and not bool(((y >= 0) & self.mask).any()):
            return self
        with torch.no_grad():
            share = self.log_prob(y).softmax(0) if self.n_draws > 1 else self.share
            if self.likelihood.given(y) is not None:
                return replace(self, known=y, share=share)
            return replace(self, scores=self.structure.keep_known(self.scores, y, self.layout), share=share)

    def on_host(self) -> Potentials:
        known = None if self.known is None else self.known.cpu()
        scores = tuple(x.cpu() for x in self.scores)
        return Potentials(self.likelihood, scores, self.layout.to("cpu"), self.share.cpu(), known)

    def one(self, b: int, length: int, draws: Tensor | slice = slice(None)) -> Potentials:
        """The potentials of one example under some draws; for a sequence, without padding."""
        share, scores = self.share[draws][:, b : b + 1], []
        for k, x in enumerate(self.scores):
            scores.append(x[draws][:, b : b + 1] if self._has_examples(k) else x[draws])
        if not isinstance(self.layout, Tensor):
            return Potentials(self.likelihood, tuple(scores), self.layout.rows([b]), share)
        f, g = scores
        g = g if g.dim() == 3 else g[:, :, : max(0, length - 1)]
        known = None if self.known is None else self.known[b : b + 1, :length]
        layout = self.layout[b : b + 1, :length]
        return Potentials(self.likelihood, (f[:, :, :length], g), layout, share, known)

    def times(self, n: int) -> Potentials:
        """n copies of the only example."""
        parts = enumerate(self.scores)
        scores = [x.expand(-1, n, *x.shape[2:]) if self._has_examples(k) else x for k, x in parts]
        layout = self.layout.expand(n, -1) if isinstance(self.layout, Tensor) else self.layout.rows([0] * n)
        known = None if self.known is None else self.known.expand(n, -1)
        return Potentials(self.likelihood, tuple(scores), layout, self.share.expand(-1, n), known)

    def some_draws(self, n: int) -> Iterator[Potentials]:
        """n draws at a time."""
        for share, *scores in zip(self.share.split(n), *(x.split(n) for x in self.scores), strict=True):
            yield replace(self, scores=tuple(scores), share=share)

    def fewer(self, n: int) -> Potentials:
        """At most n of the draws, in place of all. Draws that known labels make improbable go first; if all
        draws count alike, the rest is ``spread_out``."""
        S = self.n_draws
        if n >= S:
            return self
        if bool((self.share == self.share[:1]).all()):
            places = spread_out(S, n)
        else:
            places = self.share.amax(1).topk(n).indices.sort().values
        share = self.share[places]
        share = share / share.sum(0).clamp(min=torch.finfo(share.dtype).tiny)
        return replace(self, scores=tuple(x[places] for x in self.scores), share=share)

    def repeated(self, n: int) -> Potentials:
        """The draws repeated n times, one block of all draws after the other."""
        scores = tuple(x.repeat(n, *[1] * (x.dim() - 1)) for x in self.scores)
        return replace(self, scores=scores, share=self.share.repeat(n, 1) / n)

    def _has_examples(self, k: int) -> bool:
        """True if the scores of template k differ from example to example."""
        templates = self.structure.spec.templates
        return self.scores[k].dim() > 1 + (templates[k].labels if k < len(templates) else 2)

    def ask(self, method: str, *more: Any) -> Any:
        """The structure's answer under every draw. method : 'marginals', 'walk', 'decode', 'n_best',
        'sample', 'entropy', and so on. more : further arguments."""
        return getattr(self.structure, method)(*self.scores, self.layout, *more)

    def log_prob(self, y: Tensor) -> Tensor:
        """(S, B) log p(y) under each draw."""
        log_prob: Any = self.structure.log_prob
        return log_prob(*self.scores, y, self.layout)

    def marginals(self) -> Tensor:
        """(B, T, V) label probabilities, averaged over draws: Bayes-optimal token by token."""
        return self.average(self.ask("marginals"))

    def monte_carlo_error(self) -> Tensor:
        """(B, T, V) standard errors of ``marginals`` due to sampling labellings."""
        answering = self.structure
        assert isinstance(answering, ByValues)
        return answering.monte_carlo_error(self.f, self.g, self.mask, self.share)

    def average(self, values: Tensor) -> Tensor:
        """(B, ...) mean over draws of values (S, B, ...)."""
        return torch.einsum("sb...,sb->b...", values, self.share)
