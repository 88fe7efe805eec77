"""The commands on structures that a file declares: JSON lines of every kind, columns and attributes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import structgp
from structgp.cli import main

WORDS = {"A": ["ant", "ape"], "B": ["bee", "bat"], "C": ["cat", "cow"]}
ONCE = ("--data-weight", "1")


def run(*arguments: Any, stdin: str | None = None) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def ok(*arguments: Any, stdin: str | None = None) -> Any:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def refused(*arguments: Any, says: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"structgp: error: \S.*: .+; .+", line)
    assert says in line, line


class Maker:
    """Random examples of every kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def token(self, label: str) -> dict[str, str]:
        word = self.random.choice(WORDS[label]) if self.random.random() < 0.8 else "any"
        return {"word": word, "shape": self.random.choice(["Xx", "x"])}

    def sequence(self) -> dict[str, Any]:
        labels = [self.random.choice("ABC") for _ in range(self.random.randint(2, 6))]
        return {"tokens": [self.token(v) for v in labels], "labels": labels}

    def tree(self) -> dict[str, Any]:
        found = self.sequence()
        parents = [-1, *(self.random.randrange(n) for n in range(1, len(found["tokens"])))]
        return found | {"id": self.random.randrange(99), "parents": parents}

    def graph(self) -> dict[str, Any]:
        found = self.tree()
        pairs = [[p, n] for n, p in enumerate(found.pop("parents")) if p >= 0]
        return found | {
            "edges": {"cites": pairs},
            "features": {"cites": [[len(pairs), 1.5] for _ in pairs]},
        }

    def layers(self) -> dict[str, Any]:
        found = self.sequence()
        pos = found["labels"]
        return found | {"labels": {"pos": pos, "chunk": ["B-X" if v == "A" else "O" for v in pos]}}

    def grid(self) -> dict[str, Any]:
        labels = [[self.random.randrange(3) for _ in range(3)] for _ in range(2)]
        noise = self.random.gauss
        pixels = [[[(v == 0) + noise(0, 0.3), (v == 1) + noise(0, 0.3)] for v in row] for row in labels]
        return {"pixels": pixels, "labels": labels}


SPECS: dict[str, dict[str, Any]] = {
    "sequence": {"chain": {"order": 2}, "same": {"key": "word", "where": {"shape": "Xx"}}},
    "tree": {"tree": {}},
    "graph": {"edges": [{"name": "cites", "features": True}], "most_entries": 5000},
    "layers": {"layers": {"pos": {"chain": {}}, "chunk": {"chain": {}}}},
    "grid": {"grid": {"neighbours": 8}},
}


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module", params=SPECS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kind, a folder with a model and files, and the lines to label."""
    kind = request.param
    folder, maker = tmp_path_factory.mktemp(kind), Maker(0)
    test = [getattr(maker, kind)() for _ in range(5)]
    write(folder / "train", [getattr(maker, kind)() for _ in range(20)])
    write(folder / "test", test)
    write(folder / "bare", [{k: v for k, v in line.items() if k != "labels"} for line in test])
    (folder / "spec.json").write_text(json.dumps(SPECS[kind]))
    options = ("--format", "jsonl", "--structure", folder / "spec.json", *ONCE)
    ok("train", folder / "train", "-o", folder / "model", *options)
    return kind, folder, test


def flat(labels: Any) -> list[Any]:
    if isinstance(labels, dict):
        return [v for of in labels.values() for v in of]
    return [v for row in labels for v in row] if labels and isinstance(labels[0], list) else labels


def test_tag_adds_the_labels_of_the_model(trained: Any) -> None:
    _, folder, test = trained
    found = lines_of(ok("tag", "-m", folder / "model", folder / "bare").stdout)
    assert [{k: v for k, v in line.items() if k != "labels"} for line in found] == [
        {k: v for k, v in line.items() if k != "labels"} for line in test
    ]
    estimator = structgp.load(folder / "model")
    reader = structgp.data.sources.from_json(estimator.model_.extra)
    data = reader.read(folder / "test")
    expected = [y.tolist() if isinstance(y, np.ndarray) else y for y in estimator.predict(data.X)]
    assert [line["labels"] for line in found] == expected
    assert [
        line["labels"] for line in lines_of(ok("tag", "-m", folder / "model", folder / "test").stdout)
    ] == expected
    right = [
        a == b
        for line, y in zip(test, expected, strict=True)
        for a, b in zip(flat(line["labels"]), flat(y), strict=True)
    ]
    assert np.mean(right) > 0.6
    piped = ok("tag", "-m", folder / "model", stdin=(folder / "bare").read_text())
    assert lines_of(piped.stdout) == found


def test_tag_tells_probabilities(trained: Any) -> None:
    _, folder, _ = trained
    single, every = (
        lines_of(ok("tag", "-m", folder / "model", folder / "bare", f"-v{n}").stdout) for n in (1, 2)
    )
    best = lines_of(ok("tag", "-m", folder / "model", folder / "bare", "-n", "3", "-v1").stdout)
    for one, all_labels, ranked in zip(single, every, best, strict=True):
        labels, p, q = flat(one["labels"]), flat(one["probabilities"]), flat(all_labels["probabilities"])
        assert p == [at[str(label)] for at, label in zip(q, labels, strict=True)]
        assert all(sum(at.values()) == pytest.approx(1, abs=1e-5) for at in q)
        assert 0 < one["probability"] <= min(p) + 1e-5
        joint = [labelling["probability"] for labelling in ranked["labellings"]]
        assert len(joint) == 3
        assert joint == sorted(joint, reverse=True)
        assert one["probability"] <= joint[0] + 1e-5
        assert ranked["labels"] == ranked["labellings"][0]["labels"]
        assert len(flat(ranked["labellings"][2]["probabilities"])) == len(labels)


def test_tag_keeps_labels_and_defers(trained: Any) -> None:
    _, folder, test = trained
    forced = lines_of(ok("tag", "-m", folder / "model", folder / "test", "--force").stdout)
    assert [line["labels"] for line in forced] == [line["labels"] for line in test]
    unsure = lines_of(ok("tag", "-m", folder / "model", folder / "test", "--defer", "0").stdout)
    assert {label for line in unsure for label in flat(line["labels"])} == {None}
    refused(
        "tag", "-m", folder / "model", folder / "bare", "--force", says="bare:1: no 'labels' for --force"
    )


def test_other_commands(trained: Any, tmp_path: Path) -> None:
    kind, folder, test = trained
    model, file = folder / "model", folder / "test"
    scores = json.loads(ok("evaluate", "-m", model, file, "--json").stdout)
    assert set(scores) == {"structgp", *(["pos", "chunk"] if kind == "layers" else [])}
    assert scores["structgp"]["token_error"] < 0.4
    assert scores["structgp"]["n_tokens"] == sum(len(flat(line["labels"])) for line in test)
    expected = ok("expect", model, folder / "bare").stdout
    assert ("span F1" in expected) == (kind == "sequence")
    chosen = lines_of(ok("next", "-m", model, folder / "bare", "-n", "2").stdout)
    tagged = lines_of(ok("tag", "-m", model, folder / "bare").stdout)
    assert len(chosen) == 2
    assert all(line in tagged for line in chosen)
    ok("calibrate", model, folder / "train", "-o", tmp_path / "calibrated")
    sets = lines_of(ok("tag", "-m", tmp_path / "calibrated", folder / "bare", "--coverage", "0.7").stdout)
    assert all(len(flat(line["sets"])) == len(flat(line["labels"])) for line in sets)
    ok("report", model, file, "-o", tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()
    assert str(structgp.load(model).structure) in ok("describe", model).stdout


def test_a_wrong_line_is_named(trained: Any, tmp_path: Path) -> None:
    kind, folder, test = trained
    line = json.loads(json.dumps(test[1]))
    if kind == "grid":
        line["pixels"][0][1] = [1.0, 2.0, 3.0]
        says = "test:2.pixels[0][1]: 3 numbers where the first pixel has 2"
    else:
        line["tokens"][1] = [1.0]
        says = "test:2, node 1: expected a feature dict, got a list"
    write(tmp_path / "test", [test[0], line])
    refused("tag", "-m", folder / "model", tmp_path / "test", says=says)
    refused("evaluate", "-m", folder / "model", tmp_path / "test", says=says)
    options = ("--format", "jsonl", "--structure", folder / "spec.json")
    refused("train", tmp_path / "test", "-o", tmp_path / "m", *options, says=says)


# -- rules -----------------------------------------------------------------------------------------


def test_rules_from_a_file(tmp_path: Path) -> None:
    maker = Maker(1)
    write(tmp_path / "train", [maker.tree() for _ in range(20)])
    (tmp_path / "tree.json").write_text('{"tree": {}}')
    (tmp_path / "rules.json").write_text('{"forbidden": {"parent": [["A", "A"]]}}')
    options = ("-o", tmp_path / "m", "--format", "jsonl", "--structure", tmp_path / "tree.json", *ONCE)
    rules = ("--constraints", tmp_path / "rules.json")
    refused("train", tmp_path / "train", *options, *rules, says="labels ('A', 'A') of nodes (")
    refused(
        "train", tmp_path / "train", *options, "--forbid", "A", "B", says="tree() has none; name a templ"
    )
    lines = lines_of((tmp_path / "train").read_text())

    def obeys(line: Any) -> bool:
        pairs = [
            (line["labels"][p], v) for p, v in zip(line["parents"], line["labels"], strict=True) if p >= 0
        ]
        return ("A", "A") not in pairs

    write(tmp_path / "train", [line for line in lines if obeys(line)])
    ok("train", tmp_path / "train", *options, *rules)
    given = {"tokens": [{"word": "ant"}, {"word": "ape"}], "parents": [-1, 0]}
    write(tmp_path / "test", [given, given | {"labels": ["A", "A"]}])
    (first, _) = lines_of(ok("tag", "-m", tmp_path / "m", tmp_path / "test").stdout)
    assert first["labels"] != ["A", "A"]
    says = "test:2: no labelling of its 2 tokens agrees with the constraints and with the labels that are"
    write(tmp_path / "test", [given | {"labels": [None, None]}, given | {"labels": ["A", "A"]}])
    refused("tag", "-m", tmp_path / "m", tmp_path / "test", "--force", says=says)


# -- columns and attributes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, maker = tmp_path_factory.mktemp("columns"), Maker(2)
    for name, n in (("train", 25), ("test", 5)):
        given = [maker.sequence() for _ in range(n)]
        rows = [
            [(t["word"], t["shape"], y) for t, y in zip(s["tokens"], s["labels"], strict=True)]
            for s in given
        ]
        (folder / name).write_text("\n".join("".join(f"{w} {s} {y}\n" for w, s, y in r) for r in rows))
        text = ["".join(f"{y}\tw={w}\tshape={s}\n" for w, s, y in r) for r in rows]
        (folder / f"{name}.crf").write_text("\n".join(text))
    (folder / "template").write_text("U00:%x[0,0]\nU01:%x[0,1]\n")
    (folder / "bigrams").write_text("U00:%x[0,0]\nB\nB01:%x[0,1]\n")
    for name, spec in {
        "skip": {"chain": {"order": 2}, "same": {"key": "U00", "where": {"1": "Xx"}}},
        "second": {"chain": {"order": 2}},
        "attributes": {"chain": {}, "same": {"key": "w", "where": {"shape": "Xx"}}},
        "segments": {"segments": {"max_length": 3}},
        "unknown": {"same": {"key": "U07"}},
        "tree": {"tree": {}},
        "layers": SPECS["layers"],
        "wrong": {"chain": {"order": "two"}},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(spec))
    return folder


def test_columns_go_by_the_lines_of_the_template(columns: Path, tmp_path: Path) -> None:
    given = (columns / "template", columns / "train", "-o", tmp_path / "m")
    ok("train", *given, "--structure", columns / "skip.json", *ONCE)
    estimator = structgp.load(tmp_path / "m")
    (link,) = [t for t in estimator.model_.spec.templates if t.rule == "same"]
    assert (link.name, link.key, link.where) == ("same U00", "0", (("1", ("Xx",)),))
    reader = structgp.data.sources.from_json(estimator.model_.extra)
    X = [reader.tokens([("ant", "Xx"), ("bee", "x"), ("ant", "Xx"), ("ant", "x")])]
    assert estimator.ask(X).links[0].tuples[-1].tolist() == [[0, 2]]
    # The template has no B line: transitions are there since the file declares them.
    assert estimator.prior.transition_sd > 0
    assert estimator.predict_n_best(X, 2)[0][0].probability < 1
    tagged = ok("tag", "-m", tmp_path / "m", columns / "test").stdout
    assert all(line.count("\t") == 3 for line in tagged.splitlines() if line)
    assert "\t" in tagged


def test_features_of_transitions_stay_those_of_transitions(columns: Path, tmp_path: Path) -> None:
    given = (columns / "bigrams", columns / "train", "-o", tmp_path / "m", *ONCE)
    ok("train", *given, "--structure", columns / "second.json")
    spec = structgp.load(tmp_path / "m").model_.spec
    assert spec.node.without == ("1",)
    assert spec.next is not None
    assert spec.next.features == ("1",)
    says = "has no transitions with features, which the template's B lines ask for"
    refused("train", *given, "--structure", columns / "segments.json", says=says)


def test_attributes_go_by_what_is_before_the_equals_sign(columns: Path, tmp_path: Path) -> None:
    given = (columns / "train.crf", "-o", tmp_path / "m", "--format", "crfsuite", *ONCE)
    ok("train", *given, "--structure", columns / "attributes.json")
    estimator = structgp.load(tmp_path / "m")
    reader = structgp.data.sources.from_json(estimator.model_.extra)
    (found,) = reader.sequences(["A\tw=ant\tshape=Xx\n", "A\tw=bee\n", "A\tw=ant\tshape=Xx\n"])
    assert estimator.ask([found.tokens]).links[0].tuples[-1].tolist() == [[0, 2]]
    labels = ok("tag", "-m", tmp_path / "m", columns / "test.crf").stdout.split()
    assert set(labels) <= set("ABC")
    picked = ok("next", "-m", tmp_path / "m", columns / "test.crf", "-n", "1").stdout
    assert re.match(r"[ABC]\tw=\w+\tshape=\w+\n", picked)


def test_segments_of_columns(columns: Path, tmp_path: Path) -> None:
    given = (columns / "template", columns / "train", "-o", tmp_path / "m", *ONCE)
    ok("train", *given, "--structure", columns / "segments.json")
    assert structgp.load(tmp_path / "m").model_.spec.has_segments
    assert ok("tag", "-m", tmp_path / "m", columns / "test", "-v1").stdout.startswith("# 0.")


def test_structures_that_cannot_be(columns: Path, tmp_path: Path) -> None:
    given = ("train", columns / "template", columns / "train", "-o", tmp_path / "m", "--structure")
    refused(
        *given, "tree", says="--structure: 'tree' is not known; use chain or piecewise, or a file NAME.json"
    )
    refused(*given, columns / "none.json", says="none.json: cannot be read")
    refused(*given, columns / "unknown.json", says="unknown.json: no feature 'U07'; use the number or name")
    refused(
        *given, columns / "wrong.json", says="wrong.json: structure.chain.order: must be a whole number"
    )
    refused(
        *given, columns / "tree.json", says="examples that are each a tree; write them as JSON lines, with"
    )
    refused(*given, columns / "layers.json", says="needs labels by layer; write them as JSON lines")
    refused(*given, columns / "skip.json", "--shards", tmp_path / "s", says="--shards: knows chains, and")
    refused(*given, columns / "skip.json", "--format", "jsonl", says="JSON lines need only TRAIN")
    jsonl = ("train", columns / "train", "-o", tmp_path / "m", "--format", "jsonl")
    refused(*jsonl, "--missing", "?", says="--missing: is for other files; JSON lines have null")
    refused(*jsonl, "--numeric", "1", says="--numeric: is for column files; JSON lines have features")
    refused(*jsonl, says="train:1: not JSON")
    ambiguous = tmp_path / "template"
    ambiguous.write_text("U:%x[0,0]\nU:%x[0,1]\n")
    (tmp_path / "same.json").write_text('{"same": {"key": "U"}}')
    options = ("-o", tmp_path / "m", "--structure", tmp_path / "same.json")
    refused("train", ambiguous, columns / "train", *options, says="2 lines of the template are called 'U'")
