"""An encoder that goes on learning: new values behind the old ones, whose ids stay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from structgp.data.encode import FeatureEncoder
from structgp.data.forms import as_csr, length


def extended(encoder: FeatureEncoder, X: Sequence[Any]) -> FeatureEncoder:
    """A copy that also knows the features of X. Templates stay the ones that there were."""
    encoder = copy.deepcopy(encoder)
    sequences = [x for n, x in enumerate(X) if length(x, f"X[{n}]")]
    if not sequences:
        return encoder
    encoder.transform(X)  # what does not fit is told here
    if encoder.form == "sparse":
        seen = [as_csr(x).indices for x in sequences]
        encoder.columns = np.union1d(encoder.columns, np.concatenate(seen)).astype(int).tolist()
    elif encoder.form != "dense":
        _learn(encoder, sequences)
    return encoder


def _learn(encoder: FeatureEncoder, sequences: Sequence[Any]) -> None:
    for x in sequences:
        for token in x:
            values = token if encoder.form == "strings" else map(token.get, encoder.templates)
            for known, value in zip(encoder.values, values, strict=False):
                if isinstance(value, str):
                    known.setdefault(value, len(known))
    if encoder.has_sparse:
        encoder.learn_attributes(sequences)


def column_places(old: FeatureEncoder, new: FeatureEncoder) -> np.ndarray | None:
    """Where each known column of a scipy-sparse matrix has moved; None where ids stayed."""
    if old.form != "sparse" or not old.columns:
        return None
    return np.searchsorted(new.columns, old.columns)
