"""The page about examples in memory: ``tagger.report(X, y, path)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structgp.data.atomic import atomic_write
from structgp.data.examples import as_list
from structgp.data.graphs import shape_of
from structgp.data.sources.json_lines import shown_word
from structgp.errors import InputError
from structgp.report.findings import Text, examine
from structgp.report.page import render

if TYPE_CHECKING:
    from structgp.api.estimator import StructuredGPClassifier


def write_page(
    tagger: StructuredGPClassifier,
    X: Sequence[Any],
    y: Iterable[Any] | None,
    path: str | Path,
    *,
    words: Sequence[Sequence[str]] | None = None,
    name: str = "data",
    model_name: str = "model",
) -> None:
    """Writes the page; see :meth:`structgp.StructuredGPClassifier.report`."""
    spec = tagger.model_.spec
    shown = (
        [_words(x, spec.form, i) for i, x in enumerate(X)] if words is None else [list(w) for w in words]
    )
    labels = None if y is None else as_list(y)
    if labels is not None and any(map(_has_missing, labels)):
        raise InputError("y", "some labels are missing", "leave these examples out, or pass y=None")
    for what, given in (("words", shown), ("y", labels)):
        if given is not None and len(given) != len(X):
            problem = f"{len(given)} entries for {len(X)} sequences"
            raise InputError(what, problem, "pass one per sequence")
    if not any(shown):
        raise InputError("X", "no tokens", "give at least one")
    text = Text(name, shown, list(range(1, len(X) + 1)), labels)
    content = render(examine(tagger, X, text, model_name=model_name)).encode("utf-8", "replace")
    with atomic_write(path, "wb") as file:
        file.write(content)


def _words(x: Any, form: str, number: int) -> list[str]:
    """The text shown for each token: its word, or its number."""
    nodes = x if form == "sequence" and not hasattr(x, "nodes") else shape_of(x, form, f"X[{number}]").nodes
    n = nodes.shape[0] if hasattr(nodes, "shape") else len(nodes)
    tokens = [None] * n if hasattr(nodes, "shape") else list(nodes)
    return [shown_word(token) or str(t + 1) for t, token in enumerate(tokens)]


def _has_missing(labels: Any) -> bool:
    """True if any label is None, in labels of any shape."""
    if isinstance(labels, Mapping):
        return any(map(_has_missing, labels.values()))
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        return labels is None
    return any(map(_has_missing, labels))
