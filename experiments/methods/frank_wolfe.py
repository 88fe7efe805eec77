"""Block-coordinate Frank-Wolfe for the structured SVM, for several C at once.

Letters: G values of C; D features; V labels; T tokens of a sequence; U different features in it.

The dual gives each sequence n a share w_n of the weights, w = sum_n w_n, and a share l_n of the loss. A
step finds the labelling y of the highest L(y_n, y) + score(y), and with psi = phi(x_n, y_n) - phi(x_n, y)

    (w_n, l_n)  ->  (1 - s) (w_n, l_n)  +  s (C psi, C L(y_n, y)),
    s = gap_n / |w_n - C psi|^2,  at most 1,    gap_n = <w_n - C psi, w> - l_n + C L(y_n, y).

The gaps of all sequences sum to the duality gap, which bounds how far the objective is from its minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from experiments.methods.design import Tokens

PASSES_BETWEEN_LOOKS = 5


@dataclass
class _Block:
    """One sequence: the features that occur in it, their (T, U) matrix and its transpose, y as (T,) and as
    (T, V) indicators, the counts (V, V) of pairs of neighbouring labels; and its shares (U, G, V),
    (G, V, V) and (G,)."""

    columns: np.ndarray
    x: csr_array
    x_transposed: csr_array
    y: np.ndarray
    is_y: np.ndarray
    steps: np.ndarray
    node: np.ndarray
    transitions: np.ndarray
    loss: np.ndarray


@dataclass
class _Corner:
    """The direction of a step: C psi as (U, G, V) and (G, V, V), C L (G,), and the gap (G,)."""

    node: np.ndarray
    transitions: np.ndarray
    loss: np.ndarray
    gap: np.ndarray


class FrankWolfe:
    """Learns weights (D, G, V) and (G, V, V) from the sequences ``index``; memory O(G V (D + sum_n U_n)).

    ``run`` continues until the relative gap of every C is small enough; ``average`` is the average of all
    iterates, the k-th with weight k, which converges faster than the last iterate.
    """

    def __init__(
        self,
        tokens: Tokens,
        y: Sequence[np.ndarray],
        index: Sequence[int],
        C: np.ndarray,
        n_labels: int,
        *,
        seed: int,
    ) -> None:
        self.C = C
        self.n_tokens = sum(tokens.lengths[n] for n in index)
        starts = tokens.starts
        self._blocks = [
            _block(tokens.features[starts[n] : starts[n + 1]], y[n], n_labels, len(C)) for n in index
        ]
        shape = (len(C), n_labels, n_labels)
        self._node = np.zeros((tokens.features.shape[1], *shape[:2]))
        self._transitions = np.zeros(shape)
        # sum_k k w_k = k (k + 1) / 2 w_k minus what each step added, times the total weight of the iterates
        # before it: so the average, too, changes only where a step changes w.
        self._late_node, self._late_transitions = np.zeros_like(self._node), np.zeros(shape)
        self._rng = np.random.default_rng(seed)
        self._n_steps = 0
        self.passes = 0
        self.objective = C * self.n_tokens
        self.relative_gap = np.ones(len(C))

    def run(self, tolerance: float, max_passes: int) -> None:
        """Makes passes until the tolerance is reached. A pass costs O(sum_n G (nnz_n V + T_n V^2))."""
        while self.passes < max_passes and (self.relative_gap > tolerance).any():
            for _ in range(min(PASSES_BETWEEN_LOOKS, max_passes - self.passes)):
                for n in self._rng.permutation(len(self._blocks)):
                    self._step(self._blocks[n])
                self.passes += 1
            self._look()

    def average(self) -> tuple[np.ndarray, np.ndarray]:
        """Node weights (D, G, V) and transition weights (G, V, V)."""
        total = self._n_steps * (self._n_steps + 1) / 2
        return self._node - self._late_node / total, self._transitions - self._late_transitions / total

    def _look(self) -> None:
        """Computes the objective and the gap, in one pass that leaves the weights as they are."""
        gap, dual = np.zeros(len(self.C)), np.zeros(len(self.C))
        for block in self._blocks:
            gap += self._corner(block).gap
            dual += block.loss
        size = self._node.swapaxes(0, 1).reshape(len(self.C), -1)
        dual -= 0.5 * ((size**2).sum(1) + (self._transitions**2).sum((1, 2)))
        self.objective = dual + gap
        self.relative_gap = gap / (self.C * self.n_tokens)

    def _corner(self, block: _Block) -> _Corner:
        w = self._node[block.columns]
        U, G, V = w.shape
        T = len(block.y)
        scores = (block.x @ w.reshape(U, G * V)).reshape(T, G, V)
        wrong = 1 - block.is_y
        path = best_labelling((scores + wrong[:, None]).transpose(1, 0, 2), self._transitions)  # (G, T)
        psi = np.repeat(block.is_y[:, None], G, 1)
        psi[np.arange(T)[:, None], np.arange(G), path.T] -= 1
        node = (block.x_transposed @ psi.reshape(T, G * V)).reshape(U, G, V)
        transitions = np.repeat(block.steps[None], G, 0)
        np.subtract.at(transitions, (np.arange(G)[:, None], path[:, :-1], path[:, 1:]), 1)
        node *= self.C[:, None]
        transitions *= self.C[:, None, None]
        loss = self.C * (path != block.y).sum(1)
        gap = ((block.node - node) * w).sum((0, 2)) + (
            (block.transitions - transitions) * self._transitions
        ).sum((1, 2))
        return _Corner(node, transitions, loss, gap - block.loss + loss)

    def _step(self, block: _Block) -> None:
        corner = self._corner(block)
        node, transitions = corner.node - block.node, corner.transitions - block.transitions
        size = (node**2).sum((0, 2)) + (transitions**2).sum((1, 2))
        step = np.clip(corner.gap / np.where(size > 0, size, 1), 0, 1)
        node *= step[:, None]
        transitions *= step[:, None, None]
        block.node += node
        block.transitions += transitions
        block.loss += step * (corner.loss - block.loss)
        before = self._n_steps * (self._n_steps + 1) / 2
        self._node[block.columns] += node
        self._late_node[block.columns] += before * node
        self._transitions += transitions
        self._late_transitions += before * transitions
        self._n_steps += 1


def _block(x: csr_array, y: np.ndarray, n_labels: int, n_C: int) -> _Block:
    columns, place = np.unique(x.indices, return_inverse=True)
    local = csr_array((x.data, place, x.indptr), shape=(len(y), len(columns)))
    steps = np.zeros((n_labels, n_labels))
    np.add.at(steps, (y[:-1], y[1:]), 1)
    return _Block(
        columns,
        local,
        csr_array(local.T),
        y,
        np.eye(n_labels)[y],
        steps,
        np.zeros((len(columns), n_C, n_labels)),
        np.zeros((n_C, n_labels, n_labels)),
        np.zeros(n_C),
    )


def best_labelling(scores: np.ndarray, transitions: np.ndarray) -> np.ndarray:
    """(G, T) labels with the highest score (Viterbi), for scores (G, T, V) and transitions (G, V, V).

    Ties go to the first label. Cost O(G T V^2), in T steps of NumPy.
    """
    G, T, V = scores.shape
    path = np.zeros((G, T), dtype=np.int64)
    if T == 0:
        return path
    best, came_from = scores[:, 0], np.empty((T, G, V), dtype=np.int64)
    into = np.ascontiguousarray(transitions.transpose(0, 2, 1))  # (G, to, from)
    for t in range(1, T):
        through = into + best[:, None, :]
        came_from[t] = through.argmax(-1)
        best = through.max(-1) + scores[:, t]
    which = np.arange(G)
    path[:, -1] = best.argmax(-1)
    for t in range(T - 1, 0, -1):
        path[:, t - 1] = came_from[t, which, path[:, t]]
    return path
