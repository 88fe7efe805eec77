"""The commands on documents: train, tag, evaluate, next and report in the formats of annotation tools;
convert."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import structgp
from structgp.api.annotate import annotate
from structgp.cli import main
from structgp.data import corpora, formats, sources
from structgp.data.documents import Document, token_features
from structgp.errors import InputError, StructgpWarning

QUICK = ("--data-weight", "1")


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def ok(*arguments, stdin=None):
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def refused(*arguments, says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert re.search(says, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1


def recipe_documents(n: int) -> list[Document]:
    corpus = corpora.recipes()
    both = zip(corpus.X_train[:n], corpus.y_train, strict=False)
    return [
        Document.from_words([row[0] for row in rows], y, id=f"r{i}") for i, (rows, y) in enumerate(both)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of documents, and a model trained on some of them."""
    found = tmp_path_factory.mktemp("documents")
    documents = recipe_documents(36)
    formats.write(documents[:30], found / "train.jsonl", "prodigy")
    for name, file in (("prodigy", "test.jsonl"), ("doccano", "test.doc"), ("label-studio", "test.json")):
        formats.write(documents[30:], found / file, name)
    formats.write(documents[30:], found / "test.conllu", "conllu")
    formats.write(documents[30:], found / "new.txt", "text")
    ok("train", found / "train.jsonl", "--format", "prodigy", "-o", found / "model", *QUICK)
    return found


FILES = [
    ("prodigy", "test.jsonl"),
    ("doccano", "test.doc"),
    ("label-studio", "test.json"),
    ("conllu", "test.conllu"),
]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_tag_writes_the_same_format_with_probabilities(name: str, file: str, folder: Path) -> None:
    out = folder / f"tagged.{name}"
    ok("tag", "-m", folder / "model", "--format", name, folder / file, "-o", out)
    given, found = list(formats.read(folder / file, name)), list(formats.read(out, name))
    tagger = structgp.load(folder / "model")
    expected = annotate(tagger, given)
    assert [d.text for d in found] == [d.text for d in given]
    if name == "conllu":
        assert [d.labels for d in found] == [d.prediction.labels for d in expected]
        assert re.search(r"Prob=0\.\d{6}", out.read_text())
        return
    for one, other in zip(found, expected, strict=True):
        assert [s[:3] for s in one.prediction.spans] == [s[:3] for s in other.prediction.spans]
        shares = [s.probability for s in other.prediction.spans]
        assert [s.probability for s in one.prediction.spans] == pytest.approx(shares, abs=1e-6)


def test_span_probabilities_are_those_of_the_model(folder: Path) -> None:
    tagger = structgp.load(folder / "model")
    given = list(formats.read(folder / "new.txt"))
    for document in annotate(tagger, given):
        x = token_features(document.words)
        starts = {start: t for t, (start, _) in enumerate(document.tokens)}
        stops = {stop: t + 1 for t, (_, stop) in enumerate(document.tokens)}
        assert document.prediction.labels == tuple(tagger.predict_single(x))
        for start, stop, label, p in document.prediction.spans:
            assert p == pytest.approx(
                tagger.span_probability(x, starts[start], stops[stop], label), abs=1e-6
            )
        marginals = tagger.predict_marginals_single(x)
        shares = [at[label] for at, label in zip(marginals, document.prediction.labels, strict=True)]
        assert document.prediction.probabilities == pytest.approx(shares)
        assert document.prediction.score == pytest.approx(sum(shares) / len(shares))


def test_unlikely_spans_have_probabilities_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tagger, given = structgp.load(folder / "model"), list(formats.read(folder / "new.txt"))
    expected = [d.prediction.spans for d in annotate(tagger, given)]
    monkeypatch.setattr("structgp.api.annotate.LEAST", 0.999)
    for spans, found in zip(expected, annotate(tagger, given), strict=True):
        assert [s.probability for s in found.prediction.spans] == pytest.approx(
            [s.probability for s in spans]
        )


def test_known_labels_and_deferred_ones(folder: Path) -> None:
    tagger = structgp.load(folder / "model")
    (document,) = [Document.from_text("2 figs")]
    (kept,) = annotate(tagger, [document, document], known=[["O", None], None])[:1]
    assert kept.prediction.labels[0] == "O"
    assert kept.prediction.probabilities[0] == pytest.approx(1)
    (deferred,) = annotate(tagger, [document], defer=0.0)
    assert deferred.prediction.labels == (None, None)
    assert deferred.prediction.spans == ()
    assert annotate(tagger, [Document.from_text("")])[0].prediction.labels == ()
    with pytest.raises(InputError, match="known: 1 entries for 2 documents"):
        annotate(tagger, [document] * 2, known=[None])


def test_text_is_tagged_line_by_line(folder: Path) -> None:
    text = (folder / "new.txt").read_text()
    piped = ok("tag", "-m", folder / "model", "--format", "text", stdin=text).stdout
    assert piped == ok("tag", "-m", folder / "model", "--format", "text", folder / "new.txt").stdout
    first = json.loads(piped.splitlines()[0])
    assert {"text", "tokens", "spans", "score"} == set(first)
    columns = ok(
        "tag", "-m", folder / "model", "--format", "text", folder / "new.txt", "--to", "conll"
    ).stdout
    assert re.fullmatch(r"\S+\t[01]\.\d{6}\t\S+", columns.splitlines()[0])
    ok(
        "tag",
        "-m",
        folder / "model",
        "--format",
        "text",
        folder / "new.txt",
        "--to",
        "brat",
        "-o",
        folder / "b",
    )
    assert "probability" in (folder / "b" / "000001.ann").read_text()


def test_scores_are_the_same_in_every_format(folder: Path) -> None:
    tables = {ok("evaluate", "-m", folder / "model", "--format", n, folder / f).stdout for n, f in FILES}
    assert len(tables) == 1
    (table,) = tables
    found = json.loads(ok("evaluate", "-m", folder / "model", folder / "test.jsonl", "--json").stdout)[
        "structgp"
    ]
    for title, part in (("span type", "by_type"), ("label", "by_label")):
        assert re.search(rf"^{title} +precision +recall +F1 +support$", table, re.MULTILINE)
        for kind, of in found[part].items():
            shares = " +".join(f"{of[key]:.2%}" for key in ("precision", "recall", "f1"))
            assert re.search(rf"^{kind} +{shares} +{of['support']}$", table, re.MULTILINE)
    ok("report", folder / "model", folder / "test.jsonl", "-o", folder / "page.html")
    assert "figs" in (folder / "page.html").read_text() or "span" in (folder / "page.html").read_text()
    ok("expect", folder / "model", folder / "new.txt", "--format", "text")


def test_next_writes_suggestions(folder: Path) -> None:
    found = ok("next", "-m", folder / "model", "--format", "text", folder / "new.txt", "-n", "2")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(lines) == 2
    assert all("answer" not in line for line in lines)
    assert re.fullmatch(r"(\S+new\.txt:\d+\n){2}", found.stderr)


def test_next_writes_columns_that_can_be_trained_on(folder: Path, tmp_path: Path) -> None:
    """Without probabilities, unless they are asked for."""
    train, pool, model = tmp_path / "train.conll", tmp_path / "pool.conll", tmp_path / "m"
    documents = recipe_documents(20)
    formats.write(documents[:15], train, "conll")
    formats.write(documents[15:], pool, "conll")
    ok("train", "--format", "conll", train, "-o", model, *QUICK)
    ask = "next", "-m", model, pool, "-n", "2"
    columns = [
        {len(line.split()) for line in ok(*ask, *v).stdout.splitlines() if line} for v in ((), ("-v1",))
    ]
    assert columns == [{2}, {3}]
    labelled = train.read_text() + ok(*ask).stdout
    train.write_text(labelled)
    assert "17 sequences" in ok("train", "--format", "conll", train, "-o", model, *QUICK).stderr


def test_plain_text_that_looks_like_columns(tmp_path: Path) -> None:
    """Every command that is given some says so."""
    train, model, text = tmp_path / "train.conll", tmp_path / "m", tmp_path / "two.txt"
    formats.write(recipe_documents(15), train, "conll")
    ok("train", "--format", "conll", train, "-o", model, *QUICK)
    text.write_text("Ann left Rome\nBob saw Paris\n")
    for command in (("expect", model, text), ("next", "-m", model, text, "-n", "1")):
        assert "'Paris' in the last column is not one of the model's labels" in ok(*command).stderr


@pytest.mark.parametrize(
    ("format", "lines", "says"),
    [
        ("conll", "two,B-QTY\neggs,B-NAME\n", "in the last of two columns or more"),
        ("doccano", '{"text": "two eggs", "lable": []}\n', "under 'label', 'labels' or 'entities'"),
        (
            "prodigy",
            '{"text": "two", "spans": [{"start": 0, "end": 3, "label": "QTY", "probability": 0.9}]}\n',
            "spans with a probability are a model's, unless",
        ),
    ],
)
def test_the_error_says_what_labels_look_like(format: str, lines: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "train").write_text(lines)
    refused("train", "--format", format, tmp_path / "train", "-o", tmp_path / "m", says=says)


def test_a_warning_about_every_line_is_shown_once(tmp_path: Path) -> None:
    lines = [{"tokens": [{"w": "a"}, {"w": "b"}], "labels": ["X", "Y"], "parents": [-1, 0]}] * 6
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = ok("train", "--format", "jsonl", tmp_path / "t.jsonl", "-o", tmp_path / "m", *QUICK).stderr
    assert said.count("parents: not used") == 1


def test_empty_lines_that_are_missing(tmp_path: Path) -> None:
    train = tmp_path / "train.conll"
    formats.write(recipe_documents(40), train, "conll")
    text = train.read_text().replace("\n\n", "\n")
    train.write_text(text)
    said = ok("train", "--format", "conll", train, "-o", tmp_path / "m", *QUICK).stderr
    assert re.search(r"train\.conll: one sequence of \d+ tokens; an empty line ends a sequence", said)


def test_what_newcomers_type(folder: Path, tmp_path: Path) -> None:
    """Plain text for columns, a format that the name tells, a model without its option."""
    model, columns, text = tmp_path / "model", tmp_path / "train.conll", tmp_path / "new.txt"
    columns.write_text("Ann B-PER\nleft O\n\nBob B-PER\n\nnobody O\n")
    train = ("train", columns, "-o", model)
    refused(*train, says="TEMPLATE and TRAIN are needed; give both, or add --format conll, which needs no")
    columns.rename(tmp_path / "train.txt")
    refused("train", tmp_path / "train.txt", "-o", model, says="name a format .*: --format conll, doccano")
    ok("train", tmp_path / "train.txt", "--format", "conll", "-o", model, *QUICK)
    text.write_text("Ann left Rome.\nBob came.\n")
    found = run("tag", "-m", model, text).stderr.splitlines()
    assert re.search(
        r"new\.txt:2: 2 columns where .*; if it is plain text, say that its format is", found[-1]
    )
    text.write_text("Ann left Rome.\n")
    found = ok("tag", "-m", model, text).stderr
    assert re.fullmatch(r"structgp: warning: \S+:1: 'Rome\.' in the last column is not .* text\n", found)
    assert ok("tag", "-m", model, tmp_path / "train.txt").stderr == ""
    refused(
        "next", model, text, says=rf"next: the model to read needs the option -m; .* -m {model} {text}$"
    )


def test_force_keeps_what_is_labelled(folder: Path, tmp_path: Path) -> None:
    words = Document.from_words(["2", "figs"], ["O", None])
    formats.write([words], tmp_path / "a.jsonl", "prodigy")
    kept = ok("tag", "-m", folder / "model", "--force", tmp_path / "a.jsonl", "--to", "conll").stdout
    assert kept.splitlines()[0] == "2\t1.000000\tO"
    formats.write([words.with_labels(["B-NO", None])], tmp_path / "a.jsonl", "prodigy")
    refused(
        "tag",
        "-m",
        folder / "model",
        "--force",
        tmp_path / "a.jsonl",
        says=r"a\.jsonl:1: 'B-NO' is not a label",
    )


def test_spans_that_cut_tokens_grow_where_asked(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.doc"
    cut.write_text('{"text": "250g flour", "label": [[0, 2, "QTY"]]}\n')
    evaluate = ("evaluate", "-m", folder / "model", "--format", "doccano", cut)
    refused(*evaluate, says=r"cut\.doc:1: the span 'QTY' .* or let it grow with --snap$")
    assert re.search(r"^B-QTY .* 1$", ok(*evaluate, "--snap").stdout, re.MULTILINE)


def test_deferred_labels_are_not_known(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("a few figs\n")
    given = ("tag", "-m", folder / "model", "--format", "text", tmp_path / "new.txt", "--defer", "0")
    assert "unlabelled" in json.loads(ok(*given).stdout)
    rows = ok(*given, "--to", "conll", "--missing", "NONE").stdout.split()
    assert rows[2::3] == ["NONE"] * 3


def test_the_name_of_a_file_tells_its_format(folder: Path, tmp_path: Path) -> None:
    model, new = folder / "model", folder / "new.txt"
    found = ok("tag", "-m", model, new)
    assert found.stdout == ok("tag", "-m", model, "--format", "text", new).stdout
    assert "new.txt: read as text, by its name" in found.stderr
    assert "token error" in ok("expect", model, new).stdout
    ok("report", model, new, "-o", tmp_path / "page.html")
    assert not ok("tag", "-m", model, folder / "test.jsonl").stderr
    assert formats.file_formats.format_by_name("a.jsonl", "doccano") == "doccano"
    assert formats.file_formats.format_by_name("a.txt", "conll") == "conll"
    assert formats.file_formats.format_by_name("a.doc", "brat") == "brat"


def test_entities_do_not_take_the_place_of_parts_of_speech(folder: Path) -> None:
    given = ("tag", "-m", folder / "model", folder / "new.txt")
    row = ok(*given, "--to", "conllu").stdout.splitlines()[1].split("\t")
    assert row[3] == "_"
    assert re.search(r"\bNER=\S+\|Prob=", row[9])
    row = ok(*given, "--to", "conllu", "--field", "xpos").stdout.splitlines()[1].split("\t")
    assert row[4] != "_"
    assert "NER=" not in row[9]
    wrong = run(*given, "--field", "xpos")
    assert wrong.exit_code == 2
    assert "--field: is for conllu, not for prodigy" in wrong.stderr


def test_a_model_with_vectors_needs_its_features() -> None:
    documents = [Document.from_words(["two", "eggs"], ["B-QTY", "O"])] * 2
    X = [[t | {"vector": np.ones(2)} for t in token_features(d.words)] for d in documents]
    tagger = structgp.StructuredGPClassifier(prior=structgp.Prior(data_weight=1))
    tagger.fit(X, [d.labels for d in documents])
    with pytest.raises(InputError, match=r"^X: .* with vectors.*annotate\(tagger, documents, X\)"):
        annotate(tagger, documents)
    assert annotate(tagger, documents, X)[0].prediction is not None


def test_what_documents_cannot_hold(folder: Path, tmp_path: Path) -> None:
    model, test = folder / "model", folder / "test.jsonl"
    refused("tag", "-m", model, test, "-n", "2", says="-n: prodigy has no place for it")
    refused("tag", "-m", model, test, "-v", "2", says="-v 2: prodigy has no place")
    refused(
        "tag", "-m", model, test, "-v", "2", "--to", "conll", says="-v 2: conll has no .*predict_marginals"
    )
    refused("tag", "-m", model, test, "--to", "brat", says="-o: brat is not text for standard output")
    refused(
        "evaluate",
        "-m",
        model,
        "--format",
        "text",
        folder / "new.txt",
        says="none of its documents is labelled",
    )
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "Annabel", "spans": [{"start": 0, "end": 3, "label": "P"}]}')
    train = ("train", bad, "--format", "prodigy", "-o", tmp_path / "m")
    refused(*train, says=r"bad\.jsonl:1: the span .* or let it grow with --snap$")
    refused(*train, "--field", "xpos", says="--field: is for conllu")
    features = ("train", bad, "--format", "jsonl", "-o", tmp_path / "m")
    refused(*features, says="unknown key 'text'; .*--format doccano")
    refused(*train, "--numeric", "1", says="--numeric: is for column files; documents have words")
    refused(
        "train",
        "a",
        "b",
        "c",
        "--format",
        "text",
        "-o",
        tmp_path / "m",
        says="3 files, but TEMPLATE and TRAIN",
    )
    template, columns = tmp_path / "t", tmp_path / "c"
    template.write_text("U:%x[0,0]\nB\n")
    columns.write_text("two QTY\neggs NAME\n\n3 QTY\n\n")
    ok("train", template, columns, "-o", tmp_path / "plain", *QUICK)
    refused(
        "tag",
        "-m",
        tmp_path / "plain",
        columns,
        "--format",
        "text",
        says="was trained on columns, not on doc",
    )
    refused("tag", "-m", tmp_path / "plain", columns, "--to", "text", says="--to: is for documents")
    refused("tag", "-m", tmp_path / "plain", columns, "--snap", says="--snap: .* was trained on columns")


def test_train_with_a_template_a_scheme_and_partly_labelled_documents(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("U0:%x[0,1]\nU1:%x[-1,1]\nU2:%x[0,2]\nB\n")
    lines = (folder / "train.jsonl").read_text().splitlines()[:12]
    ignored = json.dumps(json.loads(lines[0]) | {"answer": "ignore"})
    (tmp_path / "train.jsonl").write_text("\n".join([*lines, ignored]))
    given = ("train", template, tmp_path / "train.jsonl", "--format", "prodigy", "--scheme", "BILOU")
    found = ok(*given, "-o", tmp_path / "m", *QUICK)
    assert "1 of 13 documents are not labelled; they are left out" in found.stderr
    tagger = structgp.load(tmp_path / "m")
    assert "U-QTY" in tagger.classes_
    reader = sources.from_json(tagger.model_.extra)
    assert reader.to_json() == sources.from_json(reader.to_json()).to_json()
    assert reader.tokens(Document.from_text("Two eggs"))[1] == ("U0:eggs"[3:], "two", "x")
    refused(*given[:1], tmp_path / "none", *given[2:], "-o", tmp_path / "m", says="none: cannot be read")
    template.write_text("U0:%x[0,7]\n")
    refused(*given, "-o", tmp_path / "m", says="column 7")


def test_readers_of_documents(tmp_path: Path) -> None:
    vectors = tmp_path / "vectors"
    vectors.write_text("two 1 0\neggs 0 1\n")
    lines = ['{"text": "two eggs", "label": [[0, 3, "QTY"]]}', '{"text": "three"}']
    reader = sources.learn(lines, format="doccano", vectors=vectors, scheme="IOBES")
    with pytest.warns(StructgpWarning, match="1 of 2 documents are not labelled"):
        data = reader.read(lines)
    assert data.y == [["S-QTY", "O"]]
    assert data.X[0][0]["vector"].tolist() == [1, 0]
    again = sources.from_json(reader.to_json(), vectors=vectors)
    with pytest.warns(StructgpWarning):
        assert [y for _, y in again.labelled(lines, "utf-8", "x")] == [["S-QTY", "O"]]
    with pytest.raises(InputError, match="vector_column: is for column files"):
        sources.learn(lines, format="doccano", vectors=vectors, vector_column=0)
    rows = "1\ta\tA\tX\tY\tF=1\t_\t_\t_\t_"
    conllu = sources.learn([], format="conllu", template=sources.Template.parse("U:%x[0,6]\nU:%x[0,7]"))
    assert next(conllu.sequences([rows])).tokens == [("_", "Y")]


def test_convert(folder: Path, tmp_path: Path) -> None:
    said = ok("convert", folder / "test.jsonl", tmp_path / "a.json").stderr
    assert said == f"wrote 6 documents to {tmp_path / 'a.json'}\n"
    ok("convert", tmp_path / "a.json", tmp_path / "b", "--to", "brat")
    ok("convert", tmp_path / "b", tmp_path / "c.jsonl", "--from", "brat", "--snap")
    ok("convert", tmp_path / "a.json", tmp_path / "d.conll", "--scheme", "IOBES")
    assert "S-QTY" in (tmp_path / "d.conll").read_text()
    spans = [{d.id: d.spans for d in formats.read(tmp_path / name)} for name in ("a.json", "c.jsonl")]
    assert spans[0].keys() == spans[1].keys()
    refused(
        "convert",
        folder / "test.doc",
        tmp_path / "a.json",
        says="--from: the name .* does not tell the format",
    )
    refused("convert", tmp_path / "no", tmp_path / "a.json", says="no: cannot be read")


def test_convert_reads_and_writes_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Piped:
        buffer = io.BytesIO(b"two eggs\n")

    monkeypatch.setattr(sys, "stdin", Piped())
    from structgp.cli.converting import convert

    convert("-", str(tmp_path / "a.jsonl"), "text", None, "utf-8", snap=False, field=None)
    assert json.loads((tmp_path / "a.jsonl").read_text())["text"] == "two eggs"
