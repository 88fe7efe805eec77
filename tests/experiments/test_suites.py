"""The paper's data in a folder: what is read, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from experiments.suites import DATA_VARIABLE, TASKS, columns_suite, data_folder, encoded_suite

from structgp.errors import InputError

PAPER_TASKS = [
    # task, sequences, tokens, labels, train and test per fold, mean training tokens
    ("basenp", 823, 19172, 3, 150, 150, 3739.8),
    ("chunking", 823, 19172, 14, 50, 50, 1155.8),
    ("segmentation", 36, 1623, 2, 20, 16, 942.0),
    ("japanesene", 500, 12678, 17, 50, 50, 1315.4),
]

needs_data = pytest.mark.skipif(
    not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} does not name the paper's data"
)


@needs_data
@pytest.mark.parametrize(("task", "n", "tokens", "V", "n_train", "n_test", "mean"), PAPER_TASKS)
def test_paper_suites(task, n, tokens, V, n_train, n_test, mean):
    suite, columns = encoded_suite(task), columns_suite(task)
    assert len(suite.X) == len(suite.y) == len(suite.y_raw_known) == n
    assert sum(map(len, suite.y)) == sum(x.shape[0] for x in suite.X) == tokens
    assert {label for y in suite.y for label in y} == {str(v) for v in range(V)}
    assert len({x.shape[1] for x in suite.X}) == 1
    assert max(x.indices.max() for x in suite.X) + 1 == suite.X[0].shape[1]
    assert all(scipy.sparse.issparse(x) and x.format == "csr" for x in suite.X)

    lengths = np.array([len(y) for y in suite.y])
    assert len(suite.folds) == 5
    for train, test in suite.folds:
        assert (len(train), len(test)) == (n_train, n_test)
        assert not set(train.tolist()) & set(test.tolist())
    assert np.mean([lengths[train].sum() for train, _ in suite.folds]) == pytest.approx(mean)

    assert [len(x) for x in columns.X] == [len(y) for y in columns.y] == lengths.tolist()
    for ours, theirs in zip(columns.folds, suite.folds, strict=True):
        np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(theirs))
    assert len(columns.template.expand(columns.X[0])) == lengths[0]


@needs_data
@pytest.mark.parametrize("task", [row[0] for row in PAPER_TASKS])
def test_encoded_and_raw_labels_name_the_same_thing(task):
    suite, columns = encoded_suite(task), columns_suite(task)
    pairs = {
        (number, name)
        for numbers, names, known in zip(suite.y, columns.y, suite.y_raw_known, strict=True)
        for number, name, k in zip(numbers, names, known, strict=True)
        if k
    }
    assert len(pairs) == len({number for number, _ in pairs}) == len({name for _, name in pairs})


@needs_data
def test_basenp_large_is_basenp_with_other_folds():
    large, small = encoded_suite("basenp_large"), encoded_suite("basenp")
    assert large.y == small.y
    assert [(len(a), len(b)) for a, b in large.folds] == [(500, 323)] * 5
    assert columns_suite("basenp_large").X == columns_suite("basenp").X
    assert len(columns_suite("basenp_large").folds[0][0]) == 500


# --- a made-up folder ------------------------------------------------------------------------


def arrays():
    """Three sequences of 2, 1 and 2 tokens; the third token has no features."""
    return {
        "indptr": np.array([0, 2, 3, 3, 4, 6]),
        "indices": np.array([0, 4, 1, 6, 2, 3], dtype=np.int32),
        "seq_offsets": np.array([0, 2, 3, 5]),
        "labels": np.array([0, 1, 0, 0, 1], dtype=np.int16),
        "labels_raw": np.array([0, 1, -1, 0, 1], dtype=np.int16),
        "fold_train": np.array([[0, 1], [2, 0]]),
        "fold_test": np.array([[2], [1]]),
        "n_features": np.array(99),
        "n_labels": np.array(2),
    }


def write(folder: Path, task: str = "chunking", **changes: object) -> Path:
    for name in ("encoded", "columns"):
        (folder / name).mkdir(exist_ok=True)
    kept = {k: v for k, v in {**arrays(), **changes}.items() if v is not None}
    np.savez_compressed(folder / "encoded" / f"{task}.npz", **kept)
    text = "a x B\nb x I\n\nc y B\n\na y B\n\u3000 x I\n"
    (folder / "columns" / f"{task}.data").write_text(text, encoding="utf-8")
    (folder / "columns" / f"{task}.template").write_text("U00:%x[0,0]\nU01:%x[-1,1]\nB\n")
    return folder


def test_encoded_suite_of_a_small_folder(tmp_path):
    suite = encoded_suite("chunking", write(tmp_path))
    assert suite.task == "chunking"
    assert [x.toarray().nonzero()[1].tolist() for x in suite.X] == [[0, 4, 1], [], [6, 2, 3]]
    assert [x.shape for x in suite.X] == [(2, 7), (1, 7), (2, 7)]
    assert all(x.dtype == np.float64 for x in suite.X)
    assert suite.y == [["0", "1"], ["0"], ["0", "1"]]
    assert [k.tolist() for k in suite.y_raw_known] == [[True, True], [False], [True, True]]
    assert [(a.tolist(), b.tolist()) for a, b in suite.folds] == [([0, 1], [2]), ([2, 0], [1])]


def test_columns_suite_of_a_small_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(write(tmp_path)))
    suite = columns_suite("chunking")
    assert suite.X == [[("a", "x"), ("b", "x")], [("c", "y")], [("a", "y"), ("\u3000", "x")]]
    assert suite.y == [["B", "I"], ["B"], ["B", "I"]]
    assert suite.template.expand(suite.X[0]) == [("a", "_B-1"), ("b", "x")]
    assert len(suite.folds) == 2


def test_folder_comes_from_argument_then_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "elsewhere"))
    assert data_folder(tmp_path) == tmp_path
    with pytest.raises(InputError, match="elsewhere: no such folder"):
        data_folder()
    monkeypatch.delenv(DATA_VARIABLE)
    with pytest.raises(InputError, match=f"set it to the folder .* {DATA_VARIABLE}="):
        data_folder()


def test_unknown_task_and_missing_files(tmp_path):
    write(tmp_path)
    with pytest.raises(InputError, match="'parsing' is not known") as caught:
        encoded_suite("parsing", tmp_path)
    assert all(task in str(caught.value) for task in TASKS)
    with pytest.raises(InputError, match=r"basenp\.npz: no such file; .* holds chunking\.npz"):
        encoded_suite("basenp", tmp_path)
    (tmp_path / "columns" / "chunking.template").unlink()
    with pytest.raises(InputError, match=r"chunking\.template: no such file; .* chunking\.data"):
        columns_suite("chunking", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds nothing"):
        columns_suite("basenp", tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": None}, "no array indptr"),
        ({"indptr": np.array([0, 2, 3, 3, 4])}, "for 4, 5, 5 tokens"),
        ({"indptr": np.array([0, 2, 3, 3, 4, 5])}, "indptr does not rise from 0 to the 6 indices"),
        ({"indptr": np.array([0, 4, 3, 3, 4, 6])}, "indptr does not rise"),
        ({"indices": np.array([0, 4, 1, 6, 2, -3])}, "feature number"),
        ({"seq_offsets": np.array([0, 2, 2, 5])}, "seq_offsets do not rise"),
        ({"seq_offsets": np.array([0, 2, 4])}, "seq_offsets do not rise"),
        ({"labels_raw": np.array([0, 1, -1, 0])}, "for 5, 5, 4 tokens"),
        ({"labels_raw": np.array([0, 1, -1, 0, 0])}, "labels_raw"),
        ({"n_labels": np.array(1)}, "a label outside 0 to 0"),
        ({"fold_test": np.array([[3], [1]])}, "fold 0 names a sequence outside 0 to 2"),
        ({"fold_test": np.array([[2], [0]])}, "fold 1 names a sequence twice"),
        ({"fold_test": np.array([[2]])}, "2 training folds and 1 test folds"),
        ({"fold_test": np.array([2, 1])}, "dimensions"),
        ({"labels": np.array([0.5, 1, 0, 0, 1])}, "whole numbers"),
        ({"labels": np.array([None] * 5)}, "whole numbers"),
    ],
)
def test_inconsistent_arrays_are_refused(tmp_path, changes, message):
    write(tmp_path, **changes)
    with pytest.raises(InputError, match=message) as caught:
        encoded_suite("chunking", tmp_path)
    assert "chunking.npz" in caught.value.place


@pytest.mark.parametrize("damage", [b"", b"not a zip file", None])
def test_damaged_file_is_refused(tmp_path, damage):
    file = write(tmp_path) / "encoded" / "chunking.npz"
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    with pytest.raises(InputError, match="not a readable npz"):
        encoded_suite("chunking", tmp_path)


def test_columns_that_differ_from_the_encoded_file_are_refused(tmp_path):
    data = write(tmp_path) / "columns" / "chunking.data"
    text = data.read_text(encoding="utf-8")
    data.write_text(text + "\nz z B\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"4 sequences where .* has 3"):
        columns_suite("chunking", tmp_path)
    data.write_text(text + "z z B\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"chunking\.data:6: 3 rows where sequence 2"):
        columns_suite("chunking", tmp_path)
