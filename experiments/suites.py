"""The data of the paper's experiments, from a folder.

The data belong to others and do not come with the package. The folder holds::

    encoded/TASK.npz                       sparse binary features and the paper's five folds
    columns/TASK.data, columns/TASK.template   the same sequences as raw columns, CRF++ template

Arrays of an ``npz``: ``indptr``, ``indices`` (CSR rows of active features, one per token),
``seq_offsets`` (sequence s is tokens seq_offsets[s] to seq_offsets[s + 1] - 1), ``labels`` (0 to
V - 1), ``labels_raw`` (the same, -1 where the label is outside the task's set), ``fold_train`` and
``fold_test`` (sequence numbers, one row per fold), ``n_labels``.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from structgp.data.sources.columns import ColumnFile, read_columns
from structgp.data.sources.templates import Template
from structgp.errors import InputError

Rows = list[tuple[str, ...]]
Indices = NDArray[np.int64]
Fold = tuple[Indices, Indices]

DATA_VARIABLE = "STRUCTGP_DATA"
TASKS = ("basenp", "chunking", "segmentation", "japanesene", "basenp_large")

# basenp_large is basenp with larger folds: same sequences, same columns.
_COLUMNS_OF = {task: task for task in TASKS} | {"basenp_large": "basenp"}
_ARRAYS = (
    "indptr",
    "indices",
    "seq_offsets",
    "labels",
    "labels_raw",
    "fold_train",
    "fold_test",
    "n_labels",
)


@dataclass(frozen=True)
class EncodedSuite:
    """One task as the paper encoded it.

    task : its name.
    X : one (T, D) sparse float64 matrix of 0 and 1 per sequence; D is the task's largest feature
        number plus one. A row can be empty.
    y : labels '0' to 'V-1', one list per sequence.
    y_raw_known : one boolean array (T,) per sequence, False where the label is outside the task's
        set and the publishers put '0' in its place.
    folds : (training sequence numbers, test sequence numbers) for each fold.
    """

    task: str
    X: list[csr_array]
    y: list[list[str]]
    y_raw_known: list[NDArray[np.bool_]]
    folds: list[Fold]


@dataclass(frozen=True)
class ColumnsSuite:
    """One task as raw columns, with the same sequences and folds as its :class:`EncodedSuite`.

    X[i][t] is the tuple of token t's columns without its label y[i][t].
    """

    task: str
    X: list[Rows]
    y: list[list[str]]
    template: Template
    folds: list[Fold]


def data_folder(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the paper's suites: ``path``, or else the value of STRUCTGP_DATA."""
    given = os.environ.get(DATA_VARIABLE, "") if path is None else os.fspath(path)
    if not given:
        raise InputError(
            DATA_VARIABLE,
            "not set, and no path was given",
            f"set it to the folder with encoded/ and columns/, as in {DATA_VARIABLE}=~/data",
        )
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise InputError(
            str(folder),
            "no such folder",
            f"give the folder with encoded/ and columns/, as path or in {DATA_VARIABLE}",
        )
    return folder


def encoded_suite(task: str, path: str | os.PathLike[str] | None = None) -> EncodedSuite:
    """Read ``encoded/TASK.npz``; ``task`` is one of :data:`TASKS`."""
    file = _file(task, path, f"encoded/{task}.npz")
    arrays = _read_arrays(file)
    indptr, indices, offsets = arrays["indptr"], arrays["indices"], arrays["seq_offsets"]
    n_columns = int(indices.max()) + 1 if len(indices) else 0
    # 32-bit indices, because parts of scikit-learn refuse longer ones.
    index = (indices.astype(np.int32), indptr.astype(np.int32))
    all_tokens = csr_array((np.ones(len(indices)), *index), shape=(len(indptr) - 1, n_columns))
    names = [str(label) for label in range(int(arrays["n_labels"]))]
    known = arrays["labels_raw"] != -1
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    return EncodedSuite(
        task=task,
        X=[all_tokens[a:b] for a, b in spans],
        y=[[names[label] for label in arrays["labels"][a:b]] for a, b in spans],
        y_raw_known=[known[a:b] for a, b in spans],
        folds=_folds(arrays),
    )


def columns_suite(task: str, path: str | os.PathLike[str] | None = None) -> ColumnsSuite:
    """Read ``columns/TASK.data`` and ``.template`` with the folds of ``encoded/TASK.npz``."""
    npz_file = _file(task, path, f"encoded/{task}.npz")
    stem = f"columns/{_COLUMNS_OF[task]}"
    data_file = _file(task, path, f"{stem}.data")
    template_file = _file(task, path, f"{stem}.template")
    arrays = _read_arrays(npz_file)
    file = read_columns(data_file, encoding="utf-8", name=str(data_file))
    _check_same_sequences(file, np.diff(arrays["seq_offsets"]), npz_file)
    X, y = file.split_labels()
    template = Template.read(template_file)
    return ColumnsSuite(task=task, X=X, y=y, template=template, folds=_folds(arrays))


def _file(task: str, path: str | os.PathLike[str] | None, relative: str) -> Path:
    """The path of a task's file, or an InputError that says which files are there."""
    if task not in TASKS:
        raise InputError("task", f"{task!r} is not known", f"give one of {', '.join(TASKS)}")
    file = data_folder(path) / relative
    if not file.is_file():
        folder = file.parent
        there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        raise InputError(
            str(file),
            "no such file",
            f"{folder} holds {', '.join(there) if there else 'nothing'}: check the path or {DATA_VARIABLE}",
        )
    return file


def _folds(arrays: dict[str, NDArray[np.int64]]) -> list[Fold]:
    return list(zip(arrays["fold_train"], arrays["fold_test"], strict=True))


def _check_same_sequences(file: ColumnFile, lengths: Indices, npz_file: Path) -> None:
    """Raises InputError unless the columns have as many sequences as the npz, of the same lengths."""
    remedy = "use columns and encoded files of one release"
    if len(file.sequences) != len(lengths):
        problem = f"{len(file.sequences)} sequences where {npz_file} has {len(lengths)}"
        raise InputError(file.name, problem, remedy)
    for s, (sequence, length) in enumerate(zip(file.sequences, lengths, strict=True)):
        if len(sequence.rows) != length:
            problem = f"{len(sequence.rows)} rows where sequence {s} of {npz_file} has {length}"
            raise InputError(f"{file.name}:{sequence.line}", problem, remedy)


def _read_arrays(file: Path) -> dict[str, NDArray[np.int64]]:
    """All arrays of an npz as int64, checked against each other."""
    remedy = "get the file again"
    try:
        with zipfile.ZipFile(file), np.load(file, allow_pickle=False) as npz:
            given = {name: npz[name] for name in _ARRAYS if name in npz.files}
        # same_kind refuses fractions and text.
        arrays = {name: a.astype(np.int64, casting="same_kind") for name, a in given.items()}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as err:
        raise InputError(str(file), f"not a readable npz of whole numbers ({err})", remedy) from err
    missing = [name for name in _ARRAYS if name not in arrays]
    if missing:
        raise InputError(str(file), f"no array {', '.join(missing)}", remedy)
    problem = _inconsistency(arrays)
    if problem:
        raise InputError(str(file), problem, remedy)
    return arrays


def _inconsistency(arrays: dict[str, NDArray[np.int64]]) -> str | None:
    """A description of what is wrong with the arrays, or None."""
    indptr, indices, offsets = arrays["indptr"], arrays["indices"], arrays["seq_offsets"]
    labels, raw, n_labels = arrays["labels"], arrays["labels_raw"], arrays["n_labels"]
    train, test = arrays["fold_train"], arrays["fold_test"]
    vectors = (indptr, indices, offsets, labels, raw)
    if any(a.ndim != 1 for a in vectors) or n_labels.ndim != 0 or train.ndim != 2 or test.ndim != 2:
        return "arrays of the wrong number of dimensions"
    n_tokens, n_sequences = len(labels), len(offsets) - 1
    if len(indptr) != n_tokens + 1 or len(raw) != n_tokens:
        sizes = f"{len(indptr) - 1}, {n_tokens}, {len(raw)}"
        return f"indptr, labels and labels_raw are for {sizes} tokens"
    if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        return f"indptr does not rise from 0 to the {len(indices)} indices"
    if len(indices) and not 0 <= indices.min() <= indices.max() < np.iinfo(np.int32).max:
        return "a feature number in indices is negative or beyond 32 bits"
    if n_sequences < 1 or offsets[0] != 0 or offsets[-1] != n_tokens or (np.diff(offsets) < 1).any():
        return f"seq_offsets do not rise from 0 to the {n_tokens} tokens"
    if labels.min() < 0 or labels.max() >= n_labels:
        return f"a label outside 0 to {n_labels - 1}"
    if ((raw != labels) & (raw != -1)).any():
        return "labels_raw is neither -1 nor the label"
    if len(train) != len(test):
        return f"{len(train)} training folds and {len(test)} test folds"
    for number, (a, b) in enumerate(zip(train, test, strict=True)):
        together = np.concatenate([a, b])
        if len(together) and (together.min() < 0 or together.max() >= n_sequences):
            return f"fold {number} names a sequence outside 0 to {n_sequences - 1}"
        if len(np.unique(together)) != len(together):
            return f"fold {number} names a sequence twice"
    return None
