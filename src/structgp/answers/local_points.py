"""Label probabilities of a chain from few draws of a sequence and many points for each token's scores.

See ``structures.linear_chain.averages``: this average over the posterior takes a tenth of the work of 128
draws, for probabilities that are as good. The noise depends only on a token's position in its sequence, and
points are the same for all tokens, so an answer does not depend on what else is asked about.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from structgp.answers.encoded import CACHED_NUMBERS
from structgp.answers.potentials import Potentials
from structgp.answers.spans import Boundaries, likely_spans
from structgp.data.batch import UNUSED, by_length
from structgp.structures import Chain
from structgp.structures.linear_chain.averages import N_DRAWS, ChainAverages, GaussianScores

if TYPE_CHECKING:
    from structgp.answers.ask import Model

N_POINTS, N_POSITIONS = 64, 64
"""Number of points for the scores of a token, including mirror images; and number of positions in a
sequence that have noise of their own.

The number of points and ``N_DRAWS`` were chosen on held-out thirds of the TRAINING data of four tasks, two
folds each, encoded and raw, as the smallest that lose nothing in NLL against 128 draws, on average
(``python -m experiments.answer_draws``)."""

SPAN_DRAWS = 32
"""Number of draws from which spans are found when labels are chosen for F1. On the same held-out data, raw,
the mean F1 was 78.4 % with 32 draws and with 128 joint draws, and 78.2 % with 16."""

TOKENS_AT_ONCE = 2_000
"""Number of tokens processed at once, so that their rows stay in a cache."""


class LocalPoints:
    """Quick label probabilities for a model whose structure is a chain with one table of transitions, and
    whose posterior has ``token_moments``. Made by ``of``."""

    def __init__(self, model: Model, moments: object, transitions: tuple[Tensor, Tensor]) -> None:
        node, table = model.posterior.blocks
        self.moments, self.split, self.encoder = moments, model.split, model.encoder
        self.basis = (np.eye(node.n_scores) if node.has_own_functions else node.basis.numpy()).copy()
        assert isinstance(model.structure, Chain)
        self.structure: Chain = model.structure
        self._table, self._transitions = table, transitions
        rng, P = np.random.default_rng([model.seed, 2]), len(transitions[0])

        def drawn(n: int) -> tuple[np.ndarray, Tensor]:
            """Noise (P, R, n / 2) for tokens, and noise for n draws of the transitions."""
            numbers = stratified(rng.standard_normal((P, n // 2)))
            both = torch.from_numpy(np.concatenate([numbers, -numbers], 1).T)
            return stratified(rng.standard_normal((N_POSITIONS, node.n_functions, n // 2))), both

        self._noise, self._moves = drawn(N_DRAWS)
        self._points = stratified(orthogonal(node.n_functions, N_POINTS // 2, rng))
        noise, self._span_moves = drawn(SPAN_DRAWS)
        self.span_noise = np.ascontiguousarray(noise.swapaxes(1, 2))  # (P, S / 2, R)
        self._spread_out(model.spread)

    def _spread_out(self, spread: float) -> None:
        """Sets the draws of the transitions. spread : factor on how far draws lie from the mean."""
        self.spread, (mean, sd) = spread, self._transitions
        g, self.span_tables = (
            self._table.scores(mean + spread * sd * moves) for moves in (self._moves, self._span_moves)
        )
        self.averages = ChainAverages(self._noise, self._points, g, self.structure.rules)

    def under(self, spread: float) -> LocalPoints:
        """The same, with draws that lie ``spread`` times as far from the mean."""
        found = copy.copy(self)
        found._spread_out(spread)
        return found

    @classmethod
    def of(cls, model: Model) -> LocalPoints | None:
        """The points of a model; None if the model is not of the right kind."""
        structure, blocks = model.structure, model.posterior.blocks
        if type(structure) is not Chain or structure.spec.next is None or len(blocks) != 2:
            return None
        if model.split.next is not None:  # transitions have features
            return None
        transitions = blocks[1].independent_functions()
        moments = None if transitions is None else blocks[0].token_moments()
        return None if moments is None or transitions is None else cls(model, moments, transitions)

    def marginals(self, rows: Sequence[np.ndarray], shift: Tensor | None = None) -> list[np.ndarray]:
        """(T, V) label probabilities of each sequence, from its rows (T, W). shift : (V,), added to the
        scores of each token."""
        V = len(self.basis)
        begin = np.concatenate([[0], np.cumsum([len(r) for r in rows], dtype=np.int64)])
        found = np.empty((begin[-1], V))
        first = 0
        while first < len(rows):
            last = max(first + 1, int(np.searchsorted(begin, begin[first] + TOKENS_AT_ONCE, "right")) - 1)
            some = slice(begin[first], begin[last])
            if begin[last] > begin[first]:
                at = self._scores(rows[first:last], begin[first : last + 1] - begin[first], shift)
                found[some] = self.averages.marginals(at)
            first = last
        return np.split(found, begin[1:-1]) if len(rows) else []

    def spans(
        self, rows: Sequence[np.ndarray], shift: Tensor | None, boundaries: Boundaries, least: float
    ) -> Iterator[tuple[int, list[tuple[int, int, int, float]]]]:
        """The index of each sequence, in any order, with its spans (start, stop, kind, probability) whose
        probability is at least ``least``."""
        for index, at in self._potentials(rows, shift):
            yield from zip(index, likely_spans(at, boundaries, least), strict=True)

    def _potentials(
        self, rows: Sequence[np.ndarray], shift: Tensor | None
    ) -> Iterator[tuple[list[int], Potentials]]:
        """``SPAN_DRAWS`` draws of the scores of sequences, batch by batch, with the indices of the
        sequences."""
        V, own = len(self.basis), self.spread * np.diagonal(self.basis)
        is_diagonal = np.array_equal(self.basis, np.diag(np.diagonal(self.basis)))
        for index in by_length([len(r) for r in rows], max(1, CACHED_NUMBERS // (V * SPAN_DRAWS))):
            lengths = np.array([len(rows[i]) for i in index])
            begin = np.concatenate([[0], np.cumsum(lengths)])
            at, T = self._scores([rows[i] for i in index], begin, shift), int(lengths.max())
            row, t = np.nonzero(np.arange(T) < lengths[:, None])
            noise = at.sd[:, None] * self.span_noise[t % N_POSITIONS]  # (N, S / 2, R)
            noise = noise * own if is_diagonal else noise @ at.basis.T
            f, half = np.zeros((SPAN_DRAWS, len(index), T, V)), SPAN_DRAWS // 2
            f[:half, row, t] = (at.mean[:, None] + noise).swapaxes(0, 1)
            f[half:, row, t] = (at.mean[:, None] - noise).swapaxes(0, 1)
            mask = torch.from_numpy(np.arange(T) < lengths[:, None])
            share = torch.full((SPAN_DRAWS, len(index)), 1 / SPAN_DRAWS, dtype=torch.float64)
            yield index, Potentials(self.structure, (torch.from_numpy(f), self.span_tables), mask, share)

    def _scores(
        self, rows: Sequence[np.ndarray], begin: np.ndarray, shift: Tensor | None
    ) -> GaussianScores:
        mean, sd = self.moments.at(self.split.node.select(_joined(rows)))  # type: ignore[attr-defined]
        mean = mean @ self.basis.T.astype(mean.dtype)
        if shift is not None:
            mean = mean + shift.numpy()
        return GaussianScores(mean, sd, self.spread * self.basis, begin)


def _joined(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(N, W) the rows of all tokens; those with fewer sparse features are padded."""
    full = [r for r in rows if len(r)]
    width = max(r.shape[1] for r in full)
    if any(r.shape[1] < width for r in full):
        unused = [np.tile(UNUSED, (len(r), (width - r.shape[1]) // 2)) for r in full]
        full = [np.concatenate(both, 1) for both in zip(full, unused, strict=True)]
    return np.concatenate(full)


def stratified(normal: np.ndarray) -> np.ndarray:
    """Standard normal numbers (..., n), which will be mirrored, moved so that along the last dimension
    there is one absolute value from each of n slices of equal probability. A slice is represented by the
    root of its mean square; order and signs stay."""
    n = normal.shape[-1]
    ends = ndtri(0.5 + np.arange(n + 1) / (2 * n))
    ends[-1] = 40.0  # where the density is 0 in double precision
    density = np.exp(-(ends**2) / 2) / np.sqrt(2 * np.pi)
    levels = np.sqrt(1 + 2 * n * (ends[:-1] * density[:-1] - ends[1:] * density[1:]))
    rank = np.abs(normal).argsort(-1).argsort(-1)
    return levels[rank] * np.sign(normal)


def orthogonal(R: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """(R, n) columns of standard normal numbers; each successive group of R columns is orthogonal."""
    drawn = [(rng.standard_normal((R, R)), rng.chisquare(R, R)) for _ in range(-(-n // R))]
    normal, squares = (np.stack(of) for of in zip(*drawn, strict=True))
    found = np.linalg.qr(normal)[0] * np.sqrt(squares)[:, None]
    return np.concatenate(found, 1)[:, :n]
