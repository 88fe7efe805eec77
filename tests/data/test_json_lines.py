"""JSON lines: what a line becomes, and the errors of those who mistype one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from structgp import Graph, StructgpWarning
from structgp.data import sources
from structgp.data.sources.json_lines import format_json, iter_json
from structgp.errors import InputError

TOKENS = [{"word": "two"}, {"word": "eggs"}]


def read(given: Any, form: str | None = None) -> Any:
    (found,) = iter_json([json.dumps(given)], form)
    return found


def test_sequences(tmp_path: Path) -> None:
    lines = [{"tokens": TOKENS, "labels": ["QTY", None]}, {"tokens": [{"word": "Öl"}], "labels": ["NAME"]}]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, lines)).encode())
    reader = sources.learn(path, format="jsonl")
    data = reader.read(path)
    assert (data.X, data.y) == ([TOKENS, [{"word": "Öl"}]], [["QTY", None], ["NAME"]])
    assert data.lines == [1, 3]
    assert sources.from_json(reader.to_json()) == reader
    assert list(reader.stream(path)) == list(zip(data.X, data.y, strict=True))
    assert [s.words for s in reader.sequences(io.BytesIO(path.read_bytes()))] == [["two", "eggs"], ["Öl"]]


def test_examples_are_read_one_by_one() -> None:
    def endless() -> Any:
        while True:
            yield json.dumps({"tokens": TOKENS})

    found = iter_json(endless())
    assert [next(found).line for _ in range(3)] == [1, 2, 3]
    assert next(found).labels is None


def test_features_of_tokens() -> None:
    (token,) = read(
        {"tokens": [{"word": "a", "n": 2, "flag": True, "bag": ["x", "y"], "v": [1, 2.5]}]}
    ).tokens
    assert token | {"v": None} == {"word": "a", "n": 2, "flag": True, "bag": ["x", "y"], "v": None}
    np.testing.assert_array_equal(token["v"], [1, 2.5])
    assert read({"tokens": [["a", "b"], ["c"]]}).tokens == [["a", "b"], ["c"]]
    assert read({"tokens": [[1, 2], [3, 4]]}).tokens == [[1, 2], [3, 4]]
    assert read({"tokens": []}).tokens == []


def test_graphs_and_trees() -> None:
    tree = read({"tokens": TOKENS, "parents": [None, 0]})
    assert tree.tokens == Graph(TOKENS, parents=[None, 0])
    given = {"tokens": TOKENS, "edges": {"cites": [[0, 1]]}, "features": {"cites": [{"far": 2}]}}
    assert read(given).tokens == Graph(TOKENS, {"cites": [[0, 1]]}, {"cites": [{"far": 2}]})
    with pytest.warns(StructgpWarning, match="edges, features: not used: the structure is for sequences"):
        assert read(given, "sequence").tokens == TOKENS
    assert read({"tokens": TOKENS}, "graph").tokens == Graph(TOKENS)


def test_layers() -> None:
    labels = {"pos": ["CD", "NN"], "chunk": [None, "I"]}
    assert read({"tokens": TOKENS, "labels": labels}).labels == labels


def test_grids() -> None:
    found = read({"pixels": [TOKENS], "labels": [["a", None]]})
    assert (found.tokens, found.labels, found.words) == ([TOKENS], [["a", None]], ["two", "eggs"])
    numbers = read({"pixels": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "labels": [[0, 1], [1, 0]]})
    np.testing.assert_array_equal(numbers.tokens, [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    assert isinstance(numbers.labels, np.ndarray)
    assert read({"pixels": [[1, 2]], "labels": [[0, None]]}).labels == [["0", None]]
    assert read({"pixels": [[1, 2]]}).tokens.shape == (1, 2, 1)


def test_a_line_with_answers_is_read_as_before() -> None:
    given = {"id": 7, "tokens": TOKENS, "labels": ["A", "B"]}
    line = format_json(given, labels=["B", None], probability=0.5, sets=[["é"], []])
    assert line.endswith("\n")
    assert "é" in line
    again = read(json.loads(line))
    assert (again.tokens, again.labels) == (TOKENS, ["B", None])
    assert json.loads(format_json(again.given, labels=np.array([1]))) == given | {"labels": [1]}


FAULTS: list[tuple[Any, str | None, str]] = [
    ('{"tokens": [', None, "f:2: not JSON (Expecting value at character 13); write one object per line"),
    ("[1]", None, "f:2: expected an object, got a list"),
    ({"tokens": [], "lables": []}, None, "f:2: unknown key 'lables'; use tokens, "),
    ('{"tokens": [], "tokens": []}', None, "f:2: the key 'tokens' twice"),
    ({"labels": []}, None, "f:2: no 'tokens'"),
    ({"tokens": []}, "grid", "f:2: 'tokens' where the structure is a grid, which has pixels"),
    ({"pixels": []}, "sequence", "f:2: 'pixels' where the structure is a sequence, which has tokens"),
    ({"tokens": [], "pixels": []}, None, "f:2: both 'tokens' and 'pixels'"),
    ({"tokens": {}}, None, "f:2.tokens: expected a list, got a dict"),
    ({"tokens": [{"w": "a"}, "b"]}, None, 'f:2.tokens[1]: expected the features of a token, got "b"'),
    ({"tokens": [["a", 1]]}, None, "f:2.tokens[0]: expected the features"),
    ({"tokens": TOKENS, "labels": ["A"]}, None, "f:2.labels: 1 labels for 2 tokens"),
    ({"tokens": TOKENS, "labels": "AB"}, None, "f:2.labels: expected a list of labels, got a str"),
    ({"tokens": TOKENS, "labels": ["A", 1]}, None, "f:2.labels[1]: label 1 is not a string"),
    ({"tokens": TOKENS, "labels": {"pos": ["A"]}}, None, "f:2.labels['pos']: 1 labels for 2 tokens"),
    ({"tokens": TOKENS, "parents": [-1, 2]}, None, "f:2.parents[1]: 2 is not the number of another node"),
    ({"tokens": TOKENS, "parents": [1, 0]}, None, "f:2.parents[0]: the parents of node 0 lead around"),
    ({"tokens": TOKENS, "parents": [-1]}, None, "f:2.parents: 1 parents for 2 nodes"),
    ({"tokens": TOKENS, "parents": 3}, None, "f:2.parents: expected a list, got a int"),
    ({"tokens": TOKENS}, "tree", "f:2: no 'parents'"),
    ({"tokens": TOKENS, "edges": {"e": [[0, 1], [0, 2]]}}, None, "f:2.edges['e'][1]: [0, 2] names no node"),
    ({"tokens": TOKENS, "edges": {"e": [[0, 0]]}}, None, "f:2.edges['e'][0]: joins a node with itself"),
    ({"tokens": TOKENS, "edges": [[0, 1]]}, None, "f:2.edges: not an object of lists"),
    (
        {"tokens": TOKENS, "edges": {"e": [[0, 1]]}, "features": {"e": []}},
        None,
        "f:2.features['e']: 0 rows",
    ),
    ({"tokens": TOKENS, "edges": {"e": [[0, 1]]}, "features": {"e": [3]}}, None, "f:2.features['e'][0]: "),
    ({"pixels": [1, 2]}, None, "f:2.pixels: not rows of pixels"),
    ({"pixels": [[1, 2], [3]]}, None, "f:2.pixels[1]: 1 pixels where the first row has 2"),
    ({"pixels": [[[1, 2], [3]]]}, None, "f:2.pixels[0][1]: 1 numbers where the first pixel has 2"),
    ({"pixels": [[None]]}, None, "f:2.pixels[0][0]: expected the features of a token, got null"),
    ({"pixels": [[1, 2]], "labels": [["a"]]}, None, "f:2.labels[0]: 1 labels for 2 pixels"),
    ({"pixels": [[1, 2]], "labels": [[1]]}, None, "f:2.labels[0]: 1 labels for 2 pixels"),
    ({"pixels": [[1, 2]], "labels": []}, None, "f:2.labels: 0 rows of labels for 1 rows of pixels"),
]


@pytest.mark.parametrize(("given", "form", "says"), FAULTS)
def test_errors_name_the_line_and_the_place(given: Any, form: str | None, says: str) -> None:
    line = given if isinstance(given, str) else json.dumps(given)
    good = {"pixels": [[1]]} if form == "grid" else {"tokens": [], "parents": []}
    with pytest.raises(InputError) as caught:
        list(iter_json([json.dumps(good), line], form, name="f"))
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_file_to_train_on_has_labels() -> None:
    with pytest.raises(InputError, match="<lines>:1: no 'labels'; add"):
        sources.learn([], format="jsonl").read([json.dumps({"tokens": TOKENS})])
    with pytest.raises(InputError, match="no tokens"):
        sources.learn([], format="jsonl").read([])


@pytest.mark.parametrize(
    "given", [{"template": "t"}, {"numeric": [1]}, {"vectors": "v"}, {"missing": "?"}, {"keys": ["w"]}]
)
def test_arguments_of_other_formats(given: Any) -> None:
    with pytest.raises(InputError) as caught:
        sources.learn([], format="jsonl", **given)
    assert caught.value.place == next(iter(given))
    with pytest.raises(InputError, match="form: 'ring' is not known"):
        sources.learn([], format="jsonl", form="ring")
    with pytest.raises(InputError, match="form: is for the format 'jsonl'"):
        sources.learn([], format="crfsuite", form="tree")


def test_attributes_that_a_structure_names() -> None:
    line = "A\tw=two\tw=2\tshape=x\tlength:3\n"
    reader = sources.learn([], format="crfsuite", keys=["w"])
    (found,) = reader.sequences([line])
    assert found.tokens == [{"w": "two", "w=2": 1.0, "shape=x": 1.0, "length": 3.0}]
    assert reader.with_labels(found, ["B"]) == "B\tw=two\tw=2\tshape=x\tlength:3.0\n"
    assert sources.from_json(reader.to_json()) == reader
