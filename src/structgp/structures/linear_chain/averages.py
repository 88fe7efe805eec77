"""Label probabilities of a chain whose scores are Gaussian, from few draws of the rest of a sequence and
many of each token's own scores.

Given the scores of the other tokens, the scores of token t enter the probabilities of its label only as a
factor:

    p(y_t = v | f_t, rest)  is proportional to  exp(f_tv) m_v(rest),

where m is the product of the messages from both sides. So one pass over the sequence for each of S draws
gives S messages to every token, and each of them is combined with K points for the token's own scores: S K
values are averaged for the price of S passes and some products of small matrices. Scores of different
tokens are treated as independent, and only their means and variances are needed.

Letters: N tokens of B sequences, V labels, R functions; S draws, mirrored; K points, mirrored; P positions,
after which the noise of draws repeats.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structgp.structures.linear_chain.messages import Logs, steps_back
from structgp.structures.masks import Rules
from structgp.threads import if_numba

N_DRAWS = 16
"""S, the number of draws. As many numbers in single precision fill a vector instruction."""

SAFE = 85.0
"""Largest logarithm of a ratio within a message in single precision."""

WORTH_A_THREAD = 400
"""Smallest number of tokens for which a thread pays off."""


@dataclass(frozen=True)
class GaussianScores:
    """Scores of tokens: mean (N, V) plus basis (V, R) times sd (N, R) times standard normal numbers.
    begin : (B + 1,) index of the first token of each sequence, and N."""

    mean: np.ndarray
    sd: np.ndarray
    basis: np.ndarray
    begin: np.ndarray


class ChainAverages:
    """Averaged label probabilities of a chain. noise : (P, R, S / 2), points : (R, K / 2), standard normal
    numbers, to be mirrored. g : (S, V, V) draws of the scores of transitions. rules : rules that labellings
    obey."""

    def __init__(self, noise: np.ndarray, points: np.ndarray, g: Tensor, rules: Rules | None) -> None:
        V = g.shape[-1]
        if rules is not None:
            g = g.masked_fill(~rules.follows, -torch.inf)
        self.g, self.rules = g, rules
        self.noise, self.points = np.concatenate([noise, -noise], -1), np.ascontiguousarray(points)
        free = np.ones(V, dtype=bool)
        self.starts, self.ends = (
            (free, free) if rules is None else (rules.starts.numpy(), rules.ends.numpy())
        )
        finite = torch.where(g > -torch.inf, g, torch.nan).flatten(1)
        wide = finite.nan_to_num(-torch.inf).amax(1) - finite.nan_to_num(torch.inf).amin(1)
        self.width, self.detour = float(wide.max()), steps_back(g)
        self.before, self.behind = reachable(g > -torch.inf, self.starts, self.ends)
        table = (g - g.amax((1, 2), keepdim=True)).exp().permute(1, 2, 0)
        self.single = [
            np.ascontiguousarray(a, dtype=np.float32)
            for a in (self.noise.reshape(-1, N_DRAWS), points, table.numpy())
        ]

    def marginals(self, at: GaussianScores) -> np.ndarray:
        """(N, V) probabilities of the labels of all tokens. Cost O(N V (S V + K S + K R))."""
        N, B = len(at.mean), len(at.begin) - 1
        found, left = np.empty(at.mean.shape), np.arange(B)
        if compiled_averages() is not None and N:
            single, spread = np.empty(at.mean.shape, np.float32), np.ones(B, np.float32)
            self._share(at, single, spread)
            found = single.astype(np.float64)
            # `not <=` so that nan counts as too wide as well.
            is_safe = (np.log(spread) + self.width) * self.detour <= SAFE
            left = np.flatnonzero(~is_safe | self._lost(found, at.begin))
        for b in left[np.diff(at.begin)[left] > 0]:
            some = slice(at.begin[b], at.begin[b + 1])
            found[some] = self._in_log_space(at.mean[some], at.sd[some], at.basis)
        return found / found.sum(1, keepdims=True)

    def _lost(self, p: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """(B,) True where a number was too small or too large for single precision: a possible label has a
        probability of 0, or probabilities are not finite."""
        zero, label = np.nonzero(~(p > 0) | (p == np.inf))
        b = np.searchsorted(begin, zero, side="right") - 1
        d = len(self.before) - 1
        t, left = np.minimum(zero - begin[b], d), np.minimum(begin[b + 1] - 1 - zero, d)
        lost = np.zeros(len(begin) - 1, dtype=bool)
        lost[b[self.before[t, label] & self.behind[left, label]]] = True
        return lost

    def _share(self, at: GaussianScores, out: np.ndarray, spread: np.ndarray) -> None:
        """Shares out whole sequences to at most as many threads as torch uses."""
        given = [np.ascontiguousarray(a, dtype=np.float32) for a in (at.mean, at.sd, at.basis)]
        rest = (*self.single, self.starts, self.ends, at.begin)
        n = max(1, min(torch.get_num_threads(), len(at.mean) // WORTH_A_THREAD))
        ends = np.searchsorted(at.begin, np.linspace(0, at.begin[-1], n + 1)).tolist()
        first, *others = [ends[k : k + 2] for k in range(n)]
        work = compiled_averages()
        if not others:
            work(*given, *rest, *first, out, spread)
            return
        with ThreadPoolExecutor(len(others)) as pool:
            running = [pool.submit(lambda ends: work(*given, *rest, *ends, out, spread), e) for e in others]
            work(*given, *rest, *first, out, spread)
        for part in running:
            part.result()  # raises what went wrong there

    def _in_log_space(self, mean: np.ndarray, sd: np.ndarray, basis: np.ndarray) -> np.ndarray:
        """(T, V) label probabilities of one sequence, for any scores."""
        T, P = len(mean), len(self.noise)
        own = torch.from_numpy(basis * sd[:, None])  # (T, V, R)
        middle = torch.from_numpy(np.array(mean, dtype=np.float64))
        middle[0, torch.from_numpy(~self.starts)] = -torch.inf
        middle[-1, torch.from_numpy(~self.ends)] = -torch.inf
        noise = torch.from_numpy(self.noise[np.arange(T) % P]).to(own)
        f = middle + torch.einsum("tvr,trs->stv", own, noise)
        passed = Logs(f[:, None], self.g.to(f), torch.ones(1, T, dtype=torch.bool))
        said = passed.rest()[:, 0] + middle  # (S, T, V)
        fixed = torch.from_numpy(self.points).to(own)
        local = torch.einsum("tvr,rk->ktv", own, torch.cat([fixed, -fixed], 1))
        p = torch.softmax(said[None] + local[:, None], -1)
        return p.mean((0, 1)).numpy()


def reachable(follows: Tensor, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which labels can stand at positions 0, 1, ... after the beginning, and before the end, (d, V) each;
    the last row holds for all positions further away. follows : (..., V, V)."""
    step, found = follows.flatten(0, -3).all(0).numpy(), []
    for first, table in ((starts, step), (ends, step.T)):
        rows = [first]
        while len(rows) == 1 or (rows[-1] != rows[-2]).any():
            if len(rows) > 2 * len(first) ** 2:  # rows alternate: all that can ever stand there
                rows[-1] = np.any(rows, axis=0)
                break
            rows.append((rows[-1][:, None] & table).any(0))
        found.append(rows)
    longest = max(map(len, found))
    before, behind = (np.array(rows + [rows[-1]] * (longest - len(rows))) for rows in found)
    return before, behind


compiled_averages = if_numba("structgp.structures.linear_chain.compiled_averages", "average_sequences")
