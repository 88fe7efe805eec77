"""Readers of files of sequences, for training on files and for labelling them.

:func:`learn` gives the reader for a training file, :func:`from_json` the reader of a saved model::

    reader = sources.learn("train.col", template="template")
    data = reader.read("train.col")                      # data.X and data.y, to fit
    for sequence in reader.sequences("new.col"): ...     # one by one, to label

A :class:`ColumnReader` reads columns through a CRF++ or Wapiti template, with numbers and word vectors
beside them, an :class:`AttributeReader` CRFsuite's labels and attributes, a :class:`JsonReader` JSON lines,
for graphs, trees, grids and layers as well."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structgp.data.sources.attributes import iter_attributes
    from structgp.data.sources.columns import iter_columns, read_columns, write_columns
    from structgp.data.sources.json_lines import iter_json
    from structgp.data.sources.lines import FileSequence, Labelled
    from structgp.data.sources.readers import (
        AttributeReader,
        ColumnReader,
        JsonReader,
        Reader,
        Stream,
        from_json,
        learn,
    )
    from structgp.data.sources.templates import Template
    from structgp.data.sources.vectors import Coverage, NumericColumns, WordVectors

__all__ = [
    "AttributeReader",
    "ColumnReader",
    "Coverage",
    "FileSequence",
    "JsonReader",
    "Labelled",
    "NumericColumns",
    "Reader",
    "Stream",
    "Template",
    "WordVectors",
    "from_json",
    "iter_attributes",
    "iter_columns",
    "iter_json",
    "learn",
    "read_columns",
    "write_columns",
]

_PLACES = {
    "AttributeReader": "readers",
    "ColumnReader": "readers",
    "Coverage": "vectors",
    "FileSequence": "lines",
    "JsonReader": "readers",
    "Labelled": "lines",
    "NumericColumns": "vectors",
    "Reader": "readers",
    "Stream": "readers",
    "Template": "templates",
    "WordVectors": "vectors",
    "from_json": "readers",
    "iter_attributes": "attributes",
    "iter_columns": "columns",
    "iter_json": "json_lines",
    "learn": "readers",
    "read_columns": "columns",
    "write_columns": "columns",
}


def __getattr__(name: str) -> Any:
    # Some of these import torch, which reading lines does not need: they are imported on first use.
    if name in _PLACES:
        return getattr(importlib.import_module(f"structgp.data.sources.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
