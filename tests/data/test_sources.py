"""Readers: what they give a classifier, what they remember, and the errors of those who mix things up."""

from __future__ import annotations

import doctest
import importlib
import io
import json
import os
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgp.data import shards, sources
from structgp.data.sources import Template
from structgp.errors import InputError

ROWS = ["two 1 QTY", "big 2 ?", "eggs 3 NAME", "", "salt 4 NAME"]
TEMPLATE = Template.parse("U:%x[0,0]\nU:%x[-1,0]\nB\n")
ON_INPUT = Template.parse("U:%x[0,0]\nB:%x[0,0]\nB:%x[-1,0]/%x[0,0]\n", "t")
MODULES = [module.name for module in pkgutil.iter_modules(sources.__path__)]


def error_of(*arguments: object, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        sources.learn(*arguments, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    path = tmp_path / "vectors"
    path.write_text("two 3 4\neggs 0 5\n")
    return path


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"structgp.data.sources.{name}")
    found = doctest.testmod(module)
    assert found.failed == 0
    without = (
        "linear_match",
        "lines",
        "number_text",
        "reader_arguments",
        "reader_state",
        "readers",
        "unlabelled",
        "wapiti",
    )
    assert found.attempted or name in without


# -- columns ---------------------------------------------------------------------------------------


def test_a_training_file(tmp_path: Path) -> None:
    path, template = tmp_path / "train", tmp_path / "template"
    path.write_text("\n".join(ROWS))
    template.write_text(TEMPLATE.text)
    reader = sources.learn(path, template=template, missing="?")
    data = reader.read(path)
    assert data.name == str(path)
    assert data.X == [[("two", "_B-1"), ("big", "two"), ("eggs", "big")], [("salt", "_B-1")]]
    assert data.y == [["QTY", None, "NAME"], ["NAME"]]
    assert (reader.transition_columns, reader.has_transitions, reader.has_dense) == ((), True, False)
    assert reader.template_lines == {"0": "U:%x[0,0]", "1": "U:%x[-1,0]"}
    assert sources.learn(ROWS, template=TEMPLATE).read(ROWS).y[0][1] == "?"


def test_a_stream_is_read_once(tmp_path: Path) -> None:
    file = sources.read_columns(io.BytesIO("\n".join(ROWS).encode()), name="f")
    options = {"numeric": [1], "template": TEMPLATE}
    data = sources.learn(file, **options).read(file)
    assert data.name == "f"
    again = sources.learn(ROWS, **options).read(ROWS)
    assert [len(x) for x in data.X] == [3, 1]
    for x, z in zip(data.X, again.X, strict=True):
        assert [{**t, "numeric": 0} for t in x] == [{**t, "numeric": 0} for t in z]
        assert [t["numeric"].tolist() for t in x] == [t["numeric"].tolist() for t in z]


def test_numbers_and_vectors(vectors: Path) -> None:
    reader = sources.learn(ROWS, template=TEMPLATE, numeric=[1, 1], vectors=vectors)
    assert reader.vectors.coverage == sources.Coverage(as_written=2, missing=2)
    assert reader.has_dense
    (token,) = reader.read(["two 4 QTY"]).X[0]
    assert (token["0"], token["1"]) == ("two", "_B-1")
    assert token["numeric"] == pytest.approx((4 - 2.5) / np.sqrt(1.25))
    assert token["vector"] == pytest.approx(np.array([0.6, 0.8]))
    state = json.loads(json.dumps(reader.to_json()))
    loaded = sources.from_json({**state, "other": 1}, f"{vectors}.model")
    (again,) = loaded.read(["two 4 QTY"]).X[0]
    assert {k: np.asarray(v).tolist() for k, v in again.items()} == {
        k: np.asarray(v).tolist() for k, v in token.items()
    }


def test_a_model_looks_words_up_as_it_did_in_training(vectors: Path) -> None:
    state = sources.learn(ROWS, template=TEMPLATE, vectors=vectors).to_json()
    assert state["vectors"]["coverage"] == {"as_written": 2, "lower_case": 0, "missing": 2}
    before = {k: v for k, v in state["vectors"].items() if k not in ("lower_case", "coverage")}
    for kept, first in ((state["vectors"], 0.6), (before, 0)):
        reader = sources.from_json({**state, "vectors": kept}, f"{vectors}.model")
        (sequence,) = reader.sequences(["TWO 4", "two 4"])
        assert [token["vector"][0] for token in sequence.tokens] == pytest.approx([first, 0.6])
        assert reader.coverage(sequence) == sources.Coverage(1, int(first > 0), int(first == 0))


def test_sequences_with_and_without_labels() -> None:
    reader = sources.learn(ROWS, template=TEMPLATE)
    first, second = reader.sequences([*ROWS[:3], "", "", "figs 7 NAME"], name="f")
    assert (first.words, first.labels) == (["two", "big", "eggs"], ["QTY", "?", "NAME"])
    assert (second.name, second.line, second.cells) == ("f", 6, (("figs", "7", "NAME"),))
    (bare,) = reader.sequences(["figs 7"])
    assert bare.labels is None
    assert bare.tokens == second.tokens
    assert reader.with_labels(second, ["X"]) == "figs\t7\tX\n" == reader.with_labels(bare, ["X"])
    with pytest.raises(InputError) as caught:
        reader.read(["figs 7"], name="f")
    assert str(caught.value) == "f:1: no label column; add the label as last column"
    with pytest.raises(InputError) as caught:
        list(reader.sequences(["", "figs"], name="f"))
    assert str(caught.value).startswith("f:2: 1 column, but the model was trained on 2 and a label; ")
    with pytest.raises(InputError, match="f: no tokens"):
        reader.read([""], name="f")


def test_sequences_come_as_they_are_read() -> None:
    def lines():
        yield from ("a 1 A\n", "\n")
        raise AssertionError("too far")

    assert next(sources.learn(ROWS, template=TEMPLATE).sequences(lines())).labels == ["A"]


# -- transitions -----------------------------------------------------------------------------------


def test_features_of_transitions_are_the_last_columns() -> None:
    reader = sources.learn(ROWS, template=ON_INPUT)
    assert (reader.transition_columns, reader.template.has_bigram) == (("1", "2"), False)
    assert reader.has_transitions
    assert reader.read(ROWS).X[0][1] == ("big", "big", "two/big")
    assert list(reader.template_lines.values()) == ["U:%x[0,0]", "B:%x[0,0]", "B:%x[-1,0]/%x[0,0]"]
    with_numbers = sources.learn(ROWS, template=ON_INPUT, numeric=[1]).read(ROWS).X[0][1]
    assert [with_numbers[name] for name in "012"] == ["big", "big", "two/big"]


def test_features_of_transitions_may_be_left_out() -> None:
    reader = sources.learn(ROWS, template=ON_INPUT, transitions=False)
    assert (reader.transition_columns, reader.has_transitions) == ((), True)
    assert list(reader.template_lines) == ["0"]
    assert reader.read(ROWS).X[0][1] == ("big",)
    state = reader.to_json()
    assert sources.from_json(state).read(ROWS).X[0][1] == ("big",)
    # Before there were such features, models had none.
    del state["transitions"]
    assert sources.from_json(state).transition_columns == ()
    assert sources.from_json({**state, "transitions": True}).transition_columns == ("1", "2")


def test_no_transitions_at_all() -> None:
    assert not sources.learn(ROWS, template=Template.parse("U:%x[0,0]")).has_transitions


# -- CRFsuite's files ------------------------------------------------------------------------------


def test_attributes() -> None:
    lines = ["QTY\tw=two", "?\tw=eggs\tn:2", "", "NAME\tw=salt"]
    reader = sources.learn(lines, format="crfsuite", missing="?")
    data = reader.read(lines)
    assert data.X == [[{"w=two": 1.0}, {"w=eggs": 1.0, "n": 2.0}], [{"w=salt": 1.0}]]
    assert data.y == [["QTY", None], ["NAME"]]
    assert reader.has_transitions
    assert reader.has_transitions
    (first, _) = reader.sequences(lines, name="f")
    assert (first.words, first.labels, first.line) == (["w=two", "w=eggs"], ["QTY", "?"], 1)
    assert reader.with_labels(first, ["A", "B"]) == "A\tw=two\nB\tw=eggs\tn:2.0\n"
    assert sources.from_json(reader.to_json()) == reader


# -- streams ---------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("XY?")), min_size=1)))
def test_a_stream_gives_what_reading_gives(sequences: list[list[tuple[str, str]]]) -> None:
    sequences = [[("a", "X"), ("b", "Y")], *sequences]
    lines = [" ".join(row) for rows in sequences for row in (*rows, ())]
    template = Template.parse("U:%x[0,0]\nB:%x[0,0]")
    reader = sources.learn(lines, template=template, missing="?")
    data = reader.read(lines)
    assert list(reader.labelled(lines, "utf-8", "f")) == list(zip(data.X, data.y, strict=True))
    assert data.y == [[None if y == "?" else y for _, y in rows] for rows in sequences]


def test_a_stream_for_shards(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_text("\n".join(ROWS))
    stream = sources.learn(path, template=TEMPLATE, missing="?").stream(path)
    assert list(stream) == list(stream)
    kept = shards.write(stream, tmp_path / "shards", features="columns")
    assert (kept.n_sequences, kept.n_tokens, kept.classes) == (2, 4, ["NAME", "QTY"])
    digest = stream.digest
    assert sources.learn(path, template=TEMPLATE).stream(path).digest != digest
    path.write_text("\n".join([*ROWS, "more 5 NAME"]))
    assert stream.digest != digest
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        _ = stream.digest


# -- mistakes --------------------------------------------------------------------------------------


def test_arguments_that_do_not_go_together(vectors: Path) -> None:
    assert error_of(ROWS).startswith("template: missing; give one, or format='crfsuite' for attributes")
    assert error_of(ROWS, format="json").startswith("format: 'json' is not known; ")
    assert error_of(ROWS, template="t", vector_column=0).startswith("vector_column: no word vectors")
    for name, value in (
        ("template", TEMPLATE),
        ("dialect", "wapiti"),
        ("numeric", [1]),
        ("vectors", vectors),
    ):
        message = error_of(ROWS, format="crfsuite", **{name: value})
        assert message.startswith(f"{name}: is for column files; ")
    assert error_of(ROWS, template=__file__, dialect="x").startswith("dialect: 'x' is not known")


def test_columns_that_do_not_exist(vectors: Path) -> None:
    assert error_of([""], template=TEMPLATE).startswith("<lines>: no tokens; ")
    assert error_of(["two"], template=TEMPLATE).startswith("<lines>:1: only one column, where ")
    assert error_of(["two QTY"], template=Template.parse("U:%x[0,1]", "t")).startswith("t:1: %x[0,1]")
    for column in (2, -1):
        assert error_of(ROWS, template=TEMPLATE, numeric=[column]) == (
            f"numeric: no column {column}: columns 0 to 1 exist in <lines> (the label is not one of them); "
            "count columns from 0"
        )
    options = {"template": TEMPLATE, "vectors": vectors}
    assert error_of(ROWS, **options, vector_column=2).startswith("vector_column: no column 2: ")
    message = error_of(ROWS, **options, vector_column=1)
    assert message.startswith(f"{vectors}: none of the words in column 1 of the training file")
    assert message.endswith("with vector_column=, or give other vectors")
    assert error_of(ROWS, template=TEMPLATE, numeric=[0]).startswith("<lines>:1: column 0 is 'two'")


def test_models_that_cannot_be_read(vectors: Path, tmp_path: Path) -> None:
    plain = sources.learn(ROWS, template=TEMPLATE).to_json()
    with pytest.raises(InputError, match=r"^vectors: m was trained without word vectors; leave it"):
        sources.from_json(plain, "m", vectors)
    with pytest.raises(InputError, match=r"^m: a model without a feature template"):
        sources.from_json({}, "m")
    state = sources.learn(ROWS, template=TEMPLATE, vectors=vectors).to_json()
    moved = vectors.rename(tmp_path / "moved")
    with pytest.raises(InputError) as caught:
        sources.from_json(state, "m")
    assert str(caught.value) == (
        f"m: its word vectors, in training {str(vectors)!r}, are not in its folder; "
        "say where they are with vectors="
    )
    assert sources.from_json(state, "m", moved).has_dense
    moved.write_text("two 3 5\n")
    with pytest.raises(InputError, match=r"^\S+moved: not the word vectors that m was trained with; "):
        sources.from_json(state, "m", moved)


@pytest.mark.parametrize("kind", ["elsewhere", "fifo", "device", "link"])
def test_a_model_does_not_choose_what_is_opened(kind: str, vectors: Path, tmp_path: Path) -> None:
    """What lies outside of its folder is not even looked for, and what is no regular file not opened."""
    folder = tmp_path / "models"
    folder.mkdir()
    state = sources.learn(ROWS, template=TEMPLATE, vectors=vectors).to_json()
    beside = folder / vectors.name
    if kind == "fifo":
        os.mkfifo(beside)
    if kind == "link":
        beside.symlink_to(vectors)
    path = {"elsewhere": vectors, "device": Path("/dev/zero")}.get(kind, beside)
    state["vectors"]["path"] = str(path)
    with pytest.raises(InputError, match="are not in its folder; say where"):
        sources.from_json(state, str(folder / "m"))
    with pytest.raises(InputError, match="not a regular file"):
        sources.WordVectors("/dev/zero")
    copy = folder / "moved" / "v.txt"
    copy.parent.mkdir()
    copy.write_bytes(vectors.read_bytes())
    state["vectors"]["path"] = str(copy)
    assert sources.from_json(state, str(folder / "m")).has_dense
    copy.write_bytes(vectors.read_bytes() + b"more 1 2\n")
    with pytest.raises(InputError, match="not the word vectors"):
        sources.from_json(state, str(folder / "m"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_columns", 0), ("n_columns", "2"), ("template", None), ("vectors", {}), ("transitions", 3)],
)
def test_a_reader_of_a_damaged_model(name: str, value: object) -> None:
    state = sources.learn(ROWS, template=TEMPLATE).to_json() | {name: value}
    with pytest.raises(InputError, match=r"^m: does not say how to read files"):
        sources.from_json(state, "m")
