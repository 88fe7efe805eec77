"""Beyond labels: the n best, known labels, constraints, what to label next, going on."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner

import structgp
from structgp import StructuredGPClassifier, metrics
from structgp.cli import main
from structgp.data.corpora import recipes
from structgp.data.sources.templates import Template
from structgp.inference import checkpoint
from structgp.inference.loop import Watch

N = 40


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def ok(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr or result.exception
    return result


def fails(*arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2, result.exception
    (line,) = [s for s in result.stderr.splitlines() if s.startswith("structgp: error")]
    assert says in line


def write(path, X, y=None):
    blocks = [
        "".join(" ".join((*row, *([y[i][t]] if y else []))) + "\n" for t, row in enumerate(x))
        for i, x in enumerate(X)
    ]
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus():
    return recipes()


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    (folder / "template").write_text(corpus.template.text, encoding="utf-8")
    write(folder / "train", corpus.X_train[:N], corpus.y_train[:N])
    write(folder / "pool", corpus.X_train[N : N + 25])
    write(folder / "test", corpus.X_test[:20], corpus.y_test[:20])
    ok("train", folder / "template", folder / "train", "-o", folder / "model", "--scheme", "bio")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return structgp.load(folder / "model")


def blocks(text):
    return [block.splitlines() for block in text.strip("\n").split("\n\n")]


def expand(corpus, X):
    return [corpus.template.expand(x) for x in X]


def test_the_n_best_as_crf_test_lays_them_out(folder, model, corpus):
    found = blocks(ok("tag", "-m", folder / "model", "-n", 3, folder / "test").stdout)
    expected = []
    for x, best in zip(
        corpus.X_test, model.predict_n_best(expand(corpus, corpus.X_test[:20]), 3), strict=False
    ):
        for rank, (labels, p) in enumerate(best):
            expected.append([f"# {rank} {p:.6f}", *labels])
            assert len(x) == len(labels)
    shown = [[head, *(line.split("\t")[-1] for line in lines)] for head, *lines in found]
    assert shown == expected
    one = blocks(ok("tag", "-m", folder / "model", "-n", 1, "-v", 1, folder / "test").stdout)
    assert all(line.split("\t")[-1].count("/") == 1 for _, *lines in one for line in lines)
    fails("tag", "-m", folder / "model", "-n", 2, "--decode", "f1", folder / "test", says="--decode")


def test_no_labelling_breaks_the_scheme(folder):
    for options in ([], ["--decode", "sequence"], ["-n", 4]):
        for block in blocks(ok("tag", "-m", folder / "model", *options, folder / "pool").stdout):
            labels = ["O", *(line.split("\t")[-1] for line in block if not line.startswith("#"))]
            for before, after in itertools.pairwise(labels):
                if after.startswith("I-"):
                    assert before[:1] in "BI"
                    assert before[2:] == after[2:]


def test_labels_in_the_file_are_kept(folder, corpus, tmp_path):
    y = [["?"] * len(labels) for labels in corpus.y_test[:20]]
    for labels in y:
        labels[-1] = "O"
    given = write(tmp_path / "given", corpus.X_test[:20], y)
    for block in blocks(ok("tag", "-m", folder / "model", "--force", given).stdout):
        assert block[-1].split("\t")[-2:] == ["O", "O"]
    free = ok("tag", "-m", folder / "model", given).stdout
    assert any(block[-1].split("\t")[-1] != "O" for block in blocks(free))
    # The probability of the labelling is given what is known: with all of it known it is 1.
    whole = ok("tag", "-m", folder / "model", "--force", "-v", 1, folder / "train").stdout
    assert all(block[0] == "# 1.000000" for block in blocks(whole))


def test_forced_labels_have_to_be_known(folder, corpus, tmp_path):
    fails("tag", "-m", folder / "model", "--force", folder / "pool", says="pool:1: no label column")
    y = [["?", *labels[1:]] for labels in corpus.y_test[:2]]
    y[1][1] = "B-NONE"
    given = write(tmp_path / "given", corpus.X_test[:2], y)
    line = len(y[0]) + 3
    fails("tag", "-m", folder / "model", "--force", given, says=f"given:{line}: 'B-NONE' is not a label")
    other = write(tmp_path / "other", corpus.X_test[:1], [["_"] * len(corpus.y_test[0])])
    assert (
        ok("tag", "-m", folder / "model", "--force", "--missing", "_", other).stdout.count("\n")
        == len(corpus.y_test[0]) + 1
    )


def test_scores_from_the_output_are_those_of_evaluate(folder):
    """As conlleval reads them: the last two columns are truth and answer."""
    rows = [
        [line.split("\t")[-2:] for line in block]
        for block in blocks(ok("tag", "-m", folder / "model", folder / "test").stdout)
    ]
    truth, answer = ([[row[i] for row in block] for block in rows] for i in (0, 1))
    spans = metrics.span_scores(truth, answer)
    found = json.loads(ok("evaluate", "-m", folder / "model", folder / "test", "--json").stdout)
    found = found["structgp"]
    assert found["span_f1"] == pytest.approx(spans.f1)
    assert found["span_precision"] == pytest.approx(spans.precision)
    assert found["span_recall"] == pytest.approx(spans.recall)
    assert found["token_error"] == pytest.approx(metrics.token_error(truth, answer))


def test_next_writes_what_to_label(folder, model, corpus):
    result = ok("next", "-m", folder / "model", folder / "pool", "-n", 4, "--strategy", "bald")
    X = expand(corpus, corpus.X_train[N : N + 25])
    chosen = structgp.select(model, X, 4, "bald")
    labels = model.predict([X[i] for i in chosen])
    expected = [
        ["\t".join((*row, label)) for row, label in zip(corpus.X_train[N + i], y, strict=True)]
        for i, y in zip(chosen, labels, strict=True)
    ]
    assert blocks(result.stdout) == expected
    starts = [1 + sum(len(x) + 1 for x in X[:i]) for i in chosen]
    assert result.stderr.splitlines() == [f"{folder / 'pool'}:{line}" for line in starts]


def test_tokens_without_a_label_train_too(folder, corpus, tmp_path):
    y = [[label if t % 3 else "?" for t, label in enumerate(labels)] for labels in corpus.y_train[:N]]
    y[0] = ["?"] * len(y[0])
    some = write(tmp_path / "some", corpus.X_train[:N], y)
    result = ok("train", folder / "template", some, "-o", tmp_path / "m", "--missing", "?")
    assert "1 of 40 sequences have no label at all" in result.stderr
    assert "?" not in structgp.load(tmp_path / "m").classes_
    nothing = write(tmp_path / "none", corpus.X_train[:2], [["?"] * len(x) for x in corpus.X_train[:2]])
    fails(
        "train", folder / "template", nothing, "-o", tmp_path / "m", "--missing", "?",
        says="every token has no label",
    )  # fmt: skip


def test_forbidden_pairs_and_weights_of_labels(folder, tmp_path):
    ok(
        "train", folder / "template", folder / "train", "-o", tmp_path / "m", "--forbid", "^", "O",
        "--class-weight", "O=0.5", "--class-weight", "B-NAME=2",
    )  # fmt: skip
    found = structgp.load(tmp_path / "m")
    assert found.constraints == {"forbidden": [[None, "O"]]}
    assert found.class_weight == {"O": 0.5, "B-NAME": 2.0}
    assert not found.model_.constraints.starts[list(found.classes_).index("O")]
    train = folder / "template", folder / "train", "-o", tmp_path / "m"
    fails("train", *train, "--forbid", "^", "X", says="'X' is not a label")
    fails("train", *train, "--forbid", "^", "O", "--scheme", "bio", says="--forbid")
    fails("train", *train, "--class-weight", "O", says="--class-weight")
    fails("train", *train, "--class-weight", "X=2", says="'X' is not a label")
    fails("train", *train, "--scheme", "bilou2", says="is not a scheme")
    fails("train", *train, "--early-stopping", says="--early-stopping")


def test_early_stopping_looks_at_the_dev_file(folder, tmp_path, monkeypatch):
    looks, enough = [], Watch.enough
    monkeypatch.setattr(Watch, "enough", lambda self: looks.append(1) or enough(self))
    result = ok(
        "train", folder / "template", folder / "train", "-o", tmp_path / "m", "--dev", folder / "test",
        "--early-stopping",
    )  # fmt: skip
    assert len(looks) == len(structgp.load(tmp_path / "m").training_log_["trace"])
    assert "token error" in result.stdout


def test_a_killed_run_goes_on(folder, tmp_path, monkeypatch):
    """Ended after its second step, it goes on with the third, to the model that it would have been."""
    monkeypatch.setattr(checkpoint.Checkpoint, "seconds", 0.0)
    monkeypatch.setattr(checkpoint.Checkpoint.__init__, "__defaults__", (0.0,))
    train = "train", folder / "template", folder / "train", "-o"
    whole = ok(*train, tmp_path / "whole", "--scheme", "bio")
    fit = StructuredGPClassifier.fit

    def killed(self, *arguments, callback=None, **options):
        def watch(info):
            callback(info)
            if info.iteration == 2:
                raise MemoryError

        return fit(self, *arguments, callback=watch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(StructuredGPClassifier, "fit", killed)
        assert isinstance(run(*train, tmp_path / "m", "--scheme", "bio").exception, MemoryError)
    assert (tmp_path / "m.checkpoint").exists()
    fails(*train, tmp_path / "m", says="of other data or other parameters; use --restart")
    again = ok(*train, tmp_path / "m", "--scheme", "bio")
    assert again.stderr.splitlines()[0].startswith("continuing from ")
    assert again.stderr.splitlines()[1].startswith("step 3: ")
    assert again.stderr.splitlines()[1] == whole.stderr.splitlines()[2]
    assert not (tmp_path / "m.checkpoint").exists()
    tag = [ok("tag", "-m", tmp_path / name, "-v2", folder / "test").stdout for name in ("whole", "m")]
    assert tag[0] == tag[1]


def test_restart_forgets_the_checkpoint(folder, tmp_path):
    (tmp_path / "m.checkpoint").write_text("of something else")
    train = "train", folder / "template", folder / "train", "-o", tmp_path / "m"
    fails(*train, says="m.checkpoint: no checkpoint")
    assert ok(*train, "--restart").stderr.startswith("step 1: ")


def test_the_template_of_a_model_is_what_it_was(folder, corpus):
    assert structgp.load(folder / "model").model_.extra["template"] == corpus.template.text
    assert Template.parse(corpus.template.text).unigrams


def test_what_next_writes_of_a_labelled_pool_can_be_trained_on(folder, tmp_path):
    chosen = ok("next", "-m", folder / "model", folder / "test", "-n", 3).stdout
    (tmp_path / "more").write_text((folder / "train").read_text() + "\n" + chosen)
    ok("train", folder / "template", tmp_path / "more", "-o", tmp_path / "m")


def test_next_of_crfsuites_files_keeps_the_attributes(tmp_path):
    lines = ["A\tx=1\tn\\:1:0.5", "B\ty", "", "B\ty\tx=1", "A\tx=2", "", "A\tx=2", "B\ty:2.5", ""]
    (tmp_path / "train").write_text("\n".join(lines))
    ok("train", "--format", "crfsuite", tmp_path / "train", "-o", tmp_path / "m")
    found = ok("next", "-m", tmp_path / "m", tmp_path / "train", "-n", 3).stdout
    rest = sorted(line.split("\t", 1)[1] for line in found.splitlines() if line)
    assert rest == sorted(line.split("\t", 1)[1] for line in lines if line)


def test_errors_of_forced_labels_name_the_line(folder, corpus, tmp_path):
    y = [["?"] * len(x) for x in corpus.X_test[:3]]
    y[2][0] = "I-NAME"
    given = write(tmp_path / "given", corpus.X_test[:3], y)
    line = sum(len(x) + 1 for x in corpus.X_test[:2]) + 1
    fails("tag", "-m", folder / "model", "--force", given, says=f"given:{line}: no labelling")


def test_labels_missing_where_all_are_needed(folder, corpus, tmp_path):
    y = [["?", *labels[1:]] for labels in corpus.y_train[:N]]
    some = write(tmp_path / "some", corpus.X_train[:N], y)
    train = "train", folder / "template", some, "-o", tmp_path / "m", "--missing", "?"
    fails(*train, "--dev", some, says="40 tokens have no label ('?')")
    ok(*train)
    fails("evaluate", "-m", tmp_path / "m", some, says="40 tokens have no label ('?')")
    fails(
        "evaluate", "-m", tmp_path / "m", folder / "test", "--against", "crf", "--train", some,
        says="40 tokens have no label",
    )  # fmt: skip


def test_a_labelling_that_is_forbidden_is_told(folder, corpus, tmp_path):
    y = [["I-NAME", *labels[1:]] for labels in corpus.y_test[:2]]
    given = write(tmp_path / "given", corpus.X_test[:2], y)
    assert "the constraints forbid" in ok("evaluate", "-m", folder / "model", given).stderr


@pytest.mark.parametrize("command", ["tag", "evaluate", "next", "report"])
def test_every_answer_is_computed_where_it_is_asked_for(folder, tmp_path, command):
    """The device 'nowhere' is one that no machine has."""
    words = {
        "tag": ["-m", folder / "model", folder / "pool"],
        "evaluate": ["-m", folder / "model", folder / "test"],
        "next": ["-m", folder / "model", folder / "pool", "-n", 2],
        "report": [folder / "model", folder / "test", "-o", tmp_path / "page.html"],
    }[command]
    assert ok(command, *words).stdout == ok(command, *words, "--device", "cpu").stdout
    fails(command, *words, "--device", "nowhere", says="'nowhere' cannot be used here")


def test_expected_scores_of_an_unlabelled_file(folder, corpus):
    told, model = ok("expect", folder / "model", folder / "pool").stdout, structgp.load(folder / "model")
    error = model.expected_scores([corpus.template.expand(x) for x in corpus.X_train[N : N + 25]]).error
    assert f"token error     {error.mean:>10.2%}   {error.low:.2%} to {error.high:.2%}" in told
    assert "(25 sequences, " in told
    labelled = ok("expect", folder / "model", folder / "test", "--json", "--level", "0.5").stdout
    assert json.loads(labelled)["level"] == 0.5
    fails(
        "expect", folder / "model", folder / "pool", "--level", "5", says="--level: must be between 0 and 1"
    )


def test_sets_of_a_calibrated_model(folder, corpus):
    fails(
        "tag",
        "-m",
        folder / "model",
        folder / "pool",
        "--coverage",
        "0.8",
        says="the model is not calibrated",
    )
    ok("calibrate", folder / "model", folder / "test", "-o", folder / "calibrated")
    told = ok("tag", "-m", folder / "calibrated", folder / "pool", "--coverage", "0.8").stdout
    sets = [line.split("\t")[-1].split("|") for line in told.splitlines() if line]
    model = structgp.load(folder / "calibrated")
    X = [corpus.template.expand(x) for x in corpus.X_train[N : N + 25]]
    assert sets == [held for tokens in model.predict_sets(X, 0.8) for held in tokens]
    assert model.predict(X) == structgp.load(folder / "model").predict(X)
    few = "--coverage: 20 calibration sequences are too few for a coverage of 0.99; calibrate with at least"
    fails("tag", "-m", folder / "calibrated", folder / "pool", "--coverage", "0.99", says=few)
    fails(
        "tag",
        "-m",
        folder / "calibrated",
        folder / "pool",
        "--coverage",
        "0.8",
        "-v1",
        says="--coverage: cannot",
    )
    fails("calibrate", folder / "model", folder / "template", says="template")


def test_labels_left_to_a_person_are_filled_in_by_force(folder, tmp_path):
    """What --defer writes for them is what --force reads as missing."""
    told = ok("tag", "-m", folder / "model", folder / "pool", "--defer", "0.3").stdout
    labels = [line.split("\t")[-1] for line in told.splitlines() if line]
    sure = ok("tag", "-m", folder / "model", folder / "pool", "-v1").stdout
    pairs = [line.split("\t")[-1].rsplit("/", 1) for line in sure.splitlines() if "/" in line]
    assert labels == [label if 1 - float(p) <= 0.3 else "?" for label, p in pairs]
    assert 0 < labels.count("?") < len(labels)
    (tmp_path / "left").write_text(told)
    again = ok("tag", "-m", folder / "model", tmp_path / "left", "--force", "--defer", "0.3", "-v1").stdout
    kept = [line.split("\t")[-1] for line in again.splitlines() if "/" in line]
    assert all(
        now.startswith(f"{label}/1.0") for now, label in zip(kept, labels, strict=True) if label != "?"
    )
    fails(
        "tag", "-m", folder / "model", folder / "pool", "--defer", "0.3", "-n", "2", says="--defer: cannot"
    )
