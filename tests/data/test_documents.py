"""Documents: tokens that keep their place, labels and spans through every scheme, alignment."""

from __future__ import annotations

import doctest
import importlib
import pickle
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data.documents import (
    Document,
    Prediction,
    TextSpan,
    labels_to_spans,
    spans_to_labels,
    token_features,
    tokenize,
)
from structgp.data.documents.token_features import shape
from structgp.errors import InputError
from structgp.evaluation import metrics

PARTS = st.sampled_from(
    [
        "Ann",
        "'s",
        " ",
        "\r\n",
        "2.5",
        "é",
        "e\u0301",
        "👩\u200d👩\u200d👧",
        "👍🏽",
        "🇫🇷",
        "שלום",
        "\u200f",
        "私",
        "...",
        "½",
    ]
)
few = settings(max_examples=50, deadline=None)
TEXTS = st.one_of(st.text(max_size=30), st.lists(PARTS, max_size=12).map("".join))


def words(text: str) -> list[str]:
    return [text[start:stop] for start, stop in tokenize(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ann's tea: 2.5 g", ["Ann", "'s", "tea", ":", "2.5", "g"]),
        ("1,250.75 and 250g, B12...", ["1,250.75", "and", "250", "g", ",", "B12", "..."]),
        ("don't O'Brien John\u2019s", ["don", "'t", "O", "'", "Brien", "John", "\u2019s"]),
        ("cafe\u0301 naïve", ["cafe\u0301", "naïve"]),
        ("1½ m²", ["1", "½", "m²"]),
        (
            "👩\u200d👩\u200d👧👍🏽 🇫🇷🇩🇪 1\ufe0f\u20e3❤\ufe0f",
            ["👩\u200d👩\u200d👧", "👍🏽", "🇫🇷", "🇩🇪", "1\ufe0f\u20e3", "❤\ufe0f"],
        ),
        ("שלום\u200f צה״ל בָּרָא!", ["שלום", "צה״ל", "בָּרָא", "!"]),
        ("٣\u066b٣٤ مرحبا", ["٣\u066b٣٤", "مرحبا"]),
        ("हिन्दी", ["हिन्दी"]),
        ("私たち", ["私", "た", "ち"]),
        ("a\r\nb\u2028c\ufeffd\x00e", ["a", "b", "c", "d", "e"]),
        ("", []),
        (" \r\n", []),
    ],
)
def test_tokens(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@few
@given(TEXTS)
def test_every_visible_character_is_in_one_token(text: str) -> None:
    offsets = tokenize(text)
    end = 0
    for start, stop in offsets:
        assert end <= start < stop
        assert not any(c.isspace() for c in text[start:stop])
        end = stop
    inside = {i for start, stop in offsets for i in range(start, stop)}
    for i, c in enumerate(text):
        seen = not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf")
        assert i in inside or not seen, (i, c)


@few
@given(TEXTS)
def test_no_token_begins_with_a_mark_that_belongs_to_the_character_before(text: str) -> None:
    for start, _ in tokenize(text):
        if start and unicodedata.category(text[start]) == "Mn":
            assert text[start - 1].isspace() or unicodedata.category(text[start - 1]) in ("Cc", "Cf")


@few
@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=40))
def test_plain_text_has_the_same_tokens_by_both_patterns(text: str) -> None:
    """ASCII has a quicker pattern of its own; one letter more makes the other one run."""
    assert words(text) == words(text + " é")[:-1]


SPANS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from(["", "PER", "A-B"])), max_size=5
)


@few
@given(SPANS, st.sampled_from(["BIO", "IOB2", "IOBES", "BIOES", "BILOU"]))
def test_spans_survive_every_scheme(parts: list[tuple[int, int, str]], scheme: str) -> None:
    spans, end = [], 0
    for length, gap, kind in parts:
        spans.append((end + gap, end + gap + length, kind or "X"))
        end = spans[-1][1]
    labels = spans_to_labels(reversed(spans), end + 1, scheme)
    assert labels_to_spans(labels) == spans == metrics.chunks(labels)


def test_spans_without_a_type_and_unknown_labels() -> None:
    assert spans_to_labels([(0, 2, "")], 3) == ["B", "I", "O"]
    assert labels_to_spans(["B", "I", None, "I", "O"]) == [(0, 2, ""), (3, 4, "")]
    assert spans_to_labels([(0, 1, "A"), (1, 3, "A")], 3, "IO") == ["I-A"] * 3


def test_spans_that_cannot_be_labels() -> None:
    with pytest.raises(InputError, match="'A' and 'B' overlap at token 1; keep one"):
        spans_to_labels([(0, 2, "A"), (1, 3, "B")], 3)
    with pytest.raises(InputError, match="from token 2 to 4 does not fit into 3 tokens"):
        spans_to_labels([(2, 4, "A")], 3)
    with pytest.raises(InputError, match="'BIG' is not a scheme"):
        spans_to_labels([], 3, "BIG")


def test_a_document() -> None:
    document = Document.from_text("Ann  Lee left\r\nRome.", [(0, 9, "PER"), (14, 19, "LOC")], id="7")
    assert document.words == ("Ann", "Lee", "left", "Rome", ".")
    assert document.labels == ("B-PER", "I-PER", "O", "B-LOC", "O")
    assert document.spans == (TextSpan(0, 8, "PER"), TextSpan(15, 19, "LOC"))
    assert pickle.loads(pickle.dumps(document)) == document
    assert hash(document) == hash(document.with_labels(document.labels))
    assert Document.from_text("Ann").labels is None
    assert Document.from_text("Ann", ()).labels == ("O",)
    words = Document.from_words(["Ann", "Lee"], ["B", None])
    assert (words.text, words.tokens, words.labels) == ("Ann Lee", ((0, 3), (4, 7)), ("B", None))


def test_a_span_that_cuts_a_token() -> None:
    with pytest.raises(InputError) as error:
        Document.from_text("Annabel left", [(0, 3, "PER")], id="7")
    assert str(error.value) == (
        "document 7: the span 'PER' from 0 to 3 ('Ann') cuts the token 'Annabel' from 0 to 7; "
        "correct the span, give tokens, or let it grow with snap=True"
    )
    assert Document.from_text("Annabel left", [(0, 3, "PER")], snap=True).spans == (TextSpan(0, 7, "PER"),)
    given_tokens = Document.from_text("Annabel", [(0, 3, "PER")], tokens=[(0, 3), (3, 7)])
    assert given_tokens.labels == ("B-PER", "O")


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ((3, 4, "A"), "holds no token"),
        ((2, 9, "A"), "is not in the text, which has 8 characters"),
        ((2, 2, "A"), "is not in the text"),
        ((-1, 2, "A"), "is not in the text"),
        (("0", 2, "A"), "from '0' to 2"),
        ((True, 2, "A"), "from True to 2"),
    ],
)
def test_spans_that_are_not_there(span: tuple[int, int, str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        Document.from_text("Ann left", [span], snap=True)


@pytest.mark.parametrize("tokens", [[(2, 3)], [(0, 1)], [(0, 2)]])
@pytest.mark.parametrize("snap", [False, True])
def test_spans_beyond_the_tokens_of_a_file(tokens: list[tuple[int, int]], snap: bool) -> None:
    """Nothing of a span is lost: what is left out around it is white space."""
    with pytest.raises(InputError, match=r"'A' from 0 to 3 \('a b'\) holds '[ab]', which is in no token"):
        Document.from_text("a b", [(0, 3, "A")], tokens=tokens, snap=snap)
    whole = Document.from_text(" a b\u200b ", [(0, 6, "A")], tokens=[(1, 2), (3, 4)], snap=snap)
    assert whole.spans == (TextSpan(1, 4, "A"),)


def test_documents_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"document\.tokens\[1\]: characters 2 to 4 overlap"):
        Document("Ann left", ((0, 3), (2, 4)))
    with pytest.raises(InputError, match=r"document\.labels: 1 labels for 2 tokens"):
        Document("Ann left", ((0, 3), (4, 8)), ("O",))
    with pytest.raises(InputError, match=r"document\.prediction: 0 labels"):
        Document("Ann", ((0, 3),), None, prediction=Prediction((), ()))
    with pytest.raises(InputError, match=r"words\[1\]: empty"):
        Document.from_words(["a", ""])


@few
@given(TEXTS, st.data())
def test_marked_tokens_come_back(text: str, data: st.DataObject) -> None:
    tokens = tokenize(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
    marked = [(tokens[a][0], tokens[b - 1][1], "X") for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    document = Document.from_text(text, marked)
    assert [span[:3] for span in document.spans] == marked
    assert document.text == text


def test_features_are_of_the_word_and_its_neighbours() -> None:
    first, second, third = token_features(["Ann", "LEFT", "cafe\u0301"])
    assert first.keys() == second.keys() == third.keys()
    assert second["word"] == "LEFT"
    assert (second["lower"], second["lower-1"], second["lower+1"]) == ("left", "ann", "caf\u00e9")
    assert first["lower-1"] == first["lower-2"] == third["lower+1"] != "ann"
    assert token_features([]) == []
    alone = token_features(["Ann"])
    assert alone[0] | {"lower+1": ""} != alone[0]


@pytest.mark.parametrize(
    ("word", "expected"), [("McDonald", "XxXx"), ("2.50", "d.d"), ("cafe\u0301", "x"), ("½-", "½-")]
)
def test_shapes(word: str, expected: str) -> None:
    assert shape(word) == expected


@pytest.mark.parametrize(
    "name",
    [
        "data.span_labels",
        "data.documents.document",
        "data.documents.tokenizer",
        "data.documents.token_features",
        "data.formats.file_formats",
        "data.formats.frames",
        "data.formats.hf_datasets",
        "api.annotate",
    ],
)
def test_examples_run(name: str) -> None:
    if name.endswith("frames"):
        pytest.importorskip("pandas")
    found = doctest.testmod(importlib.import_module(f"structgp.{name}"))
    assert found.failed == 0
    assert found.attempted
