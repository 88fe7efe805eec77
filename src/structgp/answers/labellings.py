"""From potentials to answers: averaged marginals, decodings, n best and drawn labellings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structgp.answers.draws import Draws
from structgp.answers.potentials import Potentials
from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.structures import Chain, Rules, Structure


def marginals(at: Potentials) -> Tensor:
    """(B, T, V) label probabilities, averaged over draws: Bayes-optimal token by token."""
    return at.average(at.structure.marginals(at.f, at.g, at.mask))


def transition_marginals(at: Potentials) -> Tensor:
    """(B, T-1, V, V) probabilities of each label and the next; 0 at padding."""
    B, T, V = at.f.shape[1:]
    total = at.f.new_zeros((B, T - 1, V, V))
    for some, node, step in at.walks():
        total += torch.einsum("sb,sbti,sbtij->btij", at.share[some], node[:, :, :-1], step)
    return total


def log_prob(
    posterior: Posterior,
    structure: Structure,
    draws: Draws,
    batch: Batch,
    shift: Tensor | None = None,
) -> Tensor:
    """(B,) log of the probability of labelling ``batch.y``, averaged over draws; of its known part, where
    some of it is missing."""
    with torch.no_grad():
        f = draws.unary(posterior, batch)
        f = f if shift is None else f + shift.to(f)
        values = structure.log_prob(f, draws.pairwise, batch.y, batch.mask)
        return torch.logsumexp(values, 0) - math.log(len(values))


def best_tokens(p: Tensor, mask: Tensor, rules: Rules | None) -> Tensor:
    """(B, T) the labelling with the most tokens right in expectation, of those that ``rules`` allow, from
    marginals (B, T, V). Without rules the most probable label of each token."""
    if rules is None:
        return p.argmax(-1)
    # A label of probability 0 may be ruled out by what is known.
    scores = torch.where(p > 0, p, -torch.inf)[None]
    free = scores.new_zeros((1, *rules.follows.shape))
    return Chain(rules).decode(scores, free, mask)[0]


def n_best(at: Potentials, plugged: Potentials, n: int) -> tuple[Tensor, Tensor]:
    """The n most probable labellings: labels (B, n, T) and log-probabilities (B, n), best first; -inf where
    there are fewer.

    Candidates are the 2 n best of the posterior mean (``plugged``, of one draw) and the best of each draw;
    their probabilities are averaged over draws exactly. If the mean is itself the only draw, or n is at
    least the number of labellings, that is exact. Cost O(B T V^2 n), and for S draws O(S B T (V^2 + S +
    n)).
    """
    B, T = at.mask.shape
    n_all = at.f.shape[-1] ** T if T * math.log(at.f.shape[-1]) < 30 else math.inf
    wanted = int(min(2 * n, n_all)) if len(at.f) > 1 else n
    labels, scores = plugged.structure.n_best(plugged.f, plugged.g, plugged.mask, wanted)
    found, possible = labels[0], scores[0] > -torch.inf  # (B, C, T), (B, C)
    if len(at.f) > 1:
        best = at.structure.decode(at.f, at.g, at.mask).transpose(0, 1)  # (B, S, T)
        found = torch.cat([found, best], 1)
        possible = torch.cat([possible, possible.new_ones(B, len(at.f))], 1)
    chosen = found.new_zeros((B, n, T))
    log_probs = at.f.new_full((B, n), -torch.inf)
    for b in range(B):
        length = int(at.mask[b].sum())
        candidates = torch.unique(found[b][possible[b]], dim=0)[:, :length]
        C = len(candidates)
        f, mask = at.f[:, b : b + 1, :length].expand(-1, C, -1, -1), at.mask[b : b + 1, :length]
        values = at.structure.log_prob(f, at.g, candidates, mask.expand(C, -1))  # (S, C)
        values = torch.logsumexp(values + at.share[:, b : b + 1].log(), 0)
        top, order = values.topk(min(n, C))
        chosen[b, : len(top), :length] = candidates[order]
        log_probs[b, : len(top)] = top
    return chosen, log_probs


def sample_labellings(at: Potentials, n: int, generator: torch.Generator) -> Tensor:
    """(n, B, T) labellings drawn from the average over draws: a draw by its share, then a labelling from
    it. 0 at padding."""
    B, T = at.mask.shape
    which = torch.multinomial(at.share.T, n, replacement=True, generator=generator).T  # (n, B)
    uniform = torch.rand(n, B, T, generator=generator, dtype=at.f.dtype)
    found = torch.zeros(n, B, T, dtype=torch.int64)
    for some, node, step in at.walks():
        picked = (which >= some.start) & (which < some.stop)
        i, b = picked.nonzero(as_tuple=True)
        if len(i):
            found[i, b] = _walk(node, step, which[i, b] - some.start, b, uniform[i, b])
    return torch.where(at.mask, found, 0)


def _walk(node: Tensor, step: Tensor, s: Tensor, b: Tensor, uniform: Tensor) -> Tensor:
    """(n, T) labels from left to right, of draws s and sequences b (n,), by inversion of uniform (n, T)."""
    labels = [_invert(node[s, b, 0], uniform[:, 0])]
    for t in range(1, uniform.shape[1]):
        labels.append(_invert(step[s, b, t - 1, labels[-1]], uniform[:, t]))
    return torch.stack(labels, 1)


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """(n,) which label of p (n, V) a uniform number (n,) falls on; never one of probability 0."""
    total = p.cumsum(-1)
    found = (total <= (uniform * total[:, -1])[:, None]).sum(-1)
    return found.clamp(max=p.shape[-1] - 1)


def viterbi(plugged: Potentials) -> Tensor:
    """(B, T) the best whole labelling under the posterior mean, of which ``plugged`` is the one draw."""
    return plugged.structure.decode(plugged.f, plugged.g, plugged.mask)[0]
