"""Formats of annotation tools: documents survive a round trip, and bad input names its place and remedy."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data import formats
from structgp.data.documents import Document, Prediction, TextSpan, spans_to_labels, tokenize
from structgp.data.formats.file_formats import FORMATS, Reading, format_by_name, format_of
from structgp.data.formats.json_array import json_items
from structgp.errors import InputError, StructgpWarning

PARTS = [
    "Ann",
    "'s",
    " ",
    "  ",
    "\r\n",
    "\n",
    "2.5",
    "é",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "👍🏽",
    "🇫🇷",
    "שלום",
    "\u200f",
]
PARTS += ["私", "...", "½", "\t", "|", "\\", "\u2028", "_", "#", '"', "\u0085"]
PIECES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=10).map("".join)
few = settings(max_examples=50, deadline=None)
SPANNED = ("prodigy", "doccano", "label-studio")


@st.composite
def documents(
    draw: st.DrawFn, texts: st.SearchStrategy[str], unknown: bool = True, scheme: str = "BIO"
) -> Document:
    """A text with its tokens, or others; labels with some that are not known; perhaps a prediction."""
    text = draw(st.one_of(texts, st.text(min_size=1, max_size=12)))
    tokens = tokenize(text)
    if draw(st.booleans()):  # tokens of another tokenizer: each character by itself
        tokens = tuple((i, i + 1) for a, b in tokens for i in range(a, b))
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=4)))
    kinds = st.sampled_from(["PER", "X-1", "Ä ö"])
    spans = [(a, b, draw(kinds)) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    labels: list[str | None] = [*spans_to_labels(spans, len(tokens), scheme)]
    found = Document(text, tokens, tuple(labels), draw(st.sampled_from([None, "a1", "7"])))
    if draw(st.booleans()):
        share = st.floats(0, 1).map(lambda p: round(p, 6))
        predicted = [TextSpan(*found.text_span(*span)[:3], draw(share)) for span in spans]
        return replace(
            found, labels=None, prediction=Prediction(tuple(labels), (), tuple(predicted), draw(share))
        )
    if unknown and draw(st.booleans()):
        labels = [None if y == "O" and draw(st.booleans()) else y for y in labels]
        return found.with_labels(labels)
    return found if draw(st.booleans()) else found.with_labels(None)


def through(found: Document, name: str, **how: str) -> Document:
    """What comes back from a file with this document and another one, whatever ends its lines."""
    reading = Reading(**how)  # type: ignore[arg-type]
    write = FORMATS[name].text
    assert write is not None
    content = "".join(write([found, Document.from_text("Z")], reading)).encode()
    back = list(formats.read(io.BytesIO(content), format=name, **how))
    assert back[1].text == "Z"
    again = "".join(write(back, reading)).encode()
    assert again == content
    with_crlf = formats.read(io.BytesIO(content.replace(b"\n", b"\r\n")), format=name, **how)
    assert all(map(same, with_crlf, back))
    return back[0]


def same(a: Document, b: Document) -> bool:
    return (a.text, a.tokens, a.labels, a.id) == (b.text, b.tokens, b.labels, b.id)


@few
@given(documents(PIECES))
@pytest.mark.parametrize("name", SPANNED)
def test_spans_survive(name: str, found: Document) -> None:
    back = through(found, name)
    assert same(found, back)
    assert back.prediction == found.prediction


@few
@given(documents(PIECES, scheme="BILOU"))
def test_spans_survive_in_another_scheme(found: Document) -> None:
    assert same(found, through(found, "prodigy", scheme="BILOU"))


@few
@given(
    documents(PIECES).filter(lambda d: bool(d.tokens)),
    st.sampled_from(["upos", "xpos", "misc:NER", "feats:N"]),
)
def test_conllu_survives(found: Document, field: str) -> None:
    if any(character in word for word in found.words for character in "\t\n\r"):
        return
    labels = None if found.labels is None else [y and y.replace(" ", "_") for y in found.labels]
    found = replace(found.with_labels(labels), prediction=None)
    back = through(found, "conllu", field=field)
    known = found.labels is not None and any(found.labels)
    assert same(found if known else found.with_labels(None), back)


@few
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Ann", "e\u0301", "👍🏽", "שלום", "\u200f.", "\u3000"]),
            st.sampled_from(["O", "B-X", None]),
        )
    )
)
def test_columns_survive(rows: list[tuple[str, str | None]]) -> None:
    if not rows:
        return
    found = Document.from_words([word for word, _ in rows], [label for _, label in rows])
    written = "".join(FORMATS["conll"].text([found, found], Reading()))  # type: ignore[misc]
    back = list(formats.read(io.BytesIO(written.replace("\n", "\r\n").encode()), format="conll"))
    assert [same(found, one) for one in back] == [True, True]


@few
@given(documents(PIECES, unknown=False))
def test_brat_survives(tmp_path_factory: pytest.TempPathFactory, found: Document) -> None:
    tokens = tokenize(found.text)
    if found.tokens != tokens or any(" " in (y or "") for y in found.labels or ()):
        return
    if found.prediction is not None and (not found.prediction.spans or "Ä ö" in str(found.prediction)):
        return
    folder = tmp_path_factory.mktemp("brat")
    formats.write([found], folder, format="brat")
    (back,) = formats.read(folder, format="brat")
    assert same(replace(found, id="000001" if found.id is None else found.id), back)
    spans = None if found.prediction is None else found.prediction.spans
    assert spans == (None if back.prediction is None else back.prediction.spans)


@few
@given(
    st.lists(
        PIECES.filter(lambda t: "\n" not in t and bool(t.strip()) and not t.endswith("\r")), max_size=4
    )
)
def test_text_survives(texts: list[str]) -> None:
    write = FORMATS["text"].text
    assert write is not None
    written = "".join(write([Document.from_text(text) for text in texts], Reading()))
    assert [d.text for d in formats.read(io.BytesIO(written.encode()), format="text")] == texts


CONLLU = """# sent_id = s1
# text = Je vais au marché.
1\tJe\til\tPRON\t_\tNumber=Sing\t2\tnsubj\t_\t_
2\tvais\taller\tVERB\t_\t_\t0\troot\t_\t_
3-4\tau\t_\t_\t_\t_\t_\t_\t_\t_
3\tà\tà\tADP\t_\t_\t5\tcase\t_\t_
4\tle\tle\tDET\t_\t_\t5\tdet\t_\t_
5\tmarché\tmarché\tNOUN\t_\t_\t2\tobl\t_\tSpaceAfter=No
5.1\tallé\taller\tVERB\t_\t_\t_\t_\t2:conj\t_
6\t.\t.\t_\t_\t_\t2\tpunct\t_\t_

"""


def test_conllu_keeps_ranges_empty_nodes_and_comments() -> None:
    (found,) = formats.read(io.BytesIO(CONLLU.encode()), format="conllu")
    assert found.words == ("Je", "vais", "à", "le", "marché", ".")
    assert found.labels == ("PRON", "VERB", "ADP", "DET", "NOUN", None)
    assert (found.id, found.text) == ("s1", "Je vais à le marché.")
    write = FORMATS["conllu"].text
    assert write is not None
    assert "".join(write([found], Reading())) == CONLLU
    predicted = Prediction(("A",) * 6, (0.5,) * 6)
    lines = "".join(write([replace(found, prediction=predicted)], Reading())).splitlines()
    assert lines[7].split("\t")[3] == "A"
    assert lines[7].endswith("SpaceAfter=No|Prob=0.500000")
    assert lines[4] == CONLLU.splitlines()[4]


def test_prodigy_answers() -> None:
    spans = [{"start": 0, "end": 3, "label": "PER"}]
    lines = [
        json.dumps({"text": "Ann left", "spans": spans, "answer": a})
        for a in ("accept", "reject", "ignore")
    ]
    lines += [json.dumps({"text": "Ann left"}), json.dumps({"text": "Ann left", "spans": []})]
    found = list(formats.read(lines, format="prodigy"))
    assert [d.labels for d in found] == [("B-PER", "O"), None, None, None, ("O", "O")]
    write = FORMATS["prodigy"].text
    assert write is not None
    again = [json.loads(line) for line in write(found, Reading())]
    assert [line.get("answer") for line in again] == ["accept", "reject", "ignore", None, "accept"]
    assert again[1]["spans"] == spans


TASK = {
    "id": 5,
    "data": {"body": "👍 Ann left", "source": 3},
    "annotations": [
        {"id": 1, "was_cancelled": True, "result": []},
        {
            "id": 2,
            "result": [
                {
                    "id": "x",
                    "from_name": "ner",
                    "to_name": "body",
                    "type": "labels",
                    "value": {"start": 3, "end": 6, "text": "Ann", "labels": ["PER"]},
                },
                {
                    "id": "y",
                    "from_name": "kind",
                    "to_name": "body",
                    "type": "choices",
                    "value": {"choices": ["news"]},
                },
            ],
        },
    ],
    "predictions": [{"model_version": "other", "result": []}],
}


def test_label_studio_tasks_stay_what_they_were() -> None:
    content = json.dumps([TASK])
    (found,) = formats.read([content], format="label-studio")
    # Offsets after an emoji that count UTF-16 units are told by the region's text.
    assert found.labels == ("O", "B-PER", "O")
    write = FORMATS["label-studio"].text
    assert write is not None
    again = json.loads("".join(write([found.with_labels(["O", "O", "B-X"])], Reading())))[0]
    assert again["annotations"][0] == TASK["annotations"][0]  # type: ignore[index]
    regions = again["annotations"][1]["result"]
    assert [r["type"] for r in regions] == ["choices", "labels"]
    assert regions[1]["value"] == {"start": 6, "end": 10, "text": "left", "labels": ["X"]}
    assert (regions[1]["from_name"], regions[1]["to_name"]) == ("ner", "body")
    predicted = Prediction(("O", "B-PER", "O"), (), (TextSpan(2, 5, "PER", 0.9),), 0.75)
    told = json.loads("".join(write([replace(found, prediction=predicted)], Reading())))[0]["predictions"]
    assert [p["model_version"] for p in told] == ["other", "structgp"]
    assert told[1]["score"] == 0.75
    assert told[1]["result"][0]["score"] == 0.9


def test_label_studio_regions_of_html() -> None:
    value = {"start": "/p[1]/text()[1]", "end": "/p[1]/text()[1]", "hypertextlabels": ["PER"]}
    value |= {"globalOffsets": {"start": 0, "end": 3}, "text": "Ann"}
    task = {
        "data": {"text": "Ann left"},
        "annotations": [{"result": [{"type": "hypertextlabels", "value": value}]}],
    }
    (found,) = formats.read([json.dumps([task])], format="label-studio")
    assert found.labels == ("B-PER", "O")


def test_doccano_reads_what_it_exports() -> None:
    entities = [{"id": 1, "label": "PER", "start_offset": 0, "end_offset": 3}]
    lines = [json.dumps({"id": 1, "text": "Ann left", "entities": entities, "relations": []})]
    lines += [json.dumps({"id": 2, "text": "Ann left", "labels": [[4, 8, "X"]]}), '{"text": "Ann"}']
    found = list(formats.read(lines, format="doccano"))
    assert [d.labels for d in found] == [("B-PER", "O"), ("O", "B-X"), None]
    assert [d.id for d in found] == ["1", "2", None]


def test_brat_joins_entities_that_lines_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"Ann\r\nLee left")
    (tmp_path / "a.ann").write_text("T1\tPER 0 3;5 8\tAnn Lee\nR1\tX Arg1:T1 Arg2:T1\n")
    (tmp_path / "b.txt").write_text("left")
    a, b = formats.read(tmp_path, format="brat")
    assert (a.labels, b.labels, a.id) == (("B-PER", "I-PER", "O"), None, "a")


BAD = [
    ("prodigy", '{"text": "Ann"', "not JSON (Expecting ',' delimiter at character 15)"),
    ("prodigy", "[1]", "expected an object, got a list"),
    ("prodigy", '{"spans": []}', "no 'text' among its keys (spans)"),
    ("prodigy", '{"text": 3}', ".text: expected a string, got a number"),
    (
        "prodigy",
        '{"text": "Ann", "answer": "yes"}',
        ".answer: 'yes' is not known; use one of accept, reject, ignore",
    ),
    (
        "prodigy",
        '{"text": "Ann", "spans": [{"start": 0, "end": 2, "label": "P"}]}',
        "cuts the token 'Ann' from 0 to 3",
    ),
    (
        "prodigy",
        '{"text": "Ann", "spans": [{"start": 0, "label": "P"}]}',
        ".spans[0].end: expected a whole number, got None",
    ),
    (
        "prodigy",
        '{"text": "Ann", "spans": [{"start": 0, "end": 3}]}',
        ".spans[0].label: expected the label as a string",
    ),
    (
        "prodigy",
        '{"text": "Ann", "tokens": [{"text": "An", "start": 0, "end": 3}]}',
        ".tokens[0]: 'An', but the text",
    ),
    ("prodigy", '{"text": "Ann", "tokens": [{"start": 0, "end": 9}]}', ".tokens[0]: characters 0 to 9"),
    (
        "prodigy",
        '{"text": "A B", "spans": [{"start": 0, "end": 3, "label": "P"}, '
        '{"start": 2, "end": 3, "label": "Q"}]}',
        "'P' and 'Q' overlap",
    ),
    (
        "doccano",
        '{"text": "Ann", "label": [[0, 3]]}',
        ".label[0]: expected [start, stop, name], got [0, 3]",
    ),
    ("doccano", '{"text": "Ann", "label": {"a": 1}}', ".label: expected a list, got an object"),
    (
        "doccano",
        '{"text": "Ann", "label": [[0, 4, "P"]]}',
        "from 0 to 4 is not in the text, which has 3 characters",
    ),
    (
        "doccano",
        '{"text": "Ann", "label": [[0, 3, "P"]], "probabilities": []}',
        "0 probabilities for 1 labels",
    ),
    ("label-studio", '[{"data": {"text": "Ann"}}, 3]', "[1]: expected an object, got a number"),
    ("label-studio", '[{"data": {"a": "x", "b": "y"}}]', "[0].data: no 'text' among its keys (a, b)"),
    ("label-studio", '[{"data": {"text": "Ann"}}', "the list does not end; check that the file is whole"),
    ("label-studio", '[{"data": ', "not JSON (Expecting value"),
    ("label-studio", '[{"data": {"text": "Ann"}} {}]', "'{' where ',' or ']' is needed"),
    ("label-studio", '[{"data": {"text": "Ann"}}] 3', "text after the end of the list"),
    (
        "label-studio",
        json.dumps([TASK]).replace('"Ann"', '"Bob"'),
        "result[0].value: 'Bob', but the text from 3 to 6 is 'nn '",
    ),
    ("conllu", "1\tAnn\t_", "3 columns where CoNLL-U has 10"),
    ("conllu", "x\t" + "\t".join("_" * 9), "the ID is 'x'"),
    (
        "conllu",
        "# c\n1\t" + "\t".join("_" * 9) + "\n3\t" + "\t".join("_" * 9),
        ":3: the ID is 3 where 2 comes next",
    ),
    ("conll", "Ann B\nleft", "1 column where line 1 has 2"),
]


@pytest.mark.parametrize(("name", "content", "problem"), BAD, ids=range(len(BAD)))
def test_bad_input_names_its_place_and_a_remedy(name: str, content: str, problem: str) -> None:
    class File(io.BytesIO):
        name = "folder/in"

    with pytest.raises(InputError) as error:
        list(formats.read(File(content.encode()), format=name))
    assert problem in str(error.value)
    assert error.value.place.startswith(("folder/in:", "folder/in["))
    assert error.value.remedy


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("T1 PER 0 3", ":1: 'T1 PER 0 3' is not an entity"),
        ("T1\tPER 0 3;9 13\tAnn", ":1: the entity has a gap from 3 to 9"),
        ("T1\tPER 0 2\tAn", ":1: the span 'PER' from 0 to 2 ('An') cuts the token"),
    ],
)
def test_bad_annotations_of_brat(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Ann Lee, left")
    (tmp_path / "a.ann").write_text(line)
    with pytest.raises(InputError) as error:
        list(formats.read(tmp_path, format="brat"))
    assert f"{tmp_path / 'a.ann'}{problem}" in str(error.value)


def test_what_a_format_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its text has several lines; write another format"):
        formats.write([Document.from_text("a\nb")], tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"token 0: cell 1 \('a b'\) contains a space"):
        formats.write([Document("a b", ((0, 3),))], tmp_path / "a.conll")
    with pytest.raises(InputError, match="cannot be a file name"):
        formats.write([Document.from_text("a", id="a/b")], tmp_path / "b", format="brat")
    with pytest.raises(InputError, match=r"cannot be written in latin-1"):
        formats.write([Document.from_text("私")], tmp_path / "a.jsonl", encoding="latin-1")
    with pytest.raises(InputError, match=r"the name .*a\.xml does not tell the format; say which: conll"):
        formats.write([], tmp_path / "a.xml")
    with pytest.raises(InputError, match="snup: is not known"):
        formats.read(tmp_path / "a.txt", snup=True)
    with pytest.raises(InputError, match="'xml' is not known; use one of conll, conllu"):
        formats.read(tmp_path / "a", format="xml")
    with pytest.raises(InputError, match="field: 'ner' is not known"):
        list(formats.read(["1"], format="conllu", field="ner"))
    with pytest.warns(StructgpWarning, match="1 documents without tokens are left out"):
        formats.write([Document.from_text(" "), Document.from_text("a")], tmp_path / "a.conllu")
    assert not (tmp_path / "a.jsonl").exists()


def test_a_span_that_cuts_a_token_can_grow() -> None:
    line = '{"text": "Annabel left", "label": [[0, 3, "PER"]]}'
    (found,) = formats.read([line], format="doccano", snap=True)
    assert found.labels == ("B-PER", "O")


def test_names_of_files_tell_their_format() -> None:
    told = {
        "a.conllu": "conllu",
        "a.JSON": "label-studio",
        "a.jsonl": "prodigy",
        "a.txt": "text",
        "a.col": "conll",
    }
    assert {path: format_of(path) for path in told} == told


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", SPANNED)
def test_reading_is_streaming(name: str, indent: int | None, tmp_path: Path) -> None:
    """No more of a file is read than its first documents need, whether or not it has lines."""
    write = FORMATS[name].text
    assert write is not None
    content = "".join(write((Document.from_text(f"word {i}") for i in range(20_000)), Reading()))
    if name == "label-studio":
        content = json.dumps(json.loads(content), indent=indent)
    stream = io.BytesIO(content.encode())
    found = formats.read(stream, format=name)
    assert [next(found).text for _ in range(3)] == ["word 0", "word 1", "word 2"]
    assert stream.tell() < 200_000 < len(content)


def test_items_of_a_list_know_their_lines() -> None:
    text = '[\n {"a": 1},\n\n {"b":\n 2}, 3]'
    assert list(json_items([*text.split("\n")], "x", "utf-8")) == [({"a": 1}, 2), ({"b": 2}, 4), (3, 5)]
    assert list(json_items(['{"a": 1}', '{"b": 2}'], "x", "utf-8")) == [({"a": 1}, 1), ({"b": 2}, 2)]
    assert list(json_items(["[]"], "x", "utf-8")) == []
    with pytest.raises(InputError, match=r"not utf-8 text after line"):
        list(json_items(io.BytesIO(b"[1,\n\xff"), "x", "utf-8"))


def test_label_studio_with_ids_in_the_place_of_predictions(tmp_path):
    task = {"id": 1, "data": {"text": "Ann left"}, "predictions": [12, 13], "meta": "imported"}
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([task]), encoding="utf-8")
    (document,) = formats.read(path, "label-studio")
    assert document.text == "Ann left"
    formats.write([replace(document, labels=("O", "O"))], tmp_path / "again.json", "label-studio")
    (again,) = formats.read(tmp_path / "again.json", "label-studio")
    assert again.labels == ("O", "O")


def test_names_that_do_not_tell_the_format():
    assert format_by_name("more.conll", "conllu") == "conllu"
    assert format_by_name("more.conllu", "conll") == "conllu"
    assert format_by_name("more.txt", "doccano") == "text"
