"""Answers about labellings from potentials: averaged probabilities, decodings, n best and samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structgp.answers.potentials import Potentials
from structgp.errors import InputError
from structgp.structures import Chain, Declared, Rules, Structure
from structgp.structures.program import draws_at_once

CANDIDATE_DRAWS = 128
"""Most draws whose best labellings are candidates for the n best: as many as answers average over by
default. Each candidate is scored under all draws, so that the cost would grow with their square."""


def transition_marginals(at: Potentials) -> Tensor:
    """(B, T-1, V, V) joint probabilities of neighbouring labels; 0 at padding."""
    B, T, V = at.f.shape[1:]
    total = at.f.new_zeros((B, T - 1, V, V))
    if not at.structure.has_walk:
        total = total.cpu()
        for b, (labels, p) in enumerate(weighted_labellings(at)):
            for t in range(labels.shape[1] - 1):
                total[b, t].index_put_((labels[:, t], labels[:, t + 1]), p.to(total), accumulate=True)
        return total
    # A few draws at a time: there is a transition matrix for each position of each draw.
    for some in at.some_draws(draws_at_once(at.f)):
        node, step = some.ask("walk")
        total += torch.einsum("sb,sbti,sbtij->btij", some.share, node[:, :, :-1], step)
    return total


def weighted_labellings(at: Potentials) -> list[tuple[Tensor, Tensor]]:
    """For each sequence, labellings (C, T) without padding, and their probabilities (C,) averaged over
    draws."""
    each = at.ask("labellings")
    return [(labels.to(p.device), at.share[:, b].to(p) @ p) for b, (labels, p) in enumerate(each)]


def log_prob(at: Potentials, y: Tensor) -> Tensor:
    """(B,) log of the probability of labelling y (B, T), averaged over draws; if labels are missing, of the
    known ones."""
    with torch.no_grad():
        values = at.log_prob(y)
        return torch.logsumexp(values, 0) - math.log(len(values))


def best_tokens(p: Tensor, layout: Any, rules: Rules | None, structure: Structure | None = None) -> Tensor:
    """(B, T) the labelling with the most tokens right in expectation among those that ``rules`` allow, from
    marginals (B, T, V). Without rules, the most probable label of each token. layout, structure : the mask
    of sequences, or the layout of graphs and the structure that declares them."""
    return _best(p, p, layout, rules, structure)


def cheapest_tokens(
    p: Tensor, layout: Any, rules: Rules | None, costs: Tensor, structure: Structure | None = None
) -> Tensor:
    """(B, T) the labelling with the lowest expected cost among those that ``rules`` allow, from marginals
    (B, T, V) and costs (V, V), row = true, column = predicted."""
    return _best(-(p @ costs.to(p)), p, layout, rules, structure)


def _best(gain: Tensor, p: Tensor, layout: Any, rules: Rules | None, structure: Structure | None) -> Tensor:
    """(B, T) the allowed labelling whose gains (B, T, V) have the largest sum, using only labels that are
    possible under the marginals p."""
    # A label of probability 0 may be ruled out by known labels.
    scores = torch.where(p > 0, gain, -torch.inf)
    if rules is None:
        return scores.argmax(-1)
    if isinstance(structure, Declared):
        return structure.best_allowed(scores[None], layout)[0]
    scores = scores[None]
    free = scores.new_zeros((1, *rules.follows.shape))
    mask = layout if isinstance(layout, Tensor) else layout.mask
    return Chain(rules).decode(scores, free, mask)[0]


MOST_NUMBERS = 1 << 27
"""Most numbers that the recursion for the n best labellings may keep (1 GB): n T V^2 per sequence."""


def at_most(n: int, at: Potentials) -> int:
    """n, or the number of labellings of the longest sequence if that is smaller."""
    T, V = at.mask.shape[1], at.f.shape[-1]
    return min(n, V**T) if T * math.log(max(1, V)) < 30 else n


def n_best(at: Potentials, plugged: Potentials, n: int) -> tuple[Tensor, Tensor]:
    """The n most probable labellings: labels (B, n, T) and log-probabilities (B, n), best first; -inf where
    there are fewer.

    Candidates are the 2 n best labellings under the posterior mean (``plugged``, with one draw) and the
    best one under each of up to ``CANDIDATE_DRAWS`` draws; their probabilities are averaged over all draws
    exactly. The result is exact if the mean is itself the only draw, or if n is at least the number of
    labellings. Cost O(B T V n (V + n)), and for S draws O(S B T V^2 (S + n))."""
    B, T = at.mask.shape
    V = at.f.shape[-1]
    wanted = at_most(2 * n, at) if len(at.f) > 1 else n
    most = MOST_NUMBERS // max(1, B * T * V**2 * (1 + (len(at.f) > 1)))
    if n > max(1, most):
        problem = f"{n:,} labellings of {T} tokens with {V} labels would take too much memory"
        raise InputError("n", problem, f"ask for at most {max(1, most):,}")
    if n == 1 and not _lists_best(plugged):
        labels = plugged.ask("decode")[:, :, None]
        scores = at.f.new_zeros((1, B, 1))
    else:
        labels, scores = plugged.ask("n_best", wanted)
    found, possible = labels[0], scores[0] > -torch.inf  # (B, C, T), (B, C)
    if len(at.f) > 1:
        best = at.fewer(CANDIDATE_DRAWS).ask("decode").transpose(0, 1)
        found = torch.cat([found, best], 1)
        possible = torch.cat([possible, possible.new_ones(best.shape[:2])], 1)
    chosen = found.new_zeros((B, n, T))
    log_probs = at.f.new_full((B, n), -torch.inf)
    for b in range(B):
        one = at.one(b, int(at.mask[b].sum()))
        width = one.mask.shape[1]
        candidates = torch.unique(found[b][possible[b]], dim=0)[:, :width]
        values = _averaged(one, candidates)
        top, order = values.topk(min(n, len(candidates)))
        chosen[b, : len(top), :width] = candidates[order]
        log_probs[b, : len(top)] = top
    return chosen, log_probs


def _lists_best(at: Potentials) -> bool:
    """True if the n best labellings can be listed; a program that is not exact only finds one good one."""
    structure: Any = at.structure
    return structure.has_n_best and (not hasattr(structure, "is_exact") or bool(at.ask("is_exact")))


def _averaged(at: Potentials, labels: Tensor) -> Tensor:
    """(C,) log of the probabilities, averaged over draws, of labellings (C, T) of the only sequence, a few
    at a time."""
    values = [at.times(len(some)).log_prob(some) for some in labels.split(draws_at_once(at.f[None]))]
    return torch.logsumexp(torch.cat(values, 1) + at.share.log(), 0)


def sample_labellings(at: Potentials, n: int, generator: torch.Generator) -> Tensor:
    """(n, B, T) labellings drawn from the average over draws: first a draw with the probability of its
    share, then a labelling from it. 0 at padding. Cost O(n B T V^2)."""
    which = torch.multinomial(at.share.T, n, replacement=True, generator=generator)  # (B, n)
    some = [at.one(b, at.mask.shape[1], draws) for b, draws in enumerate(which)]
    return torch.cat([one.ask("sample", generator) for one in some], 1)
