"""The commands on real files: what they write, line for line, and what they say when they cannot."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from benchmarks.generate import generate
from click.testing import CliRunner

import structgp
import structgp.cli.scoring
import structgp.cli.tagging
from structgp import Inducing
from structgp.api.estimator import StructuredGPClassifier
from structgp.cli import main, structure_files
from structgp.data import atomic

TEMPLATE = """\
# the token, its neighbours
U00:%x[0,0]
U01:%x[0,1]
U02:%x[-1,0]/%x[0,0]

U03:%x[1,1]
B
"""
SMALL = ("--inducing", "30")


def columns(X, y=None, *, separator=" ", end="\n"):
    """Sequences as a column file."""
    lines = []
    for i, x in enumerate(X):
        for t, token in enumerate(x):
            cells = [*token, y[i][t]] if y is not None else [*token]
            lines.append(separator.join(cells))
        lines.append("")
    return "".join(line + end for line in lines)


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def ok(*arguments, stdin=None):
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def refused(*arguments, stdin=None, says=()):
    """Exit status 2 and one line on standard error, ``structgp: error: place: problem; remedy``."""
    result = run(*arguments, stdin=stdin)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert re.fullmatch(r"structgp: error: \S.*: .+; .+", lines[0])
    for part in says:
        assert str(part) in lines[0], (part, lines[0])
    assert result.stdout == ""
    return lines[0]


class Files:
    """A folder with a template, training and test files, and a model."""

    def __init__(self, folder: Path) -> None:
        data = generate(40, n_labels=3, n_values=8, n_templates=2, mean_length=5, seed=0)
        self.folder = folder
        self.X, self.y = data.X[:28], data.y[:28]
        self.X_test, self.y_test = data.X[28:], data.y[28:]
        self.template = self.write("template", TEMPLATE)
        self.train = self.write("train.conll", columns(self.X, self.y))
        self.test = self.write("test.conll", columns(self.X_test, self.y_test))
        self.bare = self.write("bare.conll", columns(self.X_test))
        self.model = folder / "model"
        self.trained = ok("train", self.template, self.train, "-o", self.model, *SMALL)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def unfit(monkeypatch):
    """No fit may be asked for."""

    def never(*_, **__):
        raise AssertionError("a fit was started")

    monkeypatch.setattr(StructuredGPClassifier, "fit", never)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- train -----------------------------------------------------------------------------------------


def test_train_says_what_it_did(files):
    result = files.trained
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("step 1: bound -")
    tokens = sum(map(len, files.X))
    assert f"28 sequences, {tokens} tokens, 3 labels; 30 inducing inputs" in lines[-2]
    assert "second-order" in lines[-2]
    assert "converged after" in lines[-2]
    assert lines[-1] == f"wrote {files.model}"


def test_the_model_holds_the_template_in_place(files):
    model = structgp.load(files.model).model_
    assert model.extra["template"] == TEMPLATE
    assert model.extra["n_columns"] == 2
    assert len(model.encoder.templates) == 4
    assert float(model.posterior["next"].scale) > 0
    assert model.posterior["next"].m.any()


def test_a_template_without_b_has_no_pairwise_scores(files, write, tmp_path):
    template = write("template", TEMPLATE.replace("B\n", ""))
    ok("train", template, files.train, "-o", tmp_path / "model", *SMALL)
    posterior = structgp.load(tmp_path / "model").model_.posterior
    assert float(posterior["next"].scale) == 0
    assert not posterior["next"].m.any()


def test_train_replaces_a_model_and_scores_dev_data(files, write, tmp_path):
    model = write("model", "an old one")
    result = ok(
        "train", files.template, files.train, "-o", model, *SMALL, "--dev", files.test,
        "--kernel", "template-product", "--inference", "adam", "--seed", "3",
    )  # fmt: skip
    loaded = structgp.load(model)
    assert (loaded.kernel, loaded.inference, loaded.random_state) == ("template-product", "adam", 3)
    assert result.stdout == ok("evaluate", "-m", model, files.test).stdout
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_train_fits_as_python_does_by_default(files, tmp_path):
    result = ok("train", files.template, files.train, "-o", tmp_path / "model")
    template = structgp.data.sources.templates.Template.parse(TEMPLATE)
    X = [template.expand(x) for x in files.X]
    ours = StructuredGPClassifier(features="columns").fit(X, files.y)
    loaded = structgp.load(tmp_path / "model")
    assert loaded.training_log_["posterior"] == ours.training_log_["posterior"] == "weights"
    assert loaded.training_log_["elbo"] == pytest.approx(ours.training_log_["elbo"])
    assert f"{ours.training_log_['n_inducing']} weights" in result.stderr


def test_train_by_minibatches(files, tmp_path):
    ok("train", files.template, files.train, "-o", tmp_path / "m", "--inference", "minibatch")
    assert structgp.load(tmp_path / "m").training_log_["optimizer"] == "minibatch"


def test_one_seed_one_model(files, tmp_path):
    ok("train", files.template, files.train, "-o", tmp_path / "model", *SMALL)
    again = ok("tag", "-m", tmp_path / "model", "-v2", files.test).stdout
    assert again == ok("tag", "-m", files.model, "-v2", files.test).stdout


# -- tag -------------------------------------------------------------------------------------------


def test_tag_is_laid_out_as_crf_test_does(files):
    out = ok("tag", "-m", files.model, files.bare).stdout
    estimator = structgp.load(files.model)
    template = structgp.data.sources.templates.Template.parse(TEMPLATE)
    predicted = estimator.predict([template.expand(x) for x in files.X_test])
    assert out == columns(files.X_test, predicted, separator="\t")
    assert out.endswith("\n\n")


def test_tag_keeps_a_label_that_is_there(files):
    bare = ok("tag", "-m", files.model, files.bare).stdout.splitlines()
    labelled = ok("tag", "-m", files.model, files.test).stdout.splitlines()
    for line, other in zip(bare, labelled, strict=True):
        cells, others = line.split("\t"), other.split("\t")
        assert others[:2] + others[3:] == cells if line else not other
    gold = [line.split("\t")[2] for line in labelled if line]
    assert gold == [label for labels in files.y_test for label in labels]


def test_tag_with_probabilities(files):
    estimator = structgp.load(files.model)
    template = structgp.data.sources.templates.Template.parse(TEMPLATE)
    X = [template.expand(x) for x in files.X_test]
    labels, marginals = estimator.predict(X), estimator.predict_marginals(X)
    log_probs = estimator.sequence_log_probs(X, labels)
    one, two = [], []
    for x, y, m, log_prob in zip(files.X_test, labels, marginals, log_probs, strict=True):
        for lines in (one, two):
            lines.append(f"# {np.exp(log_prob):.6f}")
        for token, label, p in zip(x, y, m, strict=True):
            line = "\t".join([*token, f"{label}/{p[label]:.6f}"])
            one.append(line)
            two.append("\t".join([line, *(f"{name}/{p[name]:.6f}" for name in ("L0", "L1", "L2"))]))
        for lines in (one, two):
            lines.append("")
    assert ok("tag", "-m", files.model, "-v1", files.bare).stdout.splitlines() == one
    assert ok("tag", "-m", files.model, "-v", "1", files.bare).stdout.splitlines() == one
    assert ok("tag", "-m", files.model, "-v", "2", files.bare).stdout.splitlines() == two
    assert len({line for line in one if line.startswith("# ")}) > 1


def test_tag_whole_sequences(files):
    out = ok("tag", "-m", files.model, "--decode", "sequence", files.bare).stdout
    estimator = structgp.load(files.model).set_params(decode="sequence")
    template = structgp.data.sources.templates.Template.parse(TEMPLATE)
    predicted = estimator.predict([template.expand(x) for x in files.X_test])
    assert out == columns(files.X_test, predicted, separator="\t")


def test_tag_reads_standard_input_and_several_files(files, monkeypatch):
    from_file = ok("tag", "-m", files.model, files.test).stdout
    assert ok("tag", "-m", files.model, stdin=files.test.read_bytes()).stdout == from_file
    both = ok("tag", "-m", files.model, files.test, files.bare).stdout
    assert both == from_file + ok("tag", "-m", files.model, files.bare).stdout
    # In chunks of three the answers are the same.
    monkeypatch.setattr(structgp.cli.tagging, "_CHUNK", 3)
    assert ok("tag", "-m", files.model, files.test).stdout == from_file


def test_tag_writes_a_file(files, write, tmp_path):
    output = write("tagged", "old")
    result = ok("tag", "-m", files.model, files.bare, "-o", output)
    assert (result.stdout, result.stderr) == ("", "")
    assert output.read_text() == ok("tag", "-m", files.model, files.bare).stdout
    # In place, too: the input is read before it is replaced.
    copy = write("copy", files.bare.read_bytes())
    ok("tag", "-m", files.model, copy, "-o", copy)
    assert copy.read_text() == output.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "tagged"]


def test_tag_of_nothing_is_nothing(files, write):
    assert ok("tag", "-m", files.model, stdin=b"\n\n").stdout == ""
    empty = write("empty", "")
    refused("tag", "-m", files.model, empty, says=[empty, "no tokens"])


def test_tag_answers_a_pipe_as_it_comes(files):
    """The first sequence is answered while the second is still to come."""
    command = [sys.executable, "-m", "structgp", "tag", "-m", str(files.model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        first, second = columns(files.X_test[:1]), columns(files.X_test[1:2])
        process.stdin.write(first.encode() + b"\n")
        process.stdin.flush()
        answer = [process.stdout.readline() for _ in first.strip().splitlines()]
        assert all(line.count(b"\t") == 2 for line in answer)
        rest, _ = process.communicate(second.encode())
    both = ok("tag", "-m", files.model, stdin=(first + "\n" + second).encode()).stdout
    assert (b"".join(answer) + rest).decode().split() == both.split()


def test_tabs_spaces_and_missing_blank_lines(files, write):
    text = "\n\n" + columns(files.X_test, separator=" \t ").rstrip("\n")
    expected = ok("tag", "-m", files.model, files.bare).stdout
    assert ok("tag", "-m", files.model, write("odd", text)).stdout == expected


def test_windows_line_ends(files, write, tmp_path):
    template = write("template", TEMPLATE.replace("\n", "\r\n"))
    train = write("train", columns(files.X, files.y, end="\r\n"))
    test = write("test", "\ufeff" + columns(files.X_test, files.y_test, end="\r\n"))
    ok("train", template, train, "-o", tmp_path / "model", *SMALL)
    result = ok("tag", "-m", tmp_path / "model", "-v2", test)
    expected = ok("tag", "-m", files.model, "-v2", files.test)
    assert result.stdout_bytes == expected.stdout_bytes
    assert b"\r" not in result.stdout_bytes
    table = ok("evaluate", "-m", tmp_path / "model", test).stdout
    assert table == ok("evaluate", "-m", files.model, files.test).stdout


JAPANESE = ["東京", "大学", "で", "、", "学ぶ", "\uff41", "ﾃﾞｰﾀ", "\u3000"]


def test_japanese_in_its_own_encoding(files, write, tmp_path):
    def translated(X):
        return [[(JAPANESE[int(a[1:])], b) for a, b in x] for x in X]

    X, X_test = translated(files.X), translated(files.X_test)
    names = {"L0": "O", "L1": "B-地名", "L2": "I-地名"}
    y = [[names[label] for label in labels] for labels in files.y]
    y_test = [[names[label] for label in labels] for labels in files.y_test]
    train = write("train", columns(X, y).encode("euc-jp"))
    test = write("test", columns(X_test, y_test).encode("euc-jp"))
    template = write("template", ("# 素性\n" + TEMPLATE).encode("euc-jp"))
    model = tmp_path / "model"
    euc = ("--encoding", "euc-jp")
    ok("train", template, train, "-o", model, *SMALL, *euc)
    out = ok("tag", "-m", model, test, *euc).stdout_bytes.decode("euc-jp")
    rows = [line.split("\t") for line in out.split("\n") if line]
    assert [row[0] for row in rows] == [token[0] for x in X_test for token in x]
    assert {row[-1] for row in rows} <= set(names.values())
    ok("tag", "-m", model, test, *euc, "-o", tmp_path / "out")
    assert (tmp_path / "out").read_bytes().decode("euc-jp") == out
    assert ok("tag", "-m", model, *euc, stdin=test.read_bytes()).stdout_bytes.decode("euc-jp") == out
    error = wrong_tokens(out) / len(rows)
    report = json.loads(ok("evaluate", "-m", model, test, "--json", *euc).stdout)["structgp"]
    assert report["token_error"] == pytest.approx(error)
    # The same text in UTF-8 is the same data.
    in_utf8 = write("utf8", columns(X_test, y_test))
    assert ok("tag", "-m", model, in_utf8).stdout == out

    line = refused("tag", "-m", model, test, says=[f"{test}:1", "not utf-8", "--encoding"])
    assert "euc" not in line
    refused("evaluate", "-m", model, test, says=[f"{test}:1", "not utf-8", "--encoding"])
    refused("train", files.template, train, "-o", tmp_path / "new", says=[f"{train}:1", "not utf-8"])
    refused("train", template, train, "-o", tmp_path / "new", says=[f"{template}:1", "not utf-8"])
    assert not (tmp_path / "new").exists()
    # Labels that the encoding of the output does not have.
    refused("tag", "-m", model, files.bare, "--encoding", "latin-1", "-o", tmp_path / "out",
            says=["latin-1", "utf-8"])  # fmt: skip
    assert (tmp_path / "out").read_bytes().decode("euc-jp") == out
    result = run("tag", "-m", model, files.bare, "--encoding", "latin-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("structgp: error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["klingon", "hex", "utf-99"])
def test_unknown_encoding(files, write, tmp_path, encoding):
    output = write("out", "old")
    says = [f"unknown encoding '{encoding}'", "--encoding"]
    model = tmp_path / "model"
    refused("tag", "-m", files.model, files.bare, "--encoding", encoding, says=says)
    refused("tag", "-m", files.model, "--encoding", encoding, says=says, stdin=b"a b\n")
    refused("tag", "-m", files.model, files.bare, "--encoding", encoding, "-o", output, says=says)
    refused("evaluate", "-m", files.model, files.test, "--encoding", encoding, says=says)
    refused("train", files.template, files.train, "-o", model, "--encoding", encoding, says=says)
    assert output.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# -- evaluate --------------------------------------------------------------------------------------


def wrong_tokens(out: str) -> int:
    rows = [line.split("\t") for line in out.split("\n") if line]
    return sum(row[-1] != row[-2] for row in rows)


def test_evaluate_agrees_with_the_tagged_file_counted_by_hand(files):
    out = ok("tag", "-m", files.model, files.test).stdout
    n = sum(map(len, files.y_test))
    report = json.loads(ok("evaluate", "-m", files.model, files.test, "--json").stdout)
    assert list(report) == ["structgp"]
    figures = report["structgp"]
    assert figures["token_error"] == pytest.approx(wrong_tokens(out) / n)
    assert 0 < figures["token_error"] < 0.6
    assert figures["n_tokens"] == n
    assert figures["n_sequences"] == len(files.y_test)
    # L0, L1, L2 are chunks of one token each.
    assert figures["span_f1"] == pytest.approx(1 - figures["token_error"])
    lines = ok("tag", "-m", files.model, "-v2", files.test).stdout.splitlines()
    log_probs = [
        np.log(float(dict(cell.rsplit("/", 1) for cell in cells[4:])[cells[2]]))
        for cells in (line.split("\t") for line in lines if "\t" in line)
    ]
    assert figures["token_nll"] == pytest.approx(-np.mean(log_probs), abs=1e-5)


def test_evaluate_prints_a_table(files):
    result = ok("evaluate", "-m", files.model, files.test)
    assert result.stderr == ""
    figures = json.loads(ok("evaluate", "-m", files.model, files.test, "--json").stdout)["structgp"]
    lines, details = (part.splitlines() for part in result.stdout.split("\n\n"))
    assert lines[0].split() == ["structgp"]
    assert details[0].split() == ["label", "precision", "recall", "F1", "support"]
    assert [line.split()[0] for line in details[1:]] == list(figures["by_label"])
    table = {line[:16].strip(): line[16:].strip() for line in lines[1:-1]}
    assert table == {
        "token error": f"{figures['token_error']:.2%}",
        "span F1": f"{figures['span_f1']:.2%}",
        "span precision": f"{figures['span_precision']:.2%}",
        "span recall": f"{figures['span_recall']:.2%}",
        "token NLL": f"{figures['token_nll']:.4f}",
        "sequence NLL": f"{figures['sequence_nll']:.3f}",
        "ECE (15 bins)": f"{figures['ece']:.4f}",
    }
    assert lines[-1] == f"({len(files.y_test)} sequences, {sum(map(len, files.y_test))} tokens)"


def test_evaluate_against_a_crf(files, monkeypatch):
    pytest.importorskip("pycrfsuite")
    # In this process and with one regulariser, to be quick; the rival has its own tests.
    quick = structgp.cli.scoring.LinearCRF

    def rival(n_jobs):
        assert n_jobs == -1
        return quick(c2=1.0)

    monkeypatch.setattr(structgp.cli.scoring, "LinearCRF", rival)
    arguments = ("evaluate", "-m", files.model, files.test, "--against", "crf")
    result = ok(*arguments, "--train", files.train)
    lines, details = (part.splitlines() for part in result.stdout.split("\n\n"))
    assert lines[0].split() == ["structgp", "linear", "CRF"]
    assert details[0].split() == ["label", "precision", "recall", "F1", "linear", "CRF", "F1", "support"]
    alone = ok("evaluate", "-m", files.model, files.test).stdout.split("\n\n")[0].splitlines()
    for line, other in zip(lines[1:-1], alone[1:-1], strict=True):
        assert line.startswith(other)
        assert len(line) == len(other) + 14
    reports = json.loads(ok(*arguments, "--train", files.train, "--json").stdout)
    assert list(reports) == ["structgp", "linear CRF"]
    assert reports["linear CRF"]["n_tokens"] == reports["structgp"]["n_tokens"]
    assert 0 < reports["linear CRF"]["token_error"] < 0.6


def test_against_needs_the_training_file(files):
    refused("evaluate", "-m", files.model, files.test, "--against", "crf",
            says=["--against", "--train"])  # fmt: skip


def test_the_training_file_alone_starts_no_rival(files, monkeypatch):
    monkeypatch.setattr(structgp.cli.scoring, "LinearCRF", None)
    result = ok("evaluate", "-m", files.model, files.test, "--train", files.train)
    assert result.stdout.splitlines()[0].split() == ["structgp"]


def test_a_label_never_seen_is_a_warning(files, write):
    y = [list(labels) for labels in files.y_test]
    y[0][0], y[1][0], y[2][0] = "NEW", "OTHER", "NEW"
    test = write("test", columns(files.X_test, y))
    result = ok("evaluate", "-m", files.model, test)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"structgp: warning: {test}: 3 tokens have labels")
    assert "(NEW, OTHER)" in line
    assert "token error" in result.stdout
    report = json.loads(ok("evaluate", "-m", files.model, test, "--json").stdout)["structgp"]
    assert report["n_unseen_tokens"] == 3
    wrong = wrong_tokens(ok("tag", "-m", files.model, test).stdout)
    assert report["token_error"] == pytest.approx(wrong / report["n_tokens"])


# -- mistakes in the data --------------------------------------------------------------------------


@pytest.mark.usefixtures("unfit")
def test_a_row_with_a_missing_column(files, write, tmp_path):
    lines = columns(files.X, files.y).splitlines()
    lines[7] = lines[7].rsplit(" ", 1)[0] if lines[7] else "v1 v2"
    broken = write("broken", "\n".join(lines))
    model, output = write("model", "old"), write("out", "old")
    says = [f"{broken}:8", "2 columns where line 1 has 3", "add the missing column"]
    refused("train", files.template, broken, "-o", model, says=says)
    refused("train", files.template, files.train, "--dev", broken, "-o", model, says=says)
    refused("evaluate", "-m", files.model, broken, says=says)
    refused("tag", "-m", files.model, broken, "-o", output, says=says)
    assert model.read_text() == output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "model", "out"]


def test_what_was_tagged_before_a_mistake_is_written(files, write, monkeypatch):
    monkeypatch.setattr(structgp.cli.tagging, "_CHUNK", 1)
    good = columns(files.X_test[:2])
    broken = write("broken", good + "v1\n")
    result = run("tag", "-m", files.model, broken)
    assert result.exit_code == 2
    assert result.stdout == ok("tag", "-m", files.model, write("good", good)).stdout
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.usefixtures("unfit")
def test_a_template_that_names_a_column_that_is_not_there(files, write, tmp_path):
    template = write("template", "U00:%x[0,0]\n\nU01:%x[-1,2]\nB\n")
    model = write("model", "old")
    refused(
        "train", template, files.train, "-o", model,
        says=[f"{template}:3", "%x[-1,2]", "columns 0 to 1 exist", files.train],
    )  # fmt: skip
    narrow = write("narrow", "v1 L0\nv2 L1\n")
    refused("train", files.template, narrow, "-o", model, says=[":3", "only column 0 exists", narrow])
    refused("evaluate", "-m", files.model, narrow, says=[narrow, "column"])
    assert model.read_text() == "old"


@pytest.mark.usefixtures("unfit")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("X00:%x[0,0]\n", [":1", "starts with 'X'", "start it with U"]),
        ("# fine\nU00:%x[0]\nB\n", [":2", "'%x[0]' is not a macro", "%x[row,column]"]),
        ("U00:%x[0,0]\nU01:%y[0,0]\n", [":2", "not a macro"]),
        ("U00:%x[0,0]\nB01:%x[0]\n", [":2", "'%x[0]' is not a macro"]),
        ("B\n", ["no U line", "add at least one"]),
        ("", ["no U line"]),
    ],
)
def test_template_syntax(files, write, tmp_path, text, says):
    template = write("template", text)
    refused("train", template, files.train, "-o", tmp_path / "model", says=[template, *says])
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("unfit")
@pytest.mark.parametrize("content", ["", "\n", " \n\t\n\n", "\ufeff\r\n"])
def test_an_empty_file(files, write, content):
    empty, model = write("empty", content), write("model", "old")
    says = [empty, "no tokens", "one token per line"]
    refused("train", files.template, empty, "-o", model, says=says)
    refused("train", files.template, files.train, "--dev", empty, "-o", model, says=says)
    refused("evaluate", "-m", files.model, empty, says=says)
    assert model.read_text() == "old"


@pytest.mark.usefixtures("unfit")
def test_bytes_that_are_not_in_the_encoding(files, write):
    good = columns(files.X, files.y).encode()
    lines = good.split(b"\n")
    lines[4] = b"caf\xe9 v1 L0"
    broken, model, output = (write("broken", b"\n".join(lines)), write("model", "old"), write("out", "old"))
    says = [f"{broken}:5", "not utf-8", "--encoding"]
    refused("train", files.template, broken, "-o", model, says=says)
    refused("evaluate", "-m", files.model, broken, says=says)
    refused("tag", "-m", files.model, broken, "-o", output, says=says)
    refused("tag", "-m", files.model, "-o", output, stdin=broken.read_bytes(), says=["<stdin>:5"])
    assert model.read_text() == output.read_text() == "old"


@pytest.mark.usefixtures("unfit")
def test_one_label_only(files, write):
    same = write("same", columns(files.X, [["O"] * len(y) for y in files.y]))
    model = write("model", "old")
    refused("train", files.template, same, "-o", model, says=[same, "same label, 'O'", "second label"])
    assert model.read_text() == "old"


@pytest.mark.usefixtures("unfit")
def test_one_column_only(files, write, tmp_path):
    tokens = write("tokens", "v1\nv2\n\nv3\n")
    command = ("train", files.template, tokens, "-o", tmp_path / "model")
    refused(*command, says=[f"{tokens}:1", "add the label"])
    says = [f"{tokens}:1", "1 column, but the model was trained on 2 and a label"]
    refused("evaluate", "-m", files.model, tokens, says=says)


def test_evaluate_needs_the_label(files):
    refused("evaluate", "-m", files.model, files.bare, says=[f"{files.bare}:1", "label"])


def test_tag_with_too_few_columns(files, write):
    narrow, output = write("narrow", "\nv1\nv2\n"), write("out", "old")
    says = [f"{narrow}:2", "trained on 2", "same columns as in training"]
    refused("tag", "-m", files.model, narrow, says=says)
    refused("tag", "-m", files.model, narrow, "-o", output, says=says)
    refused("tag", "-m", files.model, stdin=b"v1\n", says=["<stdin>:1"])
    assert output.read_text() == "old"


def test_files_that_are_not_there(files, tmp_path):
    none = tmp_path / "none"
    says = [none, "No such file", "check the path"]
    refused("train", none, files.train, "-o", tmp_path / "model", says=says)
    refused("train", files.template, none, "-o", tmp_path / "model", says=says)
    refused("tag", "-m", files.model, none, says=says)
    refused("evaluate", "-m", files.model, none, says=says)
    for command in ("tag", "evaluate"):
        refused(command, "-m", none, files.test, says=[none, "no such file", "check the path"])
    refused("tag", "-m", files.model, tmp_path, says=[tmp_path, "directory"])
    assert list(tmp_path.iterdir()) == []


# -- mistakes about places -------------------------------------------------------------------------


@pytest.mark.usefixtures("unfit")
def test_a_model_path_that_cannot_be_written_is_found_before_the_fit(files, write, tmp_path):
    file = write("file", "mine")
    missing, inside = tmp_path / "no" / "model", file / "model"
    refused("train", files.template, files.train, "-o", missing,
            says=[f" {missing}: cannot be written", "create its folder"])  # fmt: skip
    refused("train", files.template, files.train, "-o", inside,
            says=[f" {inside}: cannot be written", "existing folder"])  # fmt: skip
    refused("train", files.template, files.train, "-o", tmp_path,
            says=[f" {tmp_path}: cannot be written", "not a folder"])  # fmt: skip
    for odd in (".", "/"):
        refused("train", files.template, files.train, "-o", odd, says=[f" {odd}: cannot be written"])
    assert file.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_probe_leaves_everything_as_it_was(files, write, tmp_path):
    mine = [write(name, name) for name in ("model", "model.probe", "model.tmp")]
    refused("train", files.template, write("empty", ""), "-o", tmp_path / "model")
    assert [path.read_text() for path in mine] == ["model", "model.probe", "model.tmp"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk(files, write, tmp_path, monkeypatch, where):
    model, output = write("model", "old"), write("out", "old")
    monkeypatch.setattr(atomic.os, where, full)
    says = "cannot be written (No space left on device); free some space"
    result = run("train", files.template, files.train, "-o", model, *SMALL)
    assert result.exit_code == 2
    *before, last = result.stderr.splitlines()
    assert last.startswith(f"structgp: error: {model}: {says}")
    assert not [line for line in before if not line.startswith("step ")]
    refused("tag", "-m", files.model, files.bare, "-o", output, says=[f"{output}: {says}"])
    assert model.read_text() == output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_output_that_cannot_be_written(files, write, tmp_path):
    file = write("file", "mine")
    for path in (tmp_path / "no" / "out", file / "out", tmp_path):
        refused("tag", "-m", files.model, files.bare, "-o", path, says=[f"{path}: cannot be written"])
    assert file.read_text() == "mine"


@pytest.mark.parametrize("damage", ["empty", "cut", "tensor", "text", "folder"])
def test_a_damaged_model(files, write, tmp_path, damage):
    content = files.model.read_bytes()
    output = write("out", "old")
    if damage == "folder":
        model = tmp_path
    elif damage == "text":
        model = files.train
    else:
        changed = bytearray(content)
        changed[-5] ^= 1
        model = write("model", {"empty": b"", "cut": content[:-1], "tensor": bytes(changed)}[damage])
    refused("tag", "-m", model, files.bare, says=[f" {model}: "])
    refused("tag", "-m", model, files.bare, "-o", output, says=[f" {model}: "])
    refused("evaluate", "-m", model, files.test, says=[f" {model}: "])
    assert output.read_text() == "old"


def test_a_model_saved_from_python_has_no_template(files, tmp_path):
    estimator = StructuredGPClassifier(n_draws=2, posterior=Inducing(n_inducing=5)).fit(files.X, files.y)
    estimator.save(tmp_path / "model")
    for command in ("tag", "evaluate"):
        refused(command, "-m", tmp_path / "model", files.test,
                says=[tmp_path / "model", "without a feature template", "structgp train"])  # fmt: skip


# -- help ------------------------------------------------------------------------------------------


def test_help_names_every_command():
    text = ok("--help").stdout
    for name in main.commands:
        assert f"  {name} " in text
    assert text == ok("-h").stdout
    assert ok("--version").stdout.strip() == f"structgp, version {structgp.__version__}"


@pytest.mark.parametrize("name", main.commands)
def test_help_explains_every_option(name):
    command = main.commands[name]
    text = ok(name, "--help").stdout
    assert command.help.split()[0] in text
    assert f"Usage: main {name}" in text
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            for option in parameter.opts:
                assert option in text
            # Lines may break at any space or hyphen.
            assert "".join(parameter.help.split()) in "".join(text.split())
        else:
            assert (parameter.metavar or parameter.name).upper() in text


def test_usage_errors_are_clicks():
    for arguments in ([], ["train"], ["tag"], ["evaluate", "x"], ["nonsense"], ["tag", "-v3"]):
        assert run(*arguments).exit_code == 2


# -- as a program ----------------------------------------------------------------------------------

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
PROGRAM = [sys.executable, "-m", "structgp"]


def program(*arguments, **keywords):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], env=ENVIRONMENT, check=False, timeout=120, **keywords
    )


@pytest.mark.slow
def test_tag_in_a_pipe(files):
    done = program("tag", "-m", files.model, input=files.test.read_bytes(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == ok("tag", "-m", files.model, files.test).stdout


@pytest.mark.slow
def test_an_error_of_the_program_is_one_line(files):
    done = program("tag", "-m", files.train, input=b"", capture_output=True, text=False)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"structgp: error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_standard_output_on_a_full_disk(files):
    with open("/dev/full", "wb") as disk:
        done = program("tag", "-m", files.model, files.test, stdout=disk, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith(b"structgp: error: <stdout>: cannot be written (No space left")
    assert done.stderr.count(b"\n") == 1


def test_a_reader_that_goes_away(files, write):
    many = write("many", files.bare.read_bytes() * 300)
    with subprocess.Popen(
        [*PROGRAM, "tag", "-m", str(files.model), str(many)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_ctrl_c_keeps_what_has_been_reached(files, write, tmp_path):
    """Adam takes hundreds of steps here; the signal comes after the first."""
    data = generate(60, n_labels=3, n_values=8, n_templates=2, mean_length=10, seed=0)
    train, model = write("train", columns(data.X, data.y)), write("model", "old")
    arguments = ["train", files.template, train, "-o", model, "--inference", "adam"]
    with subprocess.Popen(
        [*PROGRAM, *map(str, arguments)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("step 1:"):
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, lines
    assert "stopping after this step; press Ctrl-C again to abort" in lines
    assert "interrupted after" in lines[-2]
    assert lines[-1] == f"wrote {model}"
    assert structgp.load(model).training_log_["stopped"] == "interrupted"
    assert ok("tag", "-m", model, files.bare).stdout.count("\t") == 2 * sum(map(len, files.X_test))


@pytest.mark.slow
@pytest.mark.held_out
def test_demo(tmp_path):
    """One screen, on which the model is ahead of the CRF, or level in the error of tokens, since it chooses
    labels for the F1 of spans; and a page."""
    page = tmp_path / "page.html"
    result = ok("demo", "3 ripe figs, halved", "-o", page)
    lines = result.stdout.replace(str(page), "page.html").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    table = lines[lines.index("on the test lines       structgp  linear CRF") + 1 :][:4]
    scores = {line[:20].strip(): [float(v.strip("%")) for v in line[20:44].split()] for line in table}
    assert set(scores) == {"token error", "span F1", "NLL per token", "calibration error"}
    assert scores["token error"][0] < scores["token error"][1] + 0.5
    assert scores["span F1"][0] > scores["span F1"][1]
    for name in ("NLL per token", "calibration error"):
        assert scores[name][0] < scores[name][1]
    assert sum("% with probability 90%" in line for line in lines) == 2
    assert re.search(r"\n  figs +B-NAME +0\.\d\d", result.stdout)
    assert result.stdout.count("  whole line 0.") == 3
    assert f"Open {page} in a browser" in result.stdout
    assert page.read_bytes().startswith(b"<!DOCTYPE html>")


def test_the_demo_says_at_once_what_it_cannot_do(tmp_path):
    refused("demo", "-o", tmp_path / "none" / "page.html", says=["none"])
    refused("demo", " ", says=["LINE: no words"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_table_of_evaluate(files):
    command = [sys.executable, "-m", "structgp", "evaluate", "-m", str(files.model), str(files.test)]
    with open("/dev/full", "wb") as full_disk:
        result = subprocess.run(command, stdout=full_disk, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("structgp: error: output: No space left on device; ")


def test_a_seed_too_large(files, tmp_path):
    model = tmp_path / "model"
    arguments = ("train", files.template, files.train, "-o", model, "--seed", "9" * 20)
    refused(*arguments, says=["random_state", "whole number"])
    assert not model.exists()


# -- likelihoods and inference ---------------------------------------------------------------------


def trained(files, path, *options):
    ok("train", files.template, files.train, "-o", path, *options)
    return structgp.load(path)


def test_train_with_the_piecewise_likelihood(files, tmp_path):
    model = trained(files, tmp_path / "model", *SMALL, "--structure", "piecewise")
    assert model.get_params()["structure"] == structgp.piecewise()
    assert model.training_log_["optimizer"] == "second-order"
    chain = structgp.load(files.model)
    assert chain.get_params()["structure"] == structgp.chain()
    assert model.training_log_["elbo"] != chain.training_log_["elbo"]
    out = ok("tag", "-m", tmp_path / "model", files.test).stdout
    assert wrong_tokens(out) < wrong_tokens(ok("tag", "-m", files.model, files.test).stdout) + 12


def test_train_with_natural_gradients(files, tmp_path):
    model = trained(files, tmp_path / "model", *SMALL, "--inference", "natural")
    assert model.training_log_["optimizer"] == "natural"
    assert model.training_log_["gradient"] == "pathwise"
    assert model.training_log_["reason"].startswith("asked for")
    ok("evaluate", "-m", tmp_path / "model", files.test)


def test_every_inference_can_be_asked_for():
    (option,) = (p for p in main.commands["train"].params if p.name == "inference")
    assert tuple(option.type.choices) == structgp.plan.options.INFERENCE
    assert structure_files.NAMED.keys() == structgp.structures.choose.NAMED.keys()


def test_inducing_inputs_are_left_to_the_estimator(files, tmp_path, monkeypatch):
    """Without --inducing its own default, or the preset's, is in force."""
    seen = []
    original = StructuredGPClassifier.fit

    def watched(self, *args, **kwargs):
        seen.append(self.posterior)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StructuredGPClassifier, "fit", watched)
    monkeypatch.setattr(structgp.plan.choices, "N_INDUCING", 11)
    monkeypatch.setattr(structgp.plan.choices, "ALL_TOKENS_WORK", 0.0)
    model = trained(files, tmp_path / "model", "--kernel", "template")
    assert seen == ["auto"]
    assert model.training_log_["n_inducing"] == 11
    trained(files, tmp_path / "model", "--inducing", "9")
    assert seen == ["auto", Inducing(9)]


@pytest.mark.held_out
def test_the_weight_of_the_data(files, tmp_path, monkeypatch):
    for name in ("N_FOLDS", "MOST_FOLDS"):
        monkeypatch.setattr(f"structgp.plan.held_out.{name}", 2)
    monkeypatch.setattr("structgp.plan.trials.LARGEST_WEIGHT", 2.0)
    train = ("train", files.template, files.train, "-o", tmp_path / "model")
    chosen = ok(*train)
    verdict = structgp.load(tmp_path / "model").held_out_["verdict"]
    counts = r"^each sequence counts (once|[\d.]+ times), chosen by cross-validation: on new data, expect"
    assert re.search(counts + r" .* folds\)\. Confidence", chosen.stderr, re.M)
    assert verdict in chosen.stderr
    assert chosen.stderr.startswith("choosing how often sequences count, by cross-validation: try 1 (")
    assert re.search(r"steps, [\d.]+ s \([\d.]+ s with cross-validation\); \d+ effective", chosen.stderr)
    described = ok("describe", tmp_path / "model").stdout
    assert verdict in described
    assert re.search(r"^evidence lower bound\n  -[\d.]+ on the draws of the fit, -", described, re.M)
    assert "cross-validation" not in ok(*train, "--data-weight", "2").stderr
    assert structgp.load(tmp_path / "model").prior.data_weight == 2.0
    for wrong in ("0", "-1", "much"):
        refused(*train, "--data-weight", wrong, says=["--data-weight: must be a number above 0"])


def test_unknown_structures_are_refused(files, tmp_path):
    given = ("train", files.template, files.train, "-o", tmp_path / "m", "--structure", "tree")
    refused(*given, says=["--structure: 'tree' is not known; use chain or piecewise, or a file"])


def test_describe(tmp_path):
    made = generate(8, n_labels=3, mean_length=4, n_templates=2, n_values=5, seed=0)
    StructuredGPClassifier(n_draws=4).fit(made.X, made.y).save(tmp_path / "model")
    result = run("describe", tmp_path / "model")
    assert result.exit_code == 0, result.output
    plan = " ".join(result.stdout.split())
    assert "optimizer second-order (the structure gives its curvature)" in plan
    assert "template weights (prior variance)" in result.stdout
    assert "transitions (mean, sd)" in result.stdout
    missing = run("describe", tmp_path / "none")
    assert missing.exit_code == 2
    assert "no such file" in missing.stderr
