"""Labelled data as a fit needs it: encoded, checked, and without sequences from which nothing can be
learned."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from structgp.data.annotations import Annotations, Given, majority
from structgp.data.batch import Batch
from structgp.data.encode import FeatureEncoder
from structgp.data.find_words import find_word
from structgp.data.graphs import Shape, has_integers, shape_of
from structgp.data.labels import (
    LabelEncoder,
    check_labels,
    check_obeyed,
    check_several,
    listed,
    node_labels,
)
from structgp.data.links import GraphSplit, Links, check_edges, own_encoders
from structgp.data.rules import check_tuples, declared_rules
from structgp.data.schemes import Allowed
from structgp.data.token_forms import length
from structgp.errors import InputError, StructgpWarning


def as_list(X: Iterable[Any]) -> list[Any]:
    """X as a list, with generators read out; elements that are not sequences are left for the encoder to
    report."""
    return [
        x if hasattr(x, "__len__") or not isinstance(x, Iterable) else list(x)
        for x in listed(X, "X", "sequences", "pass one sequence of tokens per example, in a list")
    ]


@dataclass(frozen=True)
class Examples:
    """Encoded training data.

    rows : one (T, W) matrix per sequence; y : one (T,) array of label indices, ``MISSING`` for missing
    labels; weights : (N,) how often each sequence counts, None if each counts once; constraints : the rules
    that labellings obey, None if there are none; split, links : what each template sees, and the tuples of
    each example, None for chains. given : what several annotators said, in which case y only holds the
    labels that are most probable given their answers; evidence : one (T, V) array per sequence, the
    log-likelihood of what annotators said given each label.

    Derived from these: n_labels; n_sequences, the number of sequences with tokens; n_tokens;
    typical_length, the mean over tokens of the length of their sequence; label_counts, (V,) how often each
    label occurs, with sequences counted by their weights; in_many_parts, true if no sequence has more than
    a tenth of the tokens; some_missing, true if some labels are missing."""

    encoder: FeatureEncoder
    labels: LabelEncoder
    rows: list[np.ndarray]
    y: list[np.ndarray]
    weights: np.ndarray | None
    constraints: Allowed | None
    split: GraphSplit | None = None
    links: list[Links] | None = None
    given: Given | None = None
    evidence: list[np.ndarray] | None = None
    n_labels: int = field(init=False)
    n_sequences: int = field(init=False)
    n_tokens: int = field(init=False)
    typical_length: float = field(init=False)
    label_counts: np.ndarray = field(init=False)
    in_many_parts: bool = field(init=False)
    some_missing: bool = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.array([len(r) for r in self.rows])
        n_known = [int((y >= 0).sum()) for y in self.y]
        counted = None if self.weights is None else np.repeat(self.weights, n_known)
        known = np.concatenate([y[y >= 0] for y in self.y])
        vars(self).update(
            n_labels=len(self.labels.classes),
            n_sequences=int((lengths > 0).sum()),
            n_tokens=int(lengths.sum()),
            typical_length=float((lengths**2).sum() / max(1, lengths.sum())),
            label_counts=np.bincount(known, counted, minlength=len(self.labels.classes)),
            in_many_parts=bool(10 * lengths.max() <= lengths.sum()),
            some_missing=sum(n_known) < sum(map(len, self.y)),
        )

    def part(self, index: Sequence[int]) -> Examples:
        """The sequences ``index``, with all labels and features: those that do not occur in these sequences
        are treated like ones that were never seen."""
        weights = None if self.weights is None else self.weights[list(index)]
        links = None if self.links is None else [self.links[i] for i in index]
        given = None if self.given is None else self.given.part(index)
        evidence = None if self.evidence is None else [self.evidence[i] for i in index]
        rows, y = [self.rows[i] for i in index], [self.y[i] for i in index]
        beside = {"weights": weights, "links": links, "given": given, "evidence": evidence}
        return replace(self, rows=rows, y=y, **beside)  # type: ignore[arg-type]

    def as_chains(self) -> Examples:
        """The same nodes without the links between them."""
        return replace(self, split=None, links=None)

    def as_graphs(self, batch: Batch) -> Batch:
        """Turns a batch of nodes into a batch of whole examples."""
        assert self.split is not None
        assert self.links is not None
        return self.split(batch, self.rows, self.links)

    @property
    def n_layers(self) -> int:
        """Labels per token."""
        return 1 if self.split is None else max(1, len(self.split.spec.layers))

    def tokens(self, layer: int = 0) -> Examples:
        """The nodes without the links between them, with their labels in one layer."""
        y, labels = self.y, self.labels
        if self.split is not None and self.split.spec.layers:
            start, stop = self.split.spans[self.split.spec.layers[layer]]
            parts = [of.reshape(self.n_layers, -1)[layer] for of in y]
            y, labels = (
                [np.where(of >= 0, of - start, of) for of in parts],
                LabelEncoder(labels.classes[start:stop]),
            )
        return Examples(self.encoder, labels, self.rows, y, self.weights, None)

    def under(self, constraints: Allowed) -> Examples:
        """The same examples under constraints that all their labellings obey."""
        return replace(self, constraints=constraints)

    @property
    def digest(self) -> str:
        """SHA-256 of the rows, the labels, the sample weights, the links and the evidence."""
        digest = hashlib.sha256()
        linked = [array for link in self.links or () for array in (*link.tuples, *link.own)]
        for array in (*self.rows, *self.y, self.weights, *linked, *(self.evidence or ())):
            if array is not None:
                digest.update(repr(array.shape).encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def read_examples(
    X: Sequence[Any],
    y: Sequence[Any] | Annotations,
    *,
    features: str = "auto",
    word_parts: bool | str = False,
    weights: Any = None,
    constraints: Any = None,
    encoder: FeatureEncoder | None = None,
    classes: Sequence[str] = (),
    encode_anew: bool = False,
    spec: Any = None,
    stacklevel: int = 4,
) -> Examples:
    """Encodes X and y as examples; for annotations, y becomes the label that most annotators gave.

    word_parts : whether a new encoder also takes words apart, or the name of the template to take apart.
    spec : of a structure that is not a chain. encoder : a fitted one to extend by the new features, None
    for a new one; classes : labels besides those of y; with an encoder they come first, in their order.
    encode_anew : whether to build a new encoder all the same, for X that holds all that the old one saw.
    Sequences without any label (with a warning, at ``stacklevel``) or weight become empty ones."""
    shapes = None if spec is None else [shape_of(x, spec.form, f"X[{n}]") for n, x in enumerate(X)]
    annotations, y = (y, []) if isinstance(y, Annotations) else (None, y)
    said = None if annotations is None else _flat(X, annotations, shapes, spec)
    X, given_X = X if shapes is None else [shape.nodes for shape in shapes], X
    if said is not None:
        labels_of = majority(said, _label_counts(X, spec))
    else:
        labels_of = check_labels(given_X, y) if shapes is None else node_labels(shapes, y, spec.layers)
    counts = None if weights is None else _check_weights(weights, len(X))
    used = _used(labels_of, counts, stacklevel)
    # Unused sequences become empty, so that errors name the others by their place in X.
    X = [x if i in used else [] for i, x in enumerate(X)]
    shapes = None if shapes is None else [s if i in used else Shape([]) for i, s in enumerate(shapes)]
    labels_of = [of if i in used else [] for i, of in enumerate(labels_of)]
    said = None if said is None else [of if i in used else {} for i, of in enumerate(said)]
    each = labels_of if said is None else [labels for of in said for labels in of.values()]
    found = {label for labels in each for label in labels if label is not None}
    as_given = y if annotations is None else [v for of in annotations.given for v in of.values()]
    whole = spec is not None and spec.form == "grid" and all(map(has_integers, as_given))
    # Labels of one layer stay together, whatever the layer's name.
    order: Any = int if whole else (lambda label: label.split("=", 1)) if spec and spec.layers else None
    known = classes if encoder is not None else ()
    labels = LabelEncoder([*known, *sorted({*classes, *found} - set(known), key=order)], whole)
    check_several(labels.classes, spec.layers if spec else ())
    encoded, given = labels.transform(labels_of), None
    encoder, rows = _encoded(X, encoded, None if encode_anew else encoder, features, word_parts)
    rules = None if constraints is None else declared_rules(constraints, labels.classes, spec)
    if annotations is not None and said is not None:
        given = Given.read(said, annotations.names, labels.classes, annotations.sequential)
    elif rules is not None:
        check_obeyed(rules, enumerate(encoded), labels.classes)
    if shapes is None:
        return Examples(encoder, labels, rows, encoded, counts, rules, given=given)
    split = GraphSplit(encoder, spec, own_encoders(spec, shapes), labels.classes)
    links = links_of(split, rows, shapes)
    check_edges(spec, shapes)
    if rules is not None and rules.more and given is None:
        check_tuples(rules, split, encoded, links, labels.classes)
    return Examples(encoder, labels, rows, encoded, counts, rules, split, links, given)


def _label_counts(X: Sequence[Any], spec: Any) -> list[int]:
    """Number of labels of each example: one per token and layer."""
    layers = max(1, len(spec.layers)) if spec else 1
    return [layers * length(x, f"X[{n}]") for n, x in enumerate(X)]


def _encoded(
    X: Sequence[Any],
    y: Sequence[np.ndarray],
    known: FeatureEncoder | None,
    features: str,
    word_parts: bool | str,
) -> tuple[FeatureEncoder, list[np.ndarray]]:
    """An encoder that knows all of X, and the rows into which it encodes X. If an encoder is already known,
    words are taken apart as that encoder did."""
    encoder = FeatureEncoder(features).fit(X) if known is None else known.extended(X)
    rows = encoder.transform(X)
    if known is None and word_parts:
        place = None if isinstance(word_parts, bool) else encoder.columns_named([word_parts])[0]
        found = find_word([list(values) for values in encoder.values], rows, y, place)
        if found is not None:
            encoder.add_parts(*found)
        if encoder.parts is not None:
            rows = [encoder.with_parts(own) for own in rows]
    return encoder, rows


def _flat(
    X: Sequence[Any], y: Annotations, shapes: Sequence[Shape] | None, spec: Any
) -> list[dict[str, list[str | None]]]:
    """The labels of the variables of each example, by annotator, after checking that they fit."""
    if len(X) != len(y):
        problem = f"annotations of {len(y)} sequences for {len(X)} sequences of tokens"
        raise InputError("y", problem, "pass one dict per sequence")
    if shapes is None:
        return y.flat(lambda n, labels: check_labels([X[n]], [labels])[0])
    return y.flat(lambda n, labels: node_labels([shapes[n]], [labels], spec.layers)[0])


def _used(
    labels_of: Sequence[Sequence[str | None]], counts: np.ndarray | None, stacklevel: int
) -> set[int]:
    """Indices of the sequences that a fit uses: those with a positive weight that have a label, or no
    tokens at all. InputError if no token is left."""
    if any(labels_of) and not any(v is not None for of in labels_of for v in of):
        raise InputError("y", "no token has a label", "label some of them")
    labelled = [i for i, of in enumerate(labels_of) if not of or any(v is not None for v in of)]
    n, left_out = len(labels_of), len(labels_of) - len(labelled)
    if left_out:
        message = f"{left_out} of {n} sequences have no label at all and are left out"
        warnings.warn(message, StructgpWarning, stacklevel=stacklevel)
    used = {i for i in labelled if counts is None or counts[i] > 0}
    if not any(labels_of[i] for i in used):
        if len(used) < n:
            raise InputError("y", "no token with a label is in a sequence with weight", "label some tokens")
        raise InputError("X", "no tokens", "pass at least one sequence with one token")
    return used


def links_of(split: GraphSplit, rows: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[Links]:
    """The tuples of each example; ``rows`` are the encoded nodes of each."""
    parts = enumerate(zip(rows, shapes, strict=True))
    return [split.links(r, shape, f"X[{n}]") for n, (r, shape) in parts]


def _check_weights(weights: Any, n: int) -> np.ndarray:
    place, remedy = "sample_weight", "pass one number per sequence"
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(place, "not all numbers", remedy) from None
    if found.shape != (n,):
        raise InputError(place, f"shape {found.shape} for {n} sequences", remedy)
    if not np.isfinite(found).all() or (found < 0).any() or not (found > 0).any():
        remedy = "pass positive numbers, or 0 to leave a sequence out"
        raise InputError(place, "must be finite, not negative, and not all zero", remedy)
    return found
