"""A likelihood that answers questions from its values alone.

Where a sequence has few labellings, all of them are evaluated and answers are exact; where it has many,
answers come from a weighted sample of them (``importance``), with a Monte Carlo error. Either way, the
values are normalised over labellings, and one call of the function evaluates a labelling under all draws.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor

from structgp.errors import LikelihoodError, StructgpWarning
from structgp.structures.base import Structure
from structgp.structures.masks import keep_known
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.opaque.importance import LEAST_EFFECTIVE, MOST_VALUES, sampled
from structgp.structures.opaque.pools import Pool, enumerated
from structgp.structures.opaque.user_function import name_of

NUMBERS_AT_ONCE = 1 << 22
"""Largest number of latent values that one call of a batched function sees."""

KEPT_NUMBERS = 1 << 24
"""Most numbers that pools kept for the next question about the same sequences may hold: 128 MB."""

TRIAL_LABELLINGS = 256
"""Largest number of labellings, of up to 3 tokens, that the trial of normalisation enumerates."""

NORMALISED = 1e-4
"""Largest absolute log of the sum over labellings that counts as 0: a function may use single precision."""


@dataclass
class _Done:
    """State that a structure shares with its versions given labels. values : labellings evaluated so
    far."""

    values: int = 0
    was_tried: bool = False
    is_normalised: bool | None = None
    was_warned: bool = False


class ByValues(Structure):
    """Answers for ``inner``, a likelihood that only has ``log_prob``. ``seed`` : seed for sampling
    labellings, used anew for every sequence, so that its answer does not depend on what else is asked.
    ``known`` : (B, T) labels that are given, negative where none is.

    Cost: V^T values per sequence and draw where that is at most ``MOST_VALUES``, else about that many.
    ``n_values`` counts the labellings evaluated so far."""

    has_gradient = False
    handles_missing = True

    def __init__(self, inner: Structure, seed: int = 0, known: Tensor | None = None) -> None:
        self.inner, self.seed, self.known, self.spec = inner, seed, known, inner.spec
        self.ignores_shift = inner.ignores_shift
        self._kept: dict[bytes, Pool] = {}
        self._lock, self._done = threading.Lock(), _Done()

    def __reduce__(self) -> tuple[type[ByValues], tuple[Any, ...]]:
        """A copy starts without kept pools."""
        return ByValues, (self.inner, self.seed, self.known)

    def __repr__(self) -> str:
        return f"ByValues({self.inner!r})"

    @property
    def n_values(self) -> int:
        return self._done.values

    @property
    def is_normalised(self) -> bool | None:
        """True if probabilities sum to 1 over labellings in a trial; None before the trial, or if it
        failed."""
        return self._done.is_normalised

    @property
    def name(self) -> str:
        """Name of the function, or of the structure's class."""
        return (
            name_of(self.inner.function) if isinstance(self.inner, BlackBox) else type(self.inner).__name__
        )

    @property
    def full_name(self) -> str:
        """``name`` with the module in front."""
        of: Any = self.inner.function if isinstance(self.inner, BlackBox) else type(self.inner)
        while isinstance(of, partial):
            of = of.func
        return f"{getattr(of, '__module__', None) or type(of).__module__}.{self.name}"

    def given(self, y: Tensor) -> ByValues:
        """This structure conditioned on labels y (B, T), negative where unknown. Scores stay as they are:
        there is no telling what a function does with a score of -inf."""
        found = ByValues(self.inner, self.seed, y.cpu())
        found._kept, found._lock, found._done = self._kept, self._lock, self._done
        return found

    def probe(self, n_labels: int) -> None:
        """Tests, once and on a few generated scores, whether the probabilities sum to 1 over labellings;
        warns if they do not."""
        if self._done.was_tried:
            return
        self._done.was_tried = True
        T = next((t for t in (3, 2) if n_labels**t <= TRIAL_LABELLINGS), 1)
        generator = torch.Generator().manual_seed(0)
        f = torch.randn((2, 1, T, n_labels), generator=generator, dtype=torch.float64)
        g = torch.randn((2, n_labels, n_labels), generator=generator, dtype=torch.float64)
        labels = torch.tensor(list(product(range(n_labels), repeat=T)))
        try:
            totals = self._values(f, g, labels).logsumexp(1)
        except LikelihoodError:  # it may refuse some labellings, or need features
            return
        self._done.is_normalised = bool((totals.abs() <= NORMALISED).all())
        if not self.is_normalised:
            worst = float(totals[totals.abs().argmax()].exp())
            text = f"likelihood {self.name}: its probabilities sum to {worst:.3g} over all "
            text += f"labellings of {T} tokens with {n_labels} labels; answers are normalised, but the fit "
            text += "takes it for a likelihood as it is"
            warnings.warn(text, StructgpWarning, stacklevel=3)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """log p of y given the known labels; missing labels are summed over. Takes one value per sequence
        where no label is missing, none is given, and the function is normalised."""
        self.probe(f.shape[-1])
        found = torch.full(f.shape[:2], -torch.inf, dtype=torch.float64)
        for b, n, one in self._each(f, g, mask):
            labels, known = y[b, :n].cpu(), self._known(b, n)
            if bool(((labels >= 0) & (known >= 0) & (labels != known)).any()):
                continue
            both = torch.where(labels >= 0, labels, known)
            if bool((both >= 0).all()):
                top = self._values(*one, both[None])[:, 0]
            else:
                top = self._pool(*one, both).log_z
            if not bool((known >= 0).any()) and self.is_normalised:
                found[:, b] = top
            else:
                log_z = self._pool(*one, known).log_z
                found[:, b] = torch.where(log_z > -torch.inf, top - log_z, -torch.inf)
        return torch.where(mask.any(-1), found.to(f), 0)

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        found = torch.zeros(f.shape, dtype=torch.float64)
        for b, n, pool in self._pools(f, g, mask):
            found[:, b, :n] = pool.marginals()
        return found.to(f)

    def labellings(self, f: Tensor, g: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        nothing = torch.zeros((1, 0), dtype=torch.long), torch.ones((len(f), 1), dtype=torch.float64)
        found = [nothing] * len(mask)
        for b, _, pool in self._pools(f, g, mask):
            found[b] = pool.labels, pool.p
        return found

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self.n_best(f, g, mask, 1)[0][:, :, 0]

    def n_best(self, f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n best among the labellings that were evaluated."""
        labels = torch.zeros((*f.shape[:2], n, f.shape[2]), dtype=torch.long)
        found = torch.full((*f.shape[:2], n), -torch.inf, dtype=torch.float64)
        found[..., 0] = torch.where(
            mask.any(-1).cpu(), -torch.inf, 0.0
        )  # an empty sequence has one labelling
        for b, length, pool in self._pools(f, g, mask):
            labels[:, b, :, :length], found[:, b] = pool.best(n)
        return labels.to(f.device), found.to(f)

    def sample(self, f: Tensor, g: Tensor, mask: Tensor, generator: Generator) -> Tensor:
        found = torch.zeros(f.shape[:3], dtype=torch.long)
        for b, n, pool in self._pools(f, g, mask):
            found[:, b, :n] = pool.sample(generator)
        return found.to(f.device)

    def entropy(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        found = torch.zeros(f.shape[:2], dtype=torch.float64)
        for b, _, pool in self._pools(f, g, mask):
            found[:, b] = pool.entropy()
        return found.to(f)

    def monte_carlo_error(self, f: Tensor, g: Tensor, mask: Tensor, share: Tensor) -> Tensor:
        """(B, T, V) standard errors, from sampling labellings, of the marginals averaged over draws with
        shares (S, B); 0 where all labellings were enumerated."""
        found = torch.zeros(f.shape[1:], dtype=torch.float64)
        for b, n, pool in self._pools(f, g, mask):
            found[b, :n] = pool.errors(share[:, b].cpu().double())
        return found.to(f)

    def _each(self, f: Tensor, g: Tensor, mask: Tensor) -> Iterator[tuple[int, int, tuple[Tensor, Tensor]]]:
        """Index, length, and scores f (S, 1, T, V) and g of each sequence that has tokens, on the CPU."""
        f, g = f.detach().cpu().double(), g.detach().cpu().double()
        for b, n in enumerate(mask.sum(-1).tolist()):
            if n:
                yield b, n, (f[:, b : b + 1, :n], g if g.dim() == 3 else g[:, b : b + 1, : n - 1])

    def _pools(self, f: Tensor, g: Tensor, mask: Tensor) -> Iterator[tuple[int, int, Pool]]:
        for b, n, one in self._each(f, g, mask):
            pool = self._pool(*one, self._known(b, n))
            if not pool.is_possible:
                what = "all" if pool.drawn is None else f"{len(pool.labels)}"
                problem = f"gives probability 0 to {what} labellings of {n} tokens that were evaluated"
                remedy = "check labels that are known, or use structure=Custom(..., predict_with='chain')"
                raise LikelihoodError(f"likelihood {self.name}", problem, remedy, b)
            yield b, n, pool

    def _known(self, b: int, n: int) -> Tensor:
        """(n,) known labels of a sequence, negative where unknown. A single row serves all sequences."""
        if self.known is None:
            return torch.full((n,), -1)
        return self.known[b if len(self.known) > 1 else 0, :n]

    def _pool(self, f: Tensor, g: Tensor, known: Tensor) -> Pool:
        """The pool of one sequence, kept for the next question."""
        digest = hashlib.blake2b(repr((f.shape, g.shape)).encode(), digest_size=16)
        for x in (f, g, known):
            digest.update(x.contiguous().numpy().data)
        key = digest.digest()
        with self._lock:
            pool = self._kept.pop(key, None)
        if pool is None:
            pool = self._new_pool(f, g, known)
        with self._lock:
            self._kept[key] = pool  # the latest one comes last
            total = sum(p.numbers for p in self._kept.values())
            while total > KEPT_NUMBERS and len(self._kept) > 1:
                total -= self._kept.pop(next(iter(self._kept))).numbers
        return pool

    def _new_pool(self, f: Tensor, g: Tensor, known: Tensor) -> Pool:
        T, V = f.shape[2:]
        given = keep_known(f, known[None], torch.ones((1, T), dtype=torch.bool))
        n_free = int((known < 0).sum())

        def values(labels: Tensor) -> Tensor:
            return self._values(f, g, labels)

        if V**n_free <= MOST_VALUES:
            return enumerated(values, given[0, 0] > -torch.inf)
        pool = sampled(values, given, g, self.spec, torch.Generator().manual_seed(self.seed))
        self.probe(V)
        pool = replace(pool, sums_to_1=bool(self.is_normalised) and n_free == T)
        if pool.effective() < LEAST_EFFECTIVE and not self._done.was_warned:
            self._done.was_warned = True
            text = f"likelihood {self.name}: {len(pool.labels)} sampled labellings of {T} tokens are worth "
            text += f"{pool.effective():.0f} independent ones; monte_carlo_error tells how far off "
            text += "probabilities may be"
            warnings.warn(text, StructgpWarning, stacklevel=2)
        return pool

    def _values(self, f: Tensor, g: Tensor, labels: Tensor) -> Tensor:
        """(S, C) values of labellings (C, T) of one sequence, some at a time."""
        found, at_once = [], max(1, NUMBERS_AT_ONCE // f.numel())
        for some in labels.split(at_once):
            C = len(some)
            tables = g if g.dim() == 3 else g.expand(-1, C, -1, -1, -1)
            with torch.no_grad():
                all_real = torch.ones(some.shape, dtype=torch.bool)
                found.append(self.inner.log_prob(f.expand(-1, C, -1, -1), tables, some, all_real))
        self._done.values += len(labels)
        return torch.cat(found, 1)
