"""Texts with tokens that keep their place, labels and spans.

A :class:`Document` has a text, its tokens as character offsets, and labels; :func:`tokenize` finds tokens,
and :func:`token_features` gives them features to fit a classifier with::

    document = Document.from_text("Ann Lee left Rome.", [(0, 7, "PER"), (13, 17, "LOC")])
    X, y = [token_features(document.words)], [document.labels]
"""

from structgp.data.documents.align import token_spans
from structgp.data.documents.document import Document, Prediction, TextSpan
from structgp.data.documents.token_features import token_features
from structgp.data.documents.tokenizer import tokenize
from structgp.data.span_labels import labels_to_spans, spans_to_labels

__all__ = [
    "Document",
    "Prediction",
    "TextSpan",
    "labels_to_spans",
    "spans_to_labels",
    "token_features",
    "token_spans",
    "tokenize",
]
