"""What a fit needs to know of training data, where that is on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from structgp.data.encode import FeatureEncoder
from structgp.data.examples import check_obeyed
from structgp.data.labels import LabelEncoder
from structgp.data.schemes import Allowed, allowed
from structgp.data.shards.batches import ShardBatches
from structgp.data.shards.layout import Shards


@dataclass(frozen=True)
class ShardedExamples:
    """The same to a fit as ``Examples``, with the rows on disk."""

    shards: Shards
    constraints: Allowed | None = None
    weights: None = None

    @property
    def encoder(self) -> FeatureEncoder:
        return self.shards.encoder

    @cached_property
    def labels(self) -> LabelEncoder:
        return LabelEncoder(self.shards.classes)

    @property
    def n_labels(self) -> int:
        return len(self.shards.classes)

    @property
    def n_sequences(self) -> int:
        return self.shards.n_sequences

    @property
    def n_tokens(self) -> int:
        return self.shards.n_tokens

    @property
    def typical_length(self) -> float:
        return self.shards.about["lengths_squared"] / max(1, self.n_tokens)

    @property
    def label_counts(self) -> np.ndarray:
        return np.array(self.shards.about["label_counts"])

    @property
    def some_missing(self) -> bool:
        return bool(self.shards.about["some_missing"])

    @property
    def digest(self) -> str:
        return self.shards.digest

    def batches(self, batch_tokens: int) -> ShardBatches:
        return ShardBatches(self.shards, batch_tokens)


def read_sharded(shards: Shards, constraints: Any) -> ShardedExamples:
    """The examples, whose labels keep to the constraints: they are gone through for it."""
    labels = LabelEncoder(shards.classes)
    rules = None if constraints is None else allowed(constraints, labels.classes)
    if rules is not None:
        check_obeyed(rules, shards.labels(), labels)
    return ShardedExamples(shards, rules)
