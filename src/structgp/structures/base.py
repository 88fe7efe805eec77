"""What the inference engine may know of a likelihood: its value.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Generator, Tensor


@dataclass(frozen=True)
class Curvature:
    """Minus the second derivatives of log p(y | f, g), averaged over draws.

    node : (B, R, T, T), for each direction over the positions of its sequence; positive semi-definite.
    next : (B, V, V), for each label with the next one; (B, T-1, V, V) where g has a table per position.
    """

    node: Tensor
    next: Tensor

    def __post_init__(self) -> None:
        _check_next(self.next)


@dataclass(frozen=True)
class LocalCurvature:
    """The same position by position. node : (B, T, R), not negative. next : (B, V, V), or (B, T-1, V, V)
    where g has a table per position."""

    node: Tensor
    next: Tensor

    def __post_init__(self) -> None:
        _check_next(self.next)


def _check_next(table: Tensor) -> None:
    # (V, V) would be spread over the batch without a word.
    if table.dim() not in (3, 4):
        raise ValueError(
            f"curvature of next has shape {tuple(table.shape)}; return (B, V, V), or (B, T-1, V, V)"
        )


class Structure(ABC):
    """A likelihood p(y | f, g) of one labelled structure given its latent values.

    ``log_prob`` is all a new structure must have. The rest is optional; a structure that lacks a
    method says so by leaving the base class's, which raises.
    """

    @abstractmethod
    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """log p(y | f, g) for each draw and sequence.

        Parameters
        ----------
        f : (S, B, T, V) scores of labels.
        g : (S, V, V) scores of transitions, row = from, column = to; (S, B, T-1, V, V) where they depend
            on features, which only a structure that declares such transitions is given.
        y : (B, T) integer labels; entries where ``mask`` is false are ignored. A negative one is missing:
            only a structure that ``handles_missing`` is given such.
        mask : (B, T) true at real positions, which come first in each row.

        Returns
        -------
        (S, B) log-probabilities.
        """

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, V) probabilities of each label at each position; 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no marginals")

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T) the most probable labelling of each draw; 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no decoder")

    def walk(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The labelling as a Markov chain from the first position to the last: node marginals (S, B, T,
        V), and transition matrices (S, B, T-1, V, V) from each position to the next; both 0 at
        padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no Markov chain")

    def sample(self, f: Tensor, g: Tensor, mask: Tensor, generator: Generator) -> Tensor:
        """(S, B, T) one labelling per draw and sequence, drawn from p(y | f, g); 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no labellings to draw")

    def entropy(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B) entropy of p(y | f, g) over labellings, in nats."""
        raise NotImplementedError(f"{type(self).__name__} offers no entropy")

    def n_best(self, f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n most probable labellings of each draw: labels (S, B, n, T), 0 at padding, and their
        log-probabilities (S, B, n), best first; -inf where there are fewer."""
        raise NotImplementedError(f"{type(self).__name__} offers no n best labellings")

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Second derivatives of ``log_prob`` with the same arguments, where it is concave in (f, g).

        ``basis`` : (V, R) directions in which the labels move together; None for each label by
        itself. Only a structure that ``ignores_shift`` is asked for directions.
        """
        raise NotImplementedError(f"{type(self).__name__} offers no curvature")

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> LocalCurvature:
        """``curvature`` without what positions have in common, which a structure may know at less cost;
        its ``next`` may then leave it out as well."""
        whole = self.curvature(f, g, y, mask, *(() if basis is None else (basis,)))
        return LocalCurvature(whole.node.diagonal(dim1=-1, dim2=-2).mT, whole.next)

    @property
    def has_gradient(self) -> bool:
        """Whether ``log_prob`` can be differentiated by autograd, in f and in g."""
        return True

    @property
    def ignores_shift(self) -> bool:
        """Whether ``log_prob`` stays what it is when a number is added to all labels of a position."""
        return False

    @property
    def has_marginals(self) -> bool:
        """Whether ``marginals`` is there."""
        return type(self).marginals is not Structure.marginals

    @property
    def has_decoder(self) -> bool:
        """Whether ``decode`` is there."""
        return type(self).decode is not Structure.decode

    @property
    def has_walk(self) -> bool:
        """Whether ``walk`` is there, which answers about transitions and spans come from."""
        return type(self).walk is not Structure.walk

    @property
    def has_sample(self) -> bool:
        """Whether ``sample`` is there."""
        return type(self).sample is not Structure.sample

    @property
    def has_entropy(self) -> bool:
        """Whether ``entropy`` is there."""
        return type(self).entropy is not Structure.entropy

    @property
    def has_n_best(self) -> bool:
        """Whether ``n_best`` is there."""
        return type(self).n_best is not Structure.n_best

    @property
    def takes_single(self) -> bool:
        """Whether f and g may come in single precision."""
        return False

    @property
    def handles_missing(self) -> bool:
        """Whether ``log_prob`` knows what to do where y is negative, a label that is missing."""
        return False

    @property
    def has_curvature(self) -> bool:
        """Whether ``curvature`` is there, which is what second-order inference asks."""
        return type(self).curvature is not Structure.curvature

    @property
    def has_local_curvature(self) -> bool:
        """Whether ``local_curvature`` is there, which is all that it asks in weight space."""
        return self.has_curvature or type(self).local_curvature is not Structure.local_curvature
