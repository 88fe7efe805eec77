"""A chain under several draws, and what they say together: every labelling, draw by draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.answers.potentials import Draws, Potentials
from structgp.data.batch import Batch
from structgp.structures import Chain, Rules


@dataclass(frozen=True)
class Fixed:
    """Scores that are given."""

    scores: Tensor

    def at(self, block: Any, rows: Any, mask: Tensor) -> Tensor:
        return self.scores


@dataclass(frozen=True)
class Average:
    """One sequence. labels : (N, T) all labellings. joint : (S, N) probability of each together with what
    is known, by draw."""

    labels: np.ndarray
    joint: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """(S,) how much each draw expected what is known."""
        return self.joint.sum(1) / self.joint.sum()

    @property
    def prob(self) -> np.ndarray:
        """(N,) p(labelling and known) / p(known)."""
        return self.joint.sum(0) / self.joint.sum()

    @property
    def each(self) -> np.ndarray:
        """(S, N) the same under each draw."""
        return self.joint / self.joint.sum(1, keepdims=True)

    def of(self, labels: Any) -> int:
        """Which of all labellings this one is."""
        (here,) = np.flatnonzero((self.labels == np.asarray(labels)).all(-1))
        return int(here)

    def marginals(self, weight: np.ndarray, V: int) -> np.ndarray:
        """(T, V) from weights (N,) of labellings."""
        return np.einsum("n,ntv->tv", weight, self.labels[..., None] == np.arange(V))


@dataclass(frozen=True)
class Mixture:
    """f (S, B, T, V), g (S, V, V), known labels y (B, T), -1 where there is none."""

    oracles: ModuleType
    f: np.ndarray
    g: np.ndarray
    y: np.ndarray
    lengths: tuple[int, ...]
    rules: Rules | None = None

    @property
    def V(self) -> int:
        return self.f.shape[-1]

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.f.shape[2]) < torch.tensor(self.lengths)[:, None]

    @property
    def batch(self) -> Batch:
        B, T = self.y.shape
        y = torch.where(self.mask, torch.tensor(self.y), 0)
        return Batch(torch.zeros(B, T, 1), y, self.mask, torch.arange(B))

    def unconditional(self, shift: Tensor | None = None, *, mean: bool = False) -> Potentials:
        """What the library makes of it before anything is known."""
        f, g = torch.tensor(self.f), torch.tensor(self.g)
        if mean:
            f, g = f.mean(0, keepdim=True), g.mean(0, keepdim=True)
        posterior: Any = SimpleNamespace(blocks=(None, None))
        return Draws(posterior, (Fixed(f), Fixed(g))).potentials(Chain(self.rules), self.batch, shift)

    def at(self, shift: Tensor | None = None, *, mean: bool = False) -> Potentials:
        """The same given the labels that are known."""
        return self.unconditional(shift, mean=mean).given(self.batch.y)

    def alone(self, b: int, *, mean: bool = False) -> Potentials:
        """Of one sequence, without padding."""
        return self.at(mean=mean).one(b, self.lengths[b])

    def by_hand(self, b: int, *, mean: bool = False) -> Average:
        n = self.lengths[b]
        f, g = (x.mean(0, keepdims=True) if mean else x for x in (self.f, self.g))
        joint = []
        for f_s, g_s in zip(f[:, b, :n], g, strict=True):
            table = self.oracles.chain_table(f_s, g_s)
            allowed = np.array([self.obeys(z) for z in table.labels])
            known = np.array([self.oracles.agrees(z, self.y[b, :n]) for z in table.labels])
            joint.append((self.oracles.among(table, allowed).prob * known).astype(float))
        return Average(table.labels, np.array(joint))

    def obeys(self, labels: Any) -> bool:
        rules = self.rules
        if rules is None:
            return True
        found: bool = self.oracles.obeys(labels, rules.follows, rules.starts, rules.ends)
        return found

    @cached_property
    def feasible(self) -> bool:
        return all(self.by_hand(b).joint.sum() > 0 for b in range(len(self.lengths)))


def mixture(
    oracles: ModuleType,
    seed: int,
    lengths: tuple[int, ...] = (3, 1, 4, 2),
    V: int = 3,
    S: int = 4,
    *,
    known: float = 0.0,
    bans: float = 0.0,
    size: float = 1.5,
) -> Mixture:
    """A random one that has a labelling of every sequence."""
    for attempt in range(500):
        rng = np.random.default_rng([seed, attempt])
        B, T = len(lengths), max(lengths)
        f, g = size * rng.normal(size=(S, B, T, V)), size * rng.normal(size=(S, V, V))
        y = np.where(rng.random((B, T)) < known, rng.integers(0, V, (B, T)), -1)
        rules = Rules(*(torch.tensor(rng.random(shape) >= bans) for shape in ((V, V), V, V)))
        found = Mixture(oracles, f, g, y, lengths, rules if bans else None)
        if found.feasible:
            return found
    raise AssertionError("no such mixture")
