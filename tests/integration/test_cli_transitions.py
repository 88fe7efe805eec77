"""Templates with macros in their B lines, from files to answers, against enumeration."""

from __future__ import annotations

import json
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import structgp
from structgp.cli import main
from structgp.structures import chain

CRFPP = "U00:%x[0,0]\nB\nB01:%x[0,1]\nB02:%x[-1,0]/%x[0,1]\n"
WAPITI = "u:%x[0,0]\n*:%X[0,1]\nb\n"
TEMPLATES = {"crf++": CRFPP, "wapiti": WAPITI}


def corpus(n: int, seed: int) -> list[list[tuple[str, str, str]]]:
    """The first label is in the first word; later ones repeat the label before; 'Turn' changes it."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        label = draw.choice("PQ")
        rows = [(f"starts{label}", "Keep", label)]
        for _ in range(draw.randint(1, 5)):
            step = draw.choice(["Keep", "Turn"])
            label = {"P": "Q", "Q": "P"}[label] if step == "Turn" else label
            rows.append((f"w{draw.randrange(4)}", step, label))
        found.append(rows)
    return found


TRAIN, TEST = corpus(40, 0), [[("startsP", "Keep", "P"), ("unseen", "Turn", "Q")], *corpus(12, 1)]


def features(dialect: str, rows: list[tuple[str, str, str]]) -> list[tuple[list[str], list[str]]]:
    """What the template says of each token: the features of the node, and of the transition into it."""
    words, steps = [row[0] for row in rows], [row[1] for row in rows]
    if dialect == "wapiti":
        return [([word, step.lower()], [step.lower()]) for word, step in zip(words, steps, strict=True)]
    before = ["_B-1", *words]
    return [([w], [s, f"{b}/{s}"]) for w, s, b in zip(words, steps, before[:-1], strict=True)]


def text(sequences: Any, n_columns: int = 3) -> str:
    return "".join("".join(" ".join(row[:n_columns]) + "\n" for row in rows) + "\n" for rows in sequences)


def ok(*arguments: Any) -> Any:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def error_on(model: Any, test: Any) -> float:
    return json.loads(ok("evaluate", "-m", model, test, "--json").stdout)["structgp"]["token_error"]


@pytest.fixture(scope="module", params=TEMPLATES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The dialect, and a folder with the files and a model."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "template").write_text(TEMPLATES[request.param])
    (folder / "train").write_text(text(TRAIN))
    (folder / "test").write_text(text(TEST))
    (folder / "bare").write_text(text(TEST, 2))
    options = ("--dialect", request.param)
    result = ok("train", folder / "template", folder / "train", "-o", folder / "model", *options)
    assert "warning" not in result.stderr
    return request.param, folder


def tables(model: Any, dialect: str, rows: Any, oracles: ModuleType) -> Any:
    """Every labelling of one sequence, its scores added up from the posterior means of both blocks."""
    made = features(dialect, rows)
    values, n = model.encoder.values, len(made[0][0])

    def ids(known: Any, tokens: list[list[str]]) -> torch.Tensor:
        found = [[k.get(v, len(k)) for k, v in zip(known, token, strict=True)] for token in tokens]
        return torch.tensor(found, dtype=torch.float64)

    node, _ = model.posterior["node"].scores_at(ids(values[:n], [here for here, _ in made]))
    step, _ = model.posterior["next"].scores_at(ids(values[n:], [into for _, into in made[1:]]))
    return oracles.chain_table(node.numpy(), step.numpy())


def test_the_structure_is_the_declared_one(trained: Any) -> None:
    dialect, folder = trained
    columns = ("2",) if dialect == "wapiti" else ("1", "2")
    assert structgp.load(folder / "model").model_.spec == chain(columns, shared=False)


def test_what_depends_on_macros_is_learned(trained: Any) -> None:
    _, folder = trained
    tagged = [
        line.split("\t") for line in ok("tag", "-m", folder / "model", folder / "bare").stdout.split("\n")
    ]
    expected = [row for rows in TEST for row in rows]
    assert [tuple(line) for line in tagged if len(line) == 3] == expected


def test_answers_are_those_of_the_declared_model(trained: Any, oracles: ModuleType) -> None:
    dialect, folder = trained
    estimator = structgp.load(folder / "model")
    estimator.n_draws = 0
    classes = list(estimator.classes_)
    asked = [[row[:2] for row in rows] for rows in TEST]
    reader = structgp.data.sources.from_json(estimator.model_.extra)
    X = [reader.tokens(rows) for rows in asked]
    assert X[1] == [(*node, *into) for node, into in features(dialect, TEST[1])]
    marginals, joint = estimator.predict_marginals(X), estimator.predict_n_best(X, 2)
    for n, rows in enumerate(TEST):
        table = tables(estimator.model_, dialect, rows, oracles)
        found = np.array([[p[label] for label in classes] for p in marginals[n]])
        np.testing.assert_allclose(found, table.nodes.astype(float), atol=1e-9)
        for labels, probability in joint[n]:
            (i,) = np.flatnonzero((table.labels == [classes.index(label) for label in labels]).all(1))
            assert probability == pytest.approx(float(table.prob[i]), abs=1e-9)
        assert joint[n][0][1] == pytest.approx(float(table.prob.max()), abs=1e-9)


def test_the_command_line_writes_the_same_probabilities(
    trained: Any, oracles: ModuleType, tmp_path: Any
) -> None:
    dialect, folder = trained
    estimator = structgp.load(folder / "model")
    estimator.n_draws = 0
    estimator.save(tmp_path / "mean")
    lines = ok("tag", "-m", tmp_path / "mean", "-v2", folder / "bare").stdout.rstrip("\n").split("\n\n")
    for rows, block in zip(TEST, lines, strict=True):
        table = tables(estimator.model_, dialect, rows, oracles)
        head, *tokens = block.split("\n")
        found = [[float(cell.split("/")[1]) for cell in line.split("\t")[3:]] for line in tokens]
        np.testing.assert_allclose(found, table.nodes.astype(float), atol=2e-6)
        assert float(head.removeprefix("# ")) == pytest.approx(float(table.prob.max()), abs=2e-6)


def test_plain_transitions_cannot_do_it(trained: Any, tmp_path: Any) -> None:
    _, folder = trained
    (tmp_path / "plain").write_text("U00:%x[0,0]\nB\n")
    ok("train", tmp_path / "plain", folder / "train", "-o", tmp_path / "model")
    estimator = structgp.load(tmp_path / "model")
    assert estimator.model_.spec == chain()
    X = [[(row[0],) for row in rows] for rows in TEST]
    assert estimator.score(X, [[row[2] for row in rows] for rows in TEST]) < 0.8


def test_the_piecewise_likelihood_takes_them_too(trained: Any, tmp_path: Any) -> None:
    dialect, folder = trained
    options = ("--dialect", dialect, "--structure", "piecewise")
    ok("train", folder / "template", folder / "train", "-o", tmp_path / "model", *options)
    columns = ("2",) if dialect == "wapiti" else ("1", "2")
    model = structgp.load(tmp_path / "model").model_
    assert model.spec == chain(columns, shared=False), "the chain answers"
    assert not model.posterior["next"].shared
    assert error_on(tmp_path / "model", folder / "test") < 0.3
