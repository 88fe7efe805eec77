"""The plan: every choice with its reason, resolved in one room, shown and kept."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.generate import Generated, generate

import structgp
from structgp import Inducing, Mixture, StructuredGPClassifier, Weights, chain
from structgp.data.examples import Examples, read_examples
from structgp.inference.distributed import Processes
from structgp.plan import choices
from structgp.plan.options import Options
from structgp.plan.resolve import Plan, resolve

SOURCE = Path(structgp.__file__).parent
OWN_CHOICE = {
    "data/vocabulary.py": "how tokens are read, seen in the data alone",
    "gp/kernels/block_sum.py": "amplitude, and kernels for callers below the plan",
    "paper/saga.py": "step sizes, from the curvature of the problem",
    "structures/choose.py": "what answers, for callers below the plan",
    "cli/fitting.py": "hands the name on",
}
"""Files outside plan/ that compare with 'auto', and what for."""


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(12, n_labels=3, mean_length=4, n_templates=2, n_values=5, seed=0)


@pytest.fixture(scope="module")
def examples(data: Generated) -> Examples:
    return read_examples(data.X, data.y)


def test_auto_is_resolved_in_one_room() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and not name.startswith("plan/"):
                sides = [node.left, *node.comparators]
                if any(isinstance(s, ast.Constant) and s.value == "auto" for s in sides):
                    found.add(name)
    assert found <= set(OWN_CHOICE)


def test_no_auto_is_left(examples: Examples) -> None:
    for options in (Options(), Options(posterior="inducing"), Options(posterior=Mixture(2))):
        plan = resolve(options, examples).with_covariance(2, 5, examples.n_tokens)
        values = plan.to_json()
        assert "auto" not in {v["value"] for v in values.values() if isinstance(v["value"], str)}
        assert all(v["reason"] for v in values.values())
        assert json.loads(json.dumps(values)) == values


@pytest.mark.parametrize(
    ("parameters", "name", "value", "reason"),
    [
        ({}, "posterior", "weights", "the fit learns a kernel that is a prior on weights"),
        ({}, "optimizer", "second-order", "the structure gives its curvature"),
        ({}, "basis", "contrast", "the structure ignores what all labels share"),
        ({}, "kernel", {"categorical": "relevance"}, "the fit learns what each feature is worth"),
        ({}, "precision", "float64", ""),
        ({}, "learn_scales", "all", "the fit learns the kernel"),
        ({"inference": "natural"}, "posterior", "inducing", "the fit does not learn the kernel"),
        ({"inference": "natural"}, "kernel", {"categorical": "template"}, "the fit does not"),
        ({"inference": "natural"}, "learn_scales", "transitions", ""),
        ({"inference": "paper-batch"}, "n_inducing", 500, "as in the paper"),
        ({"inference": "paper-batch"}, "gradient", "control-variate", "asked for"),
        ({"posterior": Inducing(7)}, "n_inducing", 7, "asked for"),
        ({"posterior": Weights(basis="label")}, "basis", "label", "asked for"),
        ({"posterior": Mixture(2)}, "entropy", "bhattacharyya", "tighter than the paper's"),
        ({"posterior": Mixture(2)}, "posterior", "mixture", "asked for"),
        ({"device": "auto"}, "device", None, "the GPU where there is one"),
        ({}, "device", "cpu", "default"),
        ({}, "structure", "chain", "default"),
        ({"structure": "piecewise"}, "structure", "piecewise", "asked for"),
        ({"structure": chain(order=0)}, "structure", "chain(order=0)", "asked for"),
        ({"structure": chain(["1"])}, "structure", "chain(features=('1',))", "asked for"),
    ],
)
def test_choices_and_reasons(
    parameters: dict[str, Any], name: str, value: Any, reason: str, examples: Examples
) -> None:
    found = resolve(Options(**parameters), examples).to_json()[name]
    assert value is None or found["value"] == value
    assert reason in found["reason"]


def test_much_data(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples.n_tokens < choices.BATCHWISE_TOKENS
    monkeypatch.setattr(choices, "BATCHWISE_TOKENS", 5)
    plan = resolve(Options(), examples)
    shared = resolve(Options(), examples, Processes(0, 2))
    expected = "minibatch" if examples.in_many_parts else "second-order"
    assert plan.optimizer.value.name == expected
    assert shared.optimizer.value.name == "second-order"


def test_the_plan_is_in_the_log_and_the_file(data: Generated, tmp_path: Path) -> None:
    model = StructuredGPClassifier(n_draws=4, posterior=Inducing(5)).fit(data.X, data.y)
    plan = model.training_log_["plan"]
    assert plan["n_inducing"]["value"] == 5
    assert plan["covariance"]["value"] == "full"
    model.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert loaded.model_.info["plan"] == plan
    assert str(structgp.describe(model)).startswith("plan\n  structure")
    assert str(structgp.describe(loaded)) == str(structgp.describe(model))  # in the same order


def test_frozen(examples: Examples) -> None:
    assert Plan.__dataclass_params__.frozen  # type: ignore[attr-defined]
