"""'Why this label' for the page: an explanation as JSON, with similar tokens that were labelled."""

from __future__ import annotations

from typing import Any

from structgp.data.word_parts import feature_name
from structgp.errors import InputError
from structgp.service.session import Session

PARTS = 6
"""Number of features that are listed, and of tokens for and against the label."""


def why(session: Session, i: int, token: int, label: str | None, most: int) -> dict[str, Any]:
    """What speaks for a token's label against the next most probable one. label : None for the model's own
    label. most : number of latest labelled sequences in which similar tokens are looked for."""
    from structgp.api.explain import Explanation, explain

    tagger = session.answerer.tagger
    if tagger is None:
        raise InputError("why", "there is no model yet", "label more sequences first")
    tokens = session.opened(i, "search")["words"]
    if not 0 <= token < len(tokens):
        raise InputError("position", f"no token {token} of {len(tokens)}", "count from 0")
    # Nothing speaks for a label that the model has not seen yet.
    known = label if label in tagger.classes_ else None
    labelled = list(session.training_labels().items())[-most:]
    X = [session.pool.sequences[k].tokens for k, _ in labelled]
    # Labels given since the model was fitted may be new to it.
    y = [[label if label in tagger.classes_ else None for label in given] for _, given in labelled]
    found = explain(
        tagger,
        session.pool.sequences[i].tokens,
        token,
        known,
        X_train=X or None,
        y_train=y or None,
        n=PARTS,
    )
    assert isinstance(found, Explanation), "the page labels sequences with a chain"
    names = session.pool.reader.template_lines
    return {
        "label": found.label,
        "other": found.other,
        "probability": found.probability,
        "log_odds": found.log_odds,
        "parts": [
            {"name": "features", "score": found.unary},
            {"name": "the token before", "score": found.left},
            {"name": "the token after", "score": found.right},
        ],
        "features": [
            {"name": feature_name(part.name, names), "value": part.value, "score": part.score}
            for part in found.features[:PARTS]
        ],
        "witnesses": [
            _witness(session, labelled[w.sequence][0], w.token, w.label, w.score)
            for w in found.witnesses
            if w.sequence is not None and w.token is not None
        ],
    }


def _witness(session: Session, i: int, token: int, label: str | None, score: float) -> dict[str, Any]:
    words = session.pool.sequences[i].words
    return {"sequence": i, "words": words, "token": token, "label": label, "score": score}
