"""Slow and obvious versions of what the library computes fast, for tests to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor

from structgp.gp import Posterior


def labellings(T: int, V: int) -> np.ndarray:
    """(V^T, T) every labelling of T positions."""
    return np.array(list(product(range(V), repeat=T)), dtype=int).reshape(V**T, T)


@dataclass(frozen=True)
class ChainTable:
    """Every labelling of one chain, its log-score and its probability."""

    labels: np.ndarray  # (V^T, T)
    score: np.ndarray  # (V^T,)
    log_z: float
    prob: np.ndarray  # (V^T,)
    on: np.ndarray  # (V^T, T, V) whether position t has label j
    count: np.ndarray  # (V^T, V, V) how often i is followed by j

    @property
    def nodes(self) -> np.ndarray:
        """(T, V) marginals."""
        return np.tensordot(self.prob, self.on, 1)

    @property
    def pairs(self) -> np.ndarray:
        """(V, V) expected number of each transition."""
        return np.tensordot(self.prob, self.count, 1)

    @property
    def node_covariance(self) -> np.ndarray:
        """(V, T, T) Cov(1[y_t = j], 1[y_t' = j])."""
        away = self.on - self.nodes
        return np.einsum("n,ntj,nsj->jts", self.prob, away, away)

    @property
    def count_variance(self) -> np.ndarray:
        """(V, V) variance of the number of each transition."""
        return np.tensordot(self.prob, (self.count - self.pairs) ** 2, 1)


def chain_table(f: np.ndarray, g: np.ndarray) -> ChainTable:
    """The chain with scores f (T, V) of labels and g (V, V) or (T-1, V, V) of transitions, by enumeration.

    In extended precision where the machine has it."""
    f, g = np.asarray(f, dtype=np.longdouble), np.asarray(g, dtype=np.longdouble)
    T, V = f.shape
    labels = labellings(T, V)
    score = np.array([_score(f, g, y) for y in labels], dtype=np.longdouble)
    top = score.max()
    log_z = top + np.log(np.exp(score - top).sum())
    on = (labels[:, :, None] == np.arange(V)).astype(float)
    count = np.einsum("nti,ntj->nij", on[:, :-1], on[:, 1:])
    return ChainTable(labels, score, log_z, np.exp(score - log_z), on, count)


def obeys(y: Sequence[int], follows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Whether rules allow a labelling."""
    if not len(y):
        return True
    steps = all(follows[i, j] for i, j in pairwise(y))
    return bool(starts[y[0]] and ends[y[-1]] and steps)


def agrees(y: Sequence[int], known: Sequence[int]) -> bool:
    """Whether a labelling has the labels that are known (not negative)."""
    return all(b in (-1, a) for a, b in zip(y, known, strict=True))


def among(table: ChainTable, keep: np.ndarray) -> ChainTable:
    """The chain with only the labellings ``keep`` (V^T,); where there are none, all have probability 0."""
    score = np.where(keep, table.score, -np.inf)
    if not keep.any():
        return replace(table, score=score, log_z=-np.inf, prob=np.zeros(len(score)))
    top = score.max()
    log_z = top + np.log(np.exp(score - top).sum())
    return replace(table, score=score, log_z=log_z, prob=np.exp(score - log_z))


def _score(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.longdouble:
    total = np.longdouble(0)
    for t, label in enumerate(y):
        total += f[t, label]
        if t > 0:
            table = g if g.ndim == 2 else g[t - 1]
            total += table[y[t - 1], label]
    return total


def enumerated_log_prob(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """(S, B) log p of the chain by enumeration, differentiable. f : (S, B, T, V); g : (S, V, V), one table
    for all transitions, or (S, B, T - 1, V, V), one for each."""
    found = []
    for b, T in enumerate(mask.sum(-1).tolist()):
        every = torch.from_numpy(labellings(T, f.shape[-1]))
        t = torch.arange(T)
        nodes = f[:, b, t, every].sum(-1)
        before, after = every[:, :-1], every[:, 1:]
        tables = g[:, before, after] if g.dim() == 3 else g[:, b, t[1:] - 1, before, after]
        score = nodes + tables.sum(-1)
        (here,) = torch.nonzero((every == y[b, :T]).all(-1))[0].tolist()
        found.append(score[:, here] - torch.logsumexp(score, -1))
    return torch.stack(found, -1)


def enumerated_curvature(f: Tensor, g: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Minus the second derivatives of ``enumerated_log_prob``, averaged over draws, by enumeration. node :
    (B, V, T, T); next : (B, T - 1, V, V), of each score by itself; both 0 at padding."""
    _, B, T, V = f.shape
    node, after = torch.zeros(B, V, T, T).double(), torch.zeros(B, T - 1, V, V).double()
    for b, n in enumerate(mask.sum(-1).tolist()):
        every = torch.from_numpy(labellings(n, V))
        t = torch.arange(n)
        score = f[:, b, t, every].sum(-1) + g[:, b, t[1:] - 1, every[:, :-1], every[:, 1:]].sum(-1)
        p = score.softmax(-1)  # (S, labellings)
        on = torch.nn.functional.one_hot(every, V).double()
        mean = torch.einsum("sl,ltv->stv", p, on)
        both = torch.einsum("sl,ltv,luv->svtu", p, on, on)
        node[b, :, :n, :n] = (both - torch.einsum("stv,suv->svtu", mean, mean)).mean(0)
        joint = torch.einsum("sl,lti,ltj->stij", p, on[:, :-1], on[:, 1:])
        after[b, : n - 1] = (joint * (1 - joint)).mean(0)
    return {"node": node, "next": after}


def expected_log_prob(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    of: Callable[[Tensor, int], Tensor] = lambda log_p, count: log_p,
    nodes: int = 18,
) -> Tensor:
    """(K, B) E_q[of(log p(y_n | f_n, g))] of the chain for each component and sequence, differentiable in
    all that is behind the posterior. ``of`` also gets the number of labellings.

    Scores of labellings are linear in (f, g), hence jointly Gaussian, and log p depends on a few directions
    of them only: T + 1 with two labels. Gauss-Hermite over those. No code of the library but the kernel and
    the parameters; no draws."""
    node = posterior.node
    amplitude, Z = node.log_amplitude.exp(), node.inducing

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return amplitude * node.kernel(a, b).to_dense()

    root = torch.linalg.cholesky(kernel(Z, Z))
    table_mean, table_covariance = _table(posterior)
    answer = []
    K = posterior.n_components
    means, factors = (p if K > 1 else p[None] for p in (node.m, node.factor))
    for m, factor in zip(means, factors, strict=True):
        S = factor.square().diag_embed() if node.form == "diagonal" else _square(factor.tril())
        for b, T in enumerate(mask.sum(-1).tolist()):
            rows = x[b, :T]
            A = torch.linalg.solve_triangular(root, kernel(Z, rows), upper=False).mT
            rest = kernel(rows, rows) - A @ A.mT
            mean = torch.cat([(m @ A.mT).flatten(), table_mean])  # label by label, then g
            covariance = torch.block_diag(*(rest + A @ S_j @ A.mT for S_j in S), table_covariance)
            log_p, weight = _at_nodes(mean, covariance, y[b, :T], len(m), nodes)
            answer.append(weight @ of(log_p, len(m) ** T))
    return torch.stack(answer).reshape(K, len(mask))


def _square(lower: Tensor) -> Tensor:
    return lower @ lower.mT


def _table(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Mean (V^2,) and covariance (V^2, V^2) of the transition scores; of nothing where they are silent."""
    table = posterior["next"]
    if table.is_silent:
        return table.m.new_zeros(0), table.m.new_zeros(0, 0)
    variance = table.log_amplitude.exp()
    full = table.factor.shape[1] > 1
    S = _square(table.factor.tril()) if full else table.factor[:, 0].square().diag()
    return variance.sqrt() * table.m[:, 0], variance * S


def _at_nodes(mean: Tensor, covariance: Tensor, y: Tensor, V: int, nodes: int) -> tuple[Tensor, Tensor]:
    """log p(y) of one sequence at the nodes, and their weights."""
    T = len(y)
    table = chain_table(np.zeros((T, V)), np.zeros((V, V)))
    unary = table.on.transpose(0, 2, 1).reshape(len(table.labels), -1)
    reads = np.concatenate([unary, table.count.reshape(len(unary), -1)], 1)[:, : len(mean)]
    (here,) = np.flatnonzero((table.labels == y.numpy()).all(-1))
    left, size, right = np.linalg.svd(reads - reads[here], full_matrices=False)
    keep = size > 1e-9
    directions, back = torch.tensor(right[keep]), torch.tensor(left[:, keep] * size[keep])
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    grid = torch.cartesian_prod(*[torch.tensor(points)] * int(keep.sum()))
    weight = torch.cartesian_prod(*[torch.tensor(weights / weights.sum())] * int(keep.sum()))
    grid, weight = grid.reshape(-1, int(keep.sum())), weight.reshape(len(grid), -1).prod(-1)
    spread = torch.linalg.cholesky(directions @ covariance @ directions.mT)
    scores = (directions @ mean + grid @ spread.mT) @ back.mT  # less that of y
    return -torch.logsumexp(scores, -1), weight
