"""The commands on what people have: numbers, word vectors, CRFsuite's files, Wapiti's patterns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import structgp
import structgp.cli.scoring
from structgp import InputError
from structgp.answers import encoded
from structgp.cli import main
from structgp.cli.shared import in_files
from structgp.data.sources import AttributeReader, Template, WordVectors, read_columns
from structgp.structures import chain

TEMPLATE = "U00:%x[0,0]\nU01:%x[0,2]\nB\n"
PATTERNS = '# words\nu:%x[0,0]\n*:%X[-1,0]\nu:%t[0,0,"^u"]\nb\n'
SMALL = ("--inducing", "30")
N_WORDS = 40


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
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"structgp: error: \S.*: .+; .+", line)
    for part in says:
        assert str(part) in line, (part, line)
    assert result.stdout == ""
    return line


def corpus(n, words, seed):
    """Rows of word, number, noise and label: the word's vector makes an A, else the number B or C."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(n):
        rows = []
        for _ in range(rng.integers(2, 6)):
            word, number = int(rng.choice(words)), rng.normal(200, 50)
            label = "A" if word % 2 else "B" if abs(number - 200) < 30 else "C"
            rows.append((f"w{word}", f"{number:.2f}", f"n{rng.integers(9)}", label))
        sequences.append(rows)
    return sequences


def as_columns(sequences):
    return "".join("".join(" ".join(row) + "\n" for row in rows) + "\n" for rows in sequences)


def as_attributes(sequences):
    """Words as attributes, a colon in each; how far the number is from 200 as a value."""

    def line(word, number, noise, label):
        return f"{label}\tw\\:{word}\t{noise}\tfar:{abs(float(number) - 200) / 50}\n"

    return "".join("".join(line(*row) for row in rows) + "\n" for rows in sequences)


class Files:
    """A folder with all kinds of files. The test file has words that training never saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sequences = corpus(60, range(N_WORDS // 2), 0)
        self.test_sequences = corpus(25, range(N_WORDS), 1)
        self.template = self.write("template", TEMPLATE)
        self.patterns = self.write("patterns", PATTERNS)
        self.train = self.write("train", as_columns(self.sequences))
        self.test = self.write("test", as_columns(self.test_sequences))
        self.bare = self.write(
            "bare", as_columns([[row[:-1] for row in rows] for rows in self.test_sequences])
        )
        self.attributes = self.write("train.crfsuite", as_attributes(self.sequences))
        self.test_attributes = self.write("test.crfsuite", as_attributes(self.test_sequences))
        rng = np.random.default_rng(2)
        # The first two words have none.
        lines = [
            f"w{i} {(1 if i % 2 else -1) * 3 + rng.normal():.3f} {rng.normal():.3f}"
            for i in range(2, N_WORDS)
        ]
        self.vectors = self.write("vectors", "\n".join([f"{len(lines)} 2", *lines]) + "\n")
        self.model = folder / "model"
        self.trained = ok(
            "train", self.template, self.train, "-o", self.model, *SMALL,
            "--numeric", 1, "--vectors", self.vectors,
        )  # fmt: skip

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content)
        return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str) -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return write


@pytest.fixture
def unfit(monkeypatch):
    """No fit may be asked for."""

    def never(*_, **__):
        raise AssertionError("a fit was started")

    monkeypatch.setattr(structgp.StructuredGPClassifier, "fit", never)


def error_on(model, test, *options):
    text = ok("evaluate", "-m", model, test, "--json", *options).stdout
    return json.loads(text)["structgp"]["token_error"]


# -- numbers and word vectors ----------------------------------------------------------------------


def covered(words, n_upper=0):
    n, missing = len(words), sum(word.lower() in ("w0", "w1") for word in words)
    ways = f"{n - missing - n_upper} as written, {n_upper} in lower case"
    return f"{1 - missing / n:.1%} of {n} tokens have a vector ({ways}), {missing} get zeros"


def test_how_many_tokens_have_a_vector(files, write):
    words = [row[0] for rows in files.sequences for row in rows]
    assert f"{files.vectors}: {covered(words)}\n" in files.trained.stderr
    assert f"word vectors\n  {covered(words)} (training)\n" in ok("describe", files.model).stdout
    missing = sum(word in ("w0", "w1") for word in words)
    counts = {"as_written": len(words) - missing, "lower_case": 0, "missing": missing}
    assert structgp.load(files.model).training_log_["vectors"] == counts


def test_words_are_looked_up_in_lower_case(files, write):
    rows = [[(row[0].upper(), *row[1:3]) for row in rows] for rows in files.test_sequences]
    shouted = write("shouted", as_columns(rows))
    words = [row[0] for found in rows for row in found]
    n_upper = sum(word not in ("W0", "W1") for word in words)
    result = ok("tag", "-m", files.model, shouted, files.bare)
    assert result.stderr == (
        f"{shouted}: {covered(words, n_upper)}\n{files.bare}: {covered([word.lower() for word in words])}\n"
    )
    # A word that training never saw has a feature of its own; its vector is the same.
    unseen = [int(word[1:]) >= N_WORDS // 2 for word in words] * 2
    labels = np.array([line.split("\t")[-1] for line in result.stdout.splitlines() if line])
    one, other = np.split(labels, 2)
    assert np.mean((one == other)[unseen[: len(words)]]) > 0.8
    assert "have a vector" in ok("next", "-m", files.model, shouted, "-n", 1).stderr


def test_numbers_and_vectors_are_worth_having(files, tmp_path):
    ok("train", files.template, files.train, "-o", tmp_path / "plain", *SMALL)
    assert error_on(files.model, files.test) < 0.2
    assert error_on(tmp_path / "plain", files.test) > 0.35


def test_the_model_reads_columns_as_python_would(files):
    model = structgp.load(files.model)
    assert [block.kind for block in model.model_.encoder.blocks] == ["categorical", "dense"]
    assert model.model_.encoder.vectors == {"numeric": 1, "vector": 2}
    vectors, template = WordVectors(files.vectors), Template.parse(TEMPLATE)
    numbers = [float(row[1]) for rows in files.sequences for row in rows]
    known = [vectors[row[0]] for rows in files.sequences for row in rows if row[0] in vectors]
    length = np.sqrt(np.mean(np.sum(np.square(known), 1)))
    X = [
        [
            {
                "0": strings[0],
                "1": strings[1],
                "numeric": np.array([(float(row[1]) - np.mean(numbers)) / np.std(numbers)]),
                "vector": vectors[row[0]] / length,
            }
            for strings, row in zip(template.expand(rows), rows, strict=True)
        ]
        for rows in files.test_sequences
    ]
    expected = [label for labels in model.predict(X) for label in labels]
    for path in (files.test, files.bare):
        lines = ok("tag", "-m", files.model, path).stdout.splitlines()
        assert [line.split("\t")[-1] for line in lines if line] == expected
    truth = [row[-1] for rows in files.test_sequences for row in rows]
    wrong = np.mean(np.array(expected) != np.array(truth))
    assert error_on(files.model, files.test) == pytest.approx(wrong)


def test_tag_lays_out_the_columns_as_ever(files):
    lines = ok("tag", "-m", files.model, "-v2", files.bare).stdout.splitlines()
    assert re.fullmatch(r"# 0\.\d{6}", lines[0])
    word, number, noise = files.test_sequences[0][0][:3]
    pattern = rf"{word}\t{number}\t{noise}\t[ABC]/[01]\.\d+\tA/\S+\tB/\S+\tC/\S+"
    assert re.fullmatch(pattern, lines[1])


def test_a_long_sequence_is_named_by_its_line(files, write, monkeypatch):
    """In the second of two chunks too."""
    row = "w1 200 n1"
    text = "\n\n".join([row] * 250 + ["\n".join([row] * 60), row]) + "\n"
    long = write("long", text)
    monkeypatch.setattr(encoded, "MOST_SCORES", 3 * 16 * 70)
    found = ok("tag", "-m", files.model, "-v", 1, long)
    warning = next(line for line in found.stderr.splitlines() if "warning" in line)
    place = re.escape(f"{long}:501: an example of 60 tokens; its answers average over 18 draws")
    assert re.match(f"structgp: warning: {place}", warning)
    monkeypatch.setattr(encoded, "MOST_SCORES", 3 * 16 * 50)
    for command in ("tag", "-v", 1, "-m"), ("expect",):
        said = run(*command, files.model, long).stderr.splitlines()[-1]
        assert said.startswith(f"structgp: error: {long}:501: an example of 60 tokens would take too much")


def test_places_in_files():
    places = [("f", 3), ("g", 8)]
    for has_token_lines, expected in (False, "g:8, node 2.x"), (True, "g:10.x"):
        with pytest.raises(InputError) as error, in_files(places, has_token_lines):
            raise InputError("X[1][2].x", "wrong", "mend it")
        assert error.value.place == expected
    with pytest.raises(InputError, match=r"^X\[2\]: "), in_files(places):
        raise InputError("X[2]", "wrong", "mend it")


def test_only_numbers(files, tmp_path):
    options = ("--numeric", 1, "--numeric", 1, "--dev", files.test)
    result = ok("train", files.template, files.train, "-o", tmp_path / "m", *SMALL, *options)
    assert "warning" not in result.stderr
    model = structgp.load(tmp_path / "m").model_
    assert model.encoder.vectors == {"numeric": 1}
    assert "vectors" not in model.extra
    assert result.stdout == ok("evaluate", "-m", tmp_path / "m", files.test).stdout


def test_vectors_of_another_column(files, tmp_path):
    train = [[(row[2], row[1], row[0], row[3]) for row in rows] for rows in files.sequences]
    path = tmp_path / "train"
    path.write_text(as_columns(train))
    options = ("--vectors", files.vectors, "--vector-column", 2)
    ok("train", files.template, path, "-o", tmp_path / "m", *SMALL, *options)
    assert structgp.load(tmp_path / "m").model_.extra["vectors"]["column"] == 2


def test_a_kernel_for_the_templates(files, tmp_path):
    options = ("--numeric", 1, "--kernel", "template", "--inference", "natural")
    ok("train", files.template, files.train, "-o", tmp_path / "m", *SMALL, *options)
    assert structgp.load(tmp_path / "m").kernel == {"categorical": "template"}


def test_many_templates_stay_templates(files, write, tmp_path):
    template = write("template", "".join(f"U{i}:%x[0,{i % 3}]{i}\n" for i in range(70)))
    train = write("train", as_columns(files.sequences[:8]))
    ok("train", template, train, "-o", tmp_path / "m", "--inducing", 5, "--numeric", 1)
    blocks = structgp.load(tmp_path / "m").model_.encoder.blocks
    assert [block.kind for block in blocks] == ["categorical", "dense"]


def test_the_rival_has_the_same_features(files, monkeypatch):
    pytest.importorskip("pycrfsuite")
    quick = structgp.cli.scoring.LinearCRF
    monkeypatch.setattr(structgp.cli.scoring, "LinearCRF", lambda n_jobs: quick(c2=1.0))
    result = ok(
        "evaluate", "-m", files.model, files.test, "--against", "crf", "--train", files.train, "--json"
    )
    assert 0 < json.loads(result.stdout)["linear CRF"]["token_error"] < 0.4


def test_vectors_that_have_moved(files, tmp_path):
    moved = tmp_path / "moved"
    expected = ok("tag", "-m", files.model, files.bare).stdout
    table = ok("evaluate", "-m", files.model, files.test).stdout
    files.vectors.rename(moved)
    try:
        says = [files.model, "not in its folder", "--vectors"]
        refused("tag", "-m", files.model, files.bare, says=says)
        refused("evaluate", "-m", files.model, files.test, says=says)
        options = ("--vectors", moved)
        assert ok("tag", "-m", files.model, files.bare, *options).stdout == expected
        assert ok("evaluate", "-m", files.model, files.test, *options).stdout == table
    finally:
        moved.rename(files.vectors)


def test_other_vectors_than_in_training(files, write):
    other = write("other", files.vectors.read_text() + "new 1 2\n")
    for command in (("tag", files.bare), ("evaluate", files.test)):
        arguments = (command[0], "-m", files.model, command[1], "--vectors")
        refused(*arguments, other, says=[f"{other}: not the word vectors that {files.model} was"])
        refused(*arguments, other.parent / "none", says=["none: cannot be read (No such file"])


@pytest.mark.usefixtures("unfit")
def test_vectors_that_cannot_be_used(files, write, tmp_path):
    arguments = ("train", files.template, files.train, "-o", tmp_path / "m")
    refused(*arguments, "--vectors", tmp_path / "none", says=["none: cannot be read"])
    short = write("short", "w2 1 2\nw3 1\n")
    refused(*arguments, "--vectors", short, says=[f"{short}:2: 1 numbers after the word"])
    bad = write("bad", "w2 1 2\nw3 1 x\n")
    refused(*arguments, "--vectors", bad, says=[f"{bad}:2: number 2 is 'x'"])
    refused(*arguments, "--vectors", files.vectors, "--vector-column", 2,
            says=[f"{files.vectors}: none of the words in column 2", "--vector-column"])  # fmt: skip
    refused(*arguments, "--vectors", files.vectors, "--vector-column", 3,
            says=["--vector-column: no column 3: columns 0 to 2 exist", files.train])  # fmt: skip
    refused(*arguments, "--vector-column", 0, says=["--vector-column: no word vectors"])
    assert not (tmp_path / "m").exists()


def test_vectors_for_a_model_that_has_none(files, tmp_path):
    ok("train", files.template, files.train, "-o", tmp_path / "m", *SMALL)
    options = ("--vectors", files.vectors)
    says = ["--vectors", "trained without word vectors"]
    refused("tag", "-m", tmp_path / "m", files.bare, *options, says=says)
    refused("evaluate", "-m", tmp_path / "m", files.test, *options, says=says)


@pytest.mark.usefixtures("unfit")
def test_cells_that_are_no_numbers(files, write, tmp_path):
    rows = [list(rows) for rows in files.sequences]
    line = len(rows[0]) + 3
    rows[1][1] = ("w2", "many", "n0", "B")
    broken = write("broken", as_columns(rows))
    says = [f"{broken}:{line}: column 1 is 'many'; give a finite number"]
    options = ("-o", tmp_path / "m", "--numeric", 1)
    refused("train", files.template, broken, *options, says=says)
    refused("train", files.template, files.train, "--dev", broken, *options, says=says)
    refused("evaluate", "-m", files.model, broken, says=says)
    refused("tag", "-m", files.model, broken, says=says)
    refused("tag", "-m", files.model, stdin="w2 nan n0\n", says=["<stdin>:1: column 1 is 'nan'"])
    refused("train", files.template, files.train, *options, "--numeric", 3,
            says=["--numeric: no column 3: columns 0 to 2 exist"])  # fmt: skip
    assert not (tmp_path / "m").exists()


# -- CRFsuite's files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crfsuite(files):
    model = files.folder / "crfsuite"
    ok("train", "--format", "crfsuite", files.attributes, "-o", model, "--dev", files.test_attributes)
    return model


def test_attributes_are_fitted_as_python_would(files, crfsuite):
    train, test = (AttributeReader().read(files.attributes), AttributeReader().read(files.test_attributes))
    assert "w:w1" in {name for x in train.X for token in x for name in token}
    ours = structgp.StructuredGPClassifier().fit(train.X, train.y)
    model = structgp.load(crfsuite)
    assert model.model_.extra["format"] == "crfsuite"
    assert model.training_log_["elbo"] == pytest.approx(ours.training_log_["elbo"])
    assert model.training_log_["posterior"] == "weights"
    assert float(model.model_.posterior["next"].scale) > 0
    assert error_on(crfsuite, files.test_attributes) == pytest.approx(1 - ours.score(test.X, test.y))
    assert error_on(crfsuite, files.test_attributes) < 0.4


def test_attributes_are_tagged_as_crfsuite_does(files, crfsuite):
    test, model = AttributeReader().read(files.test_attributes), structgp.load(crfsuite)
    labels, marginals = model.predict(test.X), model.predict_marginals(test.X)
    log_probs = model.sequence_log_probs(test.X, labels)
    zero, one, two = "", "", ""
    for y, m, log_prob in zip(labels, marginals, log_probs, strict=True):
        head = f"@probability\t{np.exp(log_prob):.6f}\n"
        one, two = one + head, two + head
        for label, p in zip(y, m, strict=True):
            every = "".join(f"\t{name}:{p[name]:.6f}" for name in "ABC")
            zero += f"{label}\n"
            one += f"{label}:{p[label]:.6f}\n"
            two += f"{label}:{p[label]:.6f}{every}\n"
        zero, one, two = zero + "\n", one + "\n", two + "\n"
    arguments = ("tag", "-m", crfsuite)
    assert ok(*arguments, files.test_attributes).stdout == zero
    assert ok(*arguments, stdin=files.test_attributes.read_bytes()).stdout == zero
    assert ok(*arguments, "-v1", files.test_attributes).stdout == one
    assert ok(*arguments, "-v2", files.test_attributes).stdout == two


def test_labels_of_a_file_to_tag_do_not_matter(files, crfsuite, write):
    expected = ok("tag", "-m", crfsuite, files.test_attributes).stdout
    text = re.sub(r"^\w+\t", "?\t", files.test_attributes.read_text(), flags=re.MULTILINE)
    assert ok("tag", "-m", crfsuite, write("unlabelled", text)).stdout == expected


def test_the_rival_on_attributes(files, crfsuite, monkeypatch):
    pytest.importorskip("pycrfsuite")
    quick = structgp.cli.scoring.LinearCRF
    monkeypatch.setattr(structgp.cli.scoring, "LinearCRF", lambda n_jobs: quick(c2=1.0))
    arguments = ("evaluate", "-m", crfsuite, files.test_attributes, "--against", "crf", "--json")
    result = ok(*arguments, "--train", files.attributes)
    assert 0 < json.loads(result.stdout)["linear CRF"]["token_error"] < 0.5


@pytest.mark.usefixtures("unfit")
def test_mistakes_in_attributes(files, crfsuite, write, tmp_path):
    broken = write("broken", "A\tx\nB\tx:y\n")
    says = [f"{broken}:2: the value of 'x:y' is 'y'"]
    refused("train", "--format", "crfsuite", broken, "-o", tmp_path / "m", says=says)
    refused("evaluate", "-m", crfsuite, broken, says=says)
    refused("tag", "-m", crfsuite, broken, says=says)
    same = write("same", "A\tx\nA\ty\n")
    refused("train", "--format", "crfsuite", same, "-o", tmp_path / "m", says=["same label, 'A'"])
    empty = write("empty", "")
    refused("train", "--format", "crfsuite", empty, "-o", tmp_path / "m", says=["empty: no tokens"])


@pytest.mark.usefixtures("unfit")
def test_arguments_that_do_not_go_together(files, tmp_path):
    to = ("-o", tmp_path / "m")
    refused("train", files.train, *to, says=["1 file, but TEMPLATE and TRAIN", "--format conll, doccano"])
    refused("train", files.template, files.train, files.test, *to, says=["3 files, but TEMPLATE"])
    crfsuite = ("train", "--format", "crfsuite")
    refused(*crfsuite, files.template, files.attributes, *to, says=["2 files", "leave TEMPLATE out"])
    for option in (("--numeric", 1), ("--vectors", files.vectors), ("--dialect", "wapiti")):
        refused(*crfsuite, files.attributes, *to, *option, says=[f"{option[0]}: is for column files"])
    assert run("train", *to).exit_code == 2
    assert run("train", files.template, files.train, *to, "--numeric", -1).exit_code == 2


# -- Wapiti's patterns -----------------------------------------------------------------------------


def test_train_with_wapitis_patterns(files, tmp_path):
    model = tmp_path / "m"
    result = ok("train", files.patterns, files.train, "-o", model, *SMALL, "--dialect", "wapiti")
    assert "warning" not in result.stderr
    loaded = structgp.load(model)
    assert loaded.model_.extra["template"] == PATTERNS
    assert loaded.model_.extra["dialect"] == "wapiti"
    assert loaded.model_.spec == chain(["3"], shared=False)
    template = Template.read(files.patterns, dialect="wapiti")
    X = [template.expand(s.rows) for s in read_columns(files.bare).sequences]
    expected = [label for labels in loaded.predict(X) for label in labels]
    tagged = ok("tag", "-m", model, files.bare)
    assert tagged.stderr == ""
    assert [line.split("\t")[-1] for line in tagged.stdout.splitlines() if line] == expected
    assert ok("evaluate", "-m", model, files.test).stderr == ""


def test_patterns_with_numbers_beside_them(files, tmp_path):
    options = ("--dialect", "wapiti", "--numeric", 1)
    ok("train", files.patterns, files.train, "-o", tmp_path / "m", *SMALL, *options)
    assert error_on(tmp_path / "m", files.train) < 0.3


@pytest.mark.usefixtures("unfit")
def test_mistakes_in_patterns(files, write, tmp_path):
    arguments = (files.train, "-o", tmp_path / "m", "--dialect", "wapiti")
    patterns = write("patterns", 'u:%x[0,0]\n\nu:%t[0,0,"a**"]\n')
    refused("train", patterns, *arguments, says=[f"{patterns}:3: '*' has nothing to repeat"])
    patterns = write("patterns", "u:%x[0,0]\nu:%z[0,0]\n")
    refused("train", patterns, *arguments, says=[f"{patterns}:2: '%z[0,0]' is not a command"])
    patterns = write("patterns", 'u:%m[0,3,"a"]\n')
    refused("train", patterns, *arguments, says=[f'{patterns}:1: %m[0,3,"a"] names column 3'])
    refused("train", files.patterns, files.train, "-o", tmp_path / "m", says=[":2: the line starts"])


# -- habits from other taggers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    {
        "model of crf_learn": ("train T F M", "use structgp train T F -o M"),
        "its regulariser": (
            "train -c 1.5 T F M",
            "train -c: regularisation is learned from the data; leave it out",
        ),
        "its cut-off": ("train -f 3 T F -o M", "rare values share a feature"),
        "its threads": ("train -p 4 T F -o M", "OMP_NUM_THREADS"),
        "crf_test without -m": ("tag M F", "use structgp tag -m M F"),
        "another name": ("test -m M F", "the command for this is 'tag'"),
    }.values(),
)
def test_what_is_known_from_other_taggers_is_pointed_out(words, says):
    refused(*words.split(), says=[says])


@pytest.mark.parametrize("words", ["M D -o P", "-m M D -o P", "D -o P --model M"])
def test_a_model_that_is_an_argument_may_have_its_option(words):
    given = main.commands["report"].make_context("report", words.split()).params
    assert [given[name] for name in ("model_path", "data_path", "output")] == ["M", "D", "P"]


@pytest.mark.parametrize("words", ["train T F", "train -x T F -o M", "label -m M F", "tag"])
def test_what_is_not_known_from_them_is_as_it_was(words):
    assert "Usage: " in run(*words.split()).stderr


# -- models of old ---------------------------------------------------------------------------------


def test_a_model_from_before_there_were_dialects(files, tmp_path):
    ok("train", files.template, files.train, "-o", tmp_path / "m", *SMALL)
    expected = ok("tag", "-m", tmp_path / "m", files.bare).stdout
    model = structgp.load(tmp_path / "m")
    for name in ("format", "dialect", "missing", "transitions"):
        del model.model_.extra[name]
    model.save(tmp_path / "old")
    assert ok("tag", "-m", tmp_path / "old", files.bare).stdout == expected
