"""A tagger of batches for distributed workers: it holds a path and parameters, and pickles cheaply.

Ray Data, Dask and Spark send a function to their workers and call it with one part of the data after
another, as a list, a dict of arrays, or a pandas or Arrow table. The worker reads the model at the first
call, once per process, however many copies of the tagger arrive there."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from structgp.api.fitted import Fitted, read_as
from structgp.errors import InputError

MAY_BE_SET = ("n_draws", "decode", "costs", "class_weight", "device")
"""Parameters that affect answers; all others belong to the fit."""

_lock = threading.Lock()
_models: dict[str, tuple[tuple[int, int], Any, Fitted]] = {}
"""Maps a path to the file's modification time and size when read, the ``structure`` and the model."""


class BatchTagger:
    """Labels batches of sequences with the model in a file.

    ``tagger(batch)`` returns a batch of the same kind, with the labels of each sequence as 'labels' and
    their probabilities as 'probabilities', one per token:

    ========================  ===================================================================
    batch                     returns
    ========================  ===================================================================
    list, or any iterable     list of dicts with those two keys
    pandas Series             DataFrame with its index
    pandas DataFrame          a copy with two more columns
    Arrow Table, RecordBatch  a Table with two more columns
    dict of columns           the same with two more, arrays of lists
    ========================  ===================================================================

    It can be pickled: the process that calls it reads the model, at its first call. Several threads may
    call it.

    Parameters
    ----------
    path : path of the model file, as the workers see it.
    column : which column of a table holds the sequences; not needed if there is only one.
    all_labels : also add the probabilities of all labels, as 'marginals': for each token one per label, in
        the order of ``tagger.classes``.
    structure : the likelihood, for a model that was fitted with one of your own; see ``structgp.load``.
    threads : number of torch threads during a call; 1 suits frameworks that start one worker per core. None
        leaves the number as it is.
    parameters : n_draws, decode, costs, class_weight or device, to override the values in the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        column: str | None = None,
        all_labels: bool = False,
        structure: Any = None,
        threads: int | None = 1,
        **parameters: Any,
    ) -> None:
        for name in parameters:
            if name not in MAY_BE_SET:
                raise InputError(name, "cannot be set", f"use one of {', '.join(MAY_BE_SET)}")
        if threads is not None and (not isinstance(threads, int | np.integer) or threads < 1):
            problem = f"must be a positive integer or None, got {threads!r}"
            raise InputError("threads", problem, "use 1 where there is one worker per core")
        self.path, self.column, self.all_labels = str(path), column, all_labels
        self.structure, self.threads, self.parameters = structure, threads, parameters

    def __repr__(self) -> str:
        return f"BatchTagger({self.path!r})"

    @property
    def classes(self) -> list[str]:
        """The labels of the model, in the order of 'marginals'. Reads the model."""
        return [str(label) for label in self._fitted().classes_]

    def __call__(self, batch: Any) -> Any:
        arrow = sys.modules.get("pyarrow")  # if the batch is an Arrow table, pyarrow has been imported
        if arrow is not None and isinstance(batch, arrow.Table | arrow.RecordBatch):
            column = batch.column(self._column(batch.schema.names))
            table = batch if isinstance(batch, arrow.Table) else arrow.Table.from_batches([batch])
            for name, values in self._answers(column.to_pylist()).items():
                at, column = table.schema.get_field_index(name), arrow.array(values)
                table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
            return table
        if isinstance(batch, Mapping):
            return {**batch, **_arrays(self._answers(batch[self._column(list(batch))]))}
        if hasattr(batch, "iloc") and hasattr(batch, "columns"):
            answers = self._answers(batch[self._column(list(batch.columns))])
            return batch.assign(**{name: _objects(values) for name, values in answers.items()})
        answers = self._answers(batch)
        if hasattr(batch, "iloc"):
            return batch.to_frame().assign(**_arrays(answers))[list(answers)]
        names = list(answers)
        return [dict(zip(names, row, strict=True)) for row in zip(*answers.values(), strict=True)]

    def _column(self, names: Sequence[str]) -> str:
        """Name of the column that holds the sequences."""
        if self.column is None and len(names) == 1:
            return names[0]
        if self.column is None or self.column not in names:
            problem = f"the batch has the columns {', '.join(map(str, names))}"
            problem = problem if self.column is None else f"{self.column!r} is not one of them: {problem}"
            raise InputError("column", problem, "name the one that has the sequences")
        return self.column

    def _answers(self, cells: Iterable[Any]) -> dict[str, list[Any]]:
        """The columns of answers for the sequences in ``cells``."""
        X, fitted = [_plain(cell) for cell in cells], self._fitted()
        names = ["labels", "probabilities", *(["marginals"] if self.all_labels else [])]
        if not X:
            return {name: [] for name in names}
        with _threads(self.threads):
            asked = fitted.ask(X)
            places, marginals = asked.labels(None), asked.marginals(None)
        labels = [fitted.model_.labels.names(y) for y in places]
        sure = [p[np.arange(len(p)), y].tolist() for y, p in zip(places, marginals, strict=True)]
        found = [labels, sure, *([[p.tolist() for p in marginals]] if self.all_labels else [])]
        return dict(zip(names, found, strict=True))

    def _fitted(self) -> Fitted:
        """The model, read once per process, and again if the file has changed."""
        path = Path(self.path)
        try:
            stat = path.stat()
            stamp = stat.st_mtime_ns, stat.st_size
        except OSError:
            stamp = -1, -1  # reading it will say what is wrong
        key = str(path.absolute())
        with _lock:
            known = _models.get(key)
            if known is None or known[0] != stamp or known[1] is not self.structure:
                known = _models[key] = stamp, self.structure, self._read(path)
        fitted = copy.copy(known[2])  # the model itself is shared
        for name, value in self.parameters.items():
            setattr(fitted, name, value)
        return fitted

    def _read(self, path: Path) -> Fitted:
        fitted = read_as(Fitted, path, self.structure)
        if fitted.model_.spec.form != "sequence" or fitted.model_.spec.layers:
            problem = f"{fitted.model_.spec} does not give one label to each token of a sequence"
            raise InputError(str(path), problem, "use structgp.load, and ask the model itself")
        return fitted


@contextmanager
def _threads(n: int | None) -> Iterator[None]:
    """Sets the number of torch threads within the context; None leaves it as it is."""
    import torch

    before = torch.get_num_threads()
    if n is None or n == before:
        yield
        return
    torch.set_num_threads(int(n))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plain(value: Any) -> Any:
    """Converts a cell to what ``predict`` takes. Tables turn lists into arrays, and give every token of a
    sequence the same keys, with None for keys that the token did not have."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value


def _objects(values: list[Any]) -> np.ndarray:
    """(N,) object array with one value per row, even if all lists have the same length."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _arrays(columns: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
    return {name: _objects(values) for name, values in columns.items()}
