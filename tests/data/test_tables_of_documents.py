"""Documents in pandas DataFrames, Hugging Face datasets and spaCy's DocBin, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data import formats
from structgp.data.documents import Document, Prediction, TextSpan
from structgp.errors import InputError

TEXTS = ["Ann  Lee left\r\nRome.", " 👩\u200d👩\u200d👧 שלום\u200f e\u0301té ", "私たち", "a\nb"]
DOCUMENTS = [
    Document.from_text(TEXTS[0], [(0, 8, "PER"), (15, 19, "LOC")], id="a"),
    Document.from_text(TEXTS[1], [(1, 6, "X")]),
    Document.from_text(TEXTS[2]),
    Document.from_text(TEXTS[3], ()).with_labels(["B-X", None]),
]


def parts(found: Document) -> tuple[object, ...]:
    return found.text, found.tokens, found.labels, found.id


@pytest.mark.filterwarnings("ignore")
def test_docbin_keeps_documents(tmp_path: Path) -> None:
    pytest.importorskip("spacy")
    formats.write(DOCUMENTS, tmp_path / "a.spacy")
    assert list(map(parts, formats.read(tmp_path / "a.spacy"))) == list(map(parts, DOCUMENTS))
    with pytest.raises(InputError, match=r"no\.spacy: cannot be read"):
        list(formats.read(tmp_path / "no.spacy"))
    (tmp_path / "bad.spacy").write_bytes(b"abc")
    with pytest.raises(InputError, match="not a DocBin"):
        list(formats.read(tmp_path / "bad.spacy"))
    with pytest.raises(InputError, match=r"x\.spacy: cannot be written"):
        formats.write([], tmp_path / "no" / "x.spacy")


PIECES = st.sampled_from(
    ["Ann", "'s", " ", "  ", "\r\n", "e\u0301", "👩\u200d👩\u200d👧", "שלום", "\u200f", "私", "\t"]
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join), st.data())
def test_docs_of_spacy_survive(text: str, data: st.DataObject) -> None:
    spacy = pytest.importorskip("spacy")
    from structgp.data.formats.docbin import from_doc, to_doc

    document = Document.from_text(text, ())
    labels = data.draw(
        st.lists(
            st.sampled_from(["O", "B-X", None]),
            min_size=len(document.tokens),
            max_size=len(document.tokens),
        )
    )
    document = document.with_labels(labels)
    doc = to_doc(document, spacy.vocab.Vocab())
    assert doc.text == text
    known = any(label is not None for label in labels)
    assert parts(from_doc(doc))[:2] == parts(document)[:2]
    assert from_doc(doc).labels == (document.labels if known or not labels else None)


@pytest.mark.filterwarnings("ignore")
def test_probabilities_go_to_spacy(tmp_path: Path) -> None:
    spacy = pytest.importorskip("spacy")
    from structgp.data.formats.docbin import to_doc

    predicted = Prediction(("B-PER", "O"), (0.5, 1.0), (TextSpan(0, 3, "PER", 0.5),))
    doc = to_doc(Document("Ann left", ((0, 3), (4, 8)), prediction=predicted), spacy.blank("xx").vocab)
    assert [(e.text, e.label_, e._.probability) for e in doc.ents] == [("Ann", "PER", 0.5)]


@pytest.mark.parametrize("labels", [("O", "B-A"), ("B-A", "I-A")])
def test_spans_that_spacy_would_not_keep(labels: tuple[str, str], tmp_path: Path) -> None:
    """A token of white space at the end of a span is left out when it is read: it is refused before."""
    pytest.importorskip("spacy")
    document = Document("a \u3000", ((0, 1), (2, 3)), labels)
    with pytest.raises(InputError, match=r"begins or ends with '\\u3000', which shows nothing"):
        formats.write([document], tmp_path / "a.spacy")
    assert not (tmp_path / "a.spacy").exists()
    formats.write([replace(document, labels=("B-A", "O"))], tmp_path / "a.spacy")
    (again,) = formats.read(tmp_path / "a.spacy")
    assert [span[:3] for span in again.spans] == [(0, 1, "A")]


@pytest.mark.parametrize("per", ["document", "token"])
def test_frames(per: str) -> None:
    pytest.importorskip("pandas")
    found = list(formats.from_pandas(formats.to_pandas(DOCUMENTS, per=per)))
    if per == "document":
        assert list(map(parts, found)) == list(map(parts, DOCUMENTS))
        return
    assert [d.words for d in found] == [d.words for d in DOCUMENTS]
    assert [d.labels for d in found] == [d.labels or (None,) * 3 for d in DOCUMENTS]


def test_frames_of_predictions_and_mistakes() -> None:
    pandas = pytest.importorskip("pandas")
    predicted = Prediction(("B-PER", "O"), (0.5, 1.0), (TextSpan(0, 3, "PER", 0.5),))
    document = Document("Ann left", ((0, 3), (4, 8)), prediction=predicted)
    frame = formats.to_pandas([document], per="token")
    assert frame[["predicted", "probability"]].values.tolist() == [["B-PER", 0.5], ["O", 1.0]]
    assert formats.to_pandas([document])["spans"][0] == [(0, 3, "PER", 0.5)]
    with pytest.raises(InputError, match="per: 'line' is not known"):
        formats.to_pandas([], per="line")
    with pytest.raises(InputError, match="no column 'sentence'; it has word"):
        formats.from_pandas(pandas.DataFrame({"word": ["a"]}))
    with pytest.raises(InputError, match=r"frame\.iloc\[0\]: 1 labels for 2 tokens"):
        list(formats.from_pandas(pandas.DataFrame({"text": ["a b"], "labels": [["O"]]})))


def test_rows_of_any_dataset() -> None:
    names = SimpleNamespace(feature=SimpleNamespace(names=["O", "B-PER"]))

    class Rows(list):
        features = {"ner_tags": names}  # noqa: RUF012

    rows = Rows([{"id": 3, "tokens": ["Ann", "left"], "ner_tags": [1, -100]}])
    (found,) = formats.from_dataset(rows)
    assert (found.words, found.labels, found.id) == (("Ann", "left"), ("B-PER", None), "3")
    assert next(formats.from_dataset(rows, labels=None)).labels is None
    for row, problem in (
        ({"tokens": ["a"]}, r"dataset\[0\]: no column 'ner_tags'; it has tokens"),
        ({"tokens": ["a"], "ner_tags": [7]}, r"\['ner_tags'\]\[0\]: the label is the number 7"),
        ({"tokens": ["a"], "ner_tags": ["O", "O"]}, "2 labels for 1 tokens"),
    ):
        with pytest.raises(InputError, match=problem):
            list(formats.from_dataset([row]))
    with pytest.raises(InputError, match="label 7 of 1"):
        list(formats.from_dataset([{"tokens": ["a"], "ner_tags": [7]}], names=["O"]))


@pytest.mark.filterwarnings("ignore")
def test_datasets_of_hugging_face() -> None:
    pytest.importorskip("datasets")
    found = formats.to_dataset(DOCUMENTS)
    back = list(formats.from_dataset(found))
    assert [d.words for d in back] == [d.words for d in DOCUMENTS]
    assert [d.labels for d in back] == [d.labels or (None,) * 3 for d in DOCUMENTS]
    assert found.features["ner_tags"].feature.names[0] == "O"


@pytest.mark.parametrize(("name", "call"), [("pandas", "to_pandas"), ("datasets", "to_dataset")])
def test_packages_that_are_not_there(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(
        InputError, match=rf"{name}: is not installed; run: pip install \"structgp\[{name}\]\""
    ):
        getattr(formats, call)(DOCUMENTS)


def test_spacy_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spacy", None)
    with pytest.raises(InputError, match="spacy: is not installed"):
        formats.write(DOCUMENTS, tmp_path / "a.spacy")
