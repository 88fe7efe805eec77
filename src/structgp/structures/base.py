"""The base class of likelihoods: all that inference may call. Only ``log_prob`` is required.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Generator, Tensor

from structgp.errors import LikelihoodError
from structgp.structures.masks import keep_known
from structgp.structures.spec import Spec, chain


@dataclass(frozen=True)
class Curvature:
    """Minus the second derivatives of log p(y | f, g), averaged over draws.

    node : (B, R, T, T), for each direction a positive semi-definite matrix over the positions of the
    sequence; from ``local_curvature`` only its non-negative diagonal, (B, T, R). next : (B, V, V), for each
    label with the next one; (B, T-1, V, V) where g has one table per position.
    """

    node: Tensor
    next: Tensor


METHODS = (
    "marginals",
    "decode",
    "walk",
    "n_best",
    "sample",
    "entropy",
    "labellings",
    "curvature",
    "local_curvature",
)
"""Methods that a structure may offer in addition to ``log_prob``."""


class Structure(ABC):
    """A likelihood p(y | f, g) of one labelled structure given its latent values.

    A new structure only has to define ``log_prob``; the other methods are optional. Attributes that a class
    may set:

    has_gradient : autograd can differentiate ``log_prob`` in f and in g. ignores_shift : ``log_prob`` does
    not change when a number is added to all labels of a position. handles_missing : ``log_prob`` accepts
    negative y, a missing label. takes_evidence : y may be a floating-point tensor (B, T, V), evidence about
    each label (``masks.keep_known``). takes_single : f and g may come in single precision; not inherited.
    spec : the templates that have scores. has_marginals and the like are set for each method that a class
    defines.
    """

    has_gradient = True
    ignores_shift = handles_missing = takes_evidence = takes_single = False
    many_templates = False  # whether it takes scores and layout of a graph, see ``declared.Declared``
    has_marginals = has_decoder = has_walk = has_n_best = False
    has_sample = has_entropy = has_labellings = False
    has_curvature = has_local_curvature = False
    spec: Spec = chain()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for method in METHODS:
            flag = "has_decoder" if method == "decode" else f"has_{method}"
            defined = getattr(cls, method) is not getattr(Structure, method)
            if flag not in vars(cls) and getattr(cls, flag) is False:
                setattr(cls, flag, defined or (method == "local_curvature" and cls.has_curvature))
        if "takes_single" not in vars(cls):
            cls.takes_single = False

    @property
    def has_spans(self) -> bool:
        """True if answers about transitions and spans can be derived."""
        return self.has_walk or self.has_labellings

    @abstractmethod
    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """log p(y | f, g) for each draw and sequence.

        Parameters
        ----------
        f : (S, B, T, V) scores of labels.
        g : (S, V, V) scores of transitions, row = from, column = to; (S, B, T-1, V, V) if ``spec`` gives
            them features.
        y : (B, T) integer labels; entries where ``mask`` is false are ignored. Negative: missing.
        mask : (B, T) true at real positions, which come first in each row.

        Returns
        -------
        (S, B) log-probabilities.
        """

    def fixed_draws(self, *given: Any) -> Any:
        """See ``Chain.fixed_draws``; None for other structures."""
        return None

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, V) probabilities of each label at each position; 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no marginals")

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T) the most probable labelling of each draw; 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no decoder")

    def keep_known(self, scores: Sequence[Tensor], y: Tensor, mask: Any) -> tuple[Tensor, ...]:
        """Scores in which, where the label y (B, T) is known (not negative), all other labels have -inf; or
        scores plus evidence y (B, T, V)."""
        return keep_known(scores[0], y, mask), *scores[1:]

    def shifted(self, scores: Sequence[Tensor], shift: Tensor) -> list[Tensor]:
        """Scores with ``shift`` (V,) added, one number per label."""
        return [scores[0] + shift.to(scores[0]), *scores[1:]]

    def walk(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The labelling as a Markov chain from the first position to the last: node marginals (S, B, T, V),
        and transition matrices (S, B, T-1, V, V) from each position to the next; both 0 at padding. Answers
        about transitions and spans are derived from it."""
        raise NotImplementedError(f"{type(self).__name__} offers no Markov chain")

    def labellings(self, f: Tensor, g: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each sequence, labellings (C, T) without padding, and the share (S, C) of each labelling
        under each draw; shares sum to 1. These are all labellings with their probabilities, or a weighted
        sample. Answers about spans are derived from them where there is no ``walk``."""
        raise NotImplementedError(f"{type(self).__name__} offers no list of labellings")

    def given(self, y: Tensor) -> Structure | None:
        """This structure conditioned on labels y (B, T), negative where unknown; None if it is enough to
        give all other labels a score of -inf."""
        return None

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
        """Minus second derivatives of ``log_prob`` at the same arguments, where it is concave in (f, g).

        ``basis`` : (V, R) one direction in the space of labels per column; None for each label by itself.
        Only a structure that ``ignores_shift`` is given a basis.
        """
        raise NotImplementedError(f"{type(self).__name__} offers no curvature")

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """``curvature`` without the terms between different positions, which a structure may compute at
        less cost; ``next`` may leave out such terms as well."""
        whole = self.curvature(f, g, y, mask, *(() if basis is None else (basis,)))
        return Curvature(whole.node.diagonal(dim1=-1, dim2=-2).mT, whole.next)


def refuse(values: Tensor) -> NoReturn:
    """Raises LikelihoodError for values (S, B) that are not all finite, naming one such sequence of the
    batch: the bound needs the expectation of the log-likelihood of the training data."""
    bad = ~values.detach().isfinite()
    draw, row = bad.nonzero()[0].tolist()
    share = 100 * float(bad[:, row].double().mean())
    raise LikelihoodError(
        "likelihood",
        f"log p is {float(values[draw, row].detach())} at {share:.3g} % of the draws, so that "
        "its expectation, and with it the bound, does not exist",
        "return finite numbers for training data: compute in log space, or mix in a small "
        "probability of any labelling",
        row,
    )
