"""The fitted model: a value that can be asked (``ask``), saved (``model_file``) and inspected."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from structgp.answers.ask import Asked, Question
from structgp.answers.draws import Draws, mean, sample
from structgp.data.encode import FeatureEncoder, FeatureSplit
from structgp.data.examples import LabelEncoder
from structgp.data.schemes import Allowed
from structgp.gp import Posterior
from structgp.structures import Chain, Rules, Spec, Structure, chain

KEPT_DRAWS = 4
"""Sets of draws that a model keeps for the next question, those asked for last."""


def as_rules(found: Allowed | None) -> Rules | None:
    if found is None:
        return None
    return Rules(*map(torch.from_numpy, (found.follows, found.starts, found.ends)))


class _Cache:
    """Draws by number and device, and posteriors by device: computed once, by one thread. A copy of a
    model starts with an empty one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.draws: OrderedDict[tuple[int, str], Draws] = OrderedDict()
        self.placed: dict[str, Posterior] = {}

    def __reduce__(self) -> tuple[type[_Cache], tuple[()]]:
        return _Cache, ()


@dataclass(frozen=True)
class Model:
    """A fitted posterior with the encoders that lead to it. Nothing in it changes while it is asked, and
    several threads may ask at once.

    spec : the declared structure that answers. predictor : a structure of the user's own in its place,
    which a file does not keep. n_draws : draws that an answer averages over unless the question says
    otherwise; 0 plugs in the posterior mean. seed : of those draws. info : what is worth keeping of the
    fit (bound, time, versions). extra : what the caller wants kept with the model, such as the source of
    a feature template; JSON values only. constraints : on labellings, in every answer."""

    encoder: FeatureEncoder
    labels: LabelEncoder
    posterior: Posterior
    spec: Spec = field(default_factory=chain)
    n_draws: int = 128
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    predictor: Structure | None = None
    constraints: Allowed | None = None
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False)

    @property
    def structure(self) -> Structure:
        """The structure that answers."""
        if self.predictor is not None:
            return self.predictor
        return Chain(self.rules, self.spec)

    @cached_property
    def split(self) -> FeatureSplit:
        """What nodes and transitions see of a token's features."""
        return FeatureSplit(self.encoder, self.spec)

    @property
    def rules(self) -> Rules | None:
        """The constraints, if they forbid anything."""
        rules = as_rules(self.constraints)
        return None if rules is None or rules.is_free else rules

    def ask(self, X: Sequence[Any], question: Question | None = None) -> Asked:
        """The sequences X, encoded once, to be asked several questions under the same settings."""
        asked = Question(self.n_draws) if question is None else question
        return Asked(self, asked, self.encoder.transform(X))

    def placed(self, device: str) -> Posterior:
        """The posterior, or a copy of it on the device where answers are computed."""
        if torch.device(device).type == "cpu":
            return self.posterior
        with self._cache.lock:
            if device not in self._cache.placed:
                self._cache.placed[device] = copy.deepcopy(self.posterior).to(device)
            return self._cache.placed[device]

    def draws(self, n_draws: int, device: str = "cpu") -> Draws:
        """Joint draws of all potentials, or for 0 draws the posterior mean. Kept for the next question: a
        fitted posterior does not change any more."""
        key, kept = (n_draws, device), self._cache.draws
        with self._cache.lock:
            if key not in kept:
                here = self.placed(device)
                kept[key] = sample(here, n_draws, self.seed) if n_draws else mean(here)
            kept.move_to_end(key)
            while len(kept) > KEPT_DRAWS:
                kept.popitem(last=False)
            return kept[key]
