"""Transitions that depend on features, through the estimator: which fits can have them, what they learn,
and fits that go on with new features and labels."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV

from structgp import (
    Inducing,
    InputError,
    Mixture,
    Prior,
    SecondOrder,
    StructgpWarning,
    StructuredGPClassifier,
    Weights,
    chain,
    describe,
    explain,
)
from structgp.data import shards
from structgp.data.examples import read_examples
from structgp.plan.grow_posterior import carried_over
from structgp.structures import Chain, Structure

SPEC = chain(features=["turn"])
LABELS = ["A", "B"]


def sequences(n: int, seed: int, turns: str = "yn", labels: list[str] = LABELS) -> tuple[Any, Any]:
    """Labels that change where 'turn' is y and stay where it is not; the words say little."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        label, tokens, names = int(rng.integers(len(labels))), [], []
        for t in range(int(rng.integers(3, 6))):
            turn = str(rng.choice(list(turns)))
            label = (label + 1) % len(labels) if t and turn != "n" else label
            said = labels[label] if rng.random() < 0.6 else str(rng.choice(labels))
            tokens.append({"turn": turn, "word": said.lower()})
            names.append(labels[label])
        X.append(tokens)
        y.append(names)
    return X, y


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    return sequences(24, 0)


@pytest.fixture(scope="module")
def fitted(data: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(structure=SPEC, n_draws=16).fit(*data)


# -- what is learned ---------------------------------------------------------------------------------


def test_they_learn_what_one_table_cannot(fitted: StructuredGPClassifier, data: Any) -> None:
    X, y = sequences(60, 1)
    plain = StructuredGPClassifier(n_draws=16).fit(*data)
    assert fitted.score(X, y) > plain.score(X, y) + 0.04
    assert fitted.training_log_["elbo"] > plain.training_log_["elbo"] + 3


@pytest.mark.parametrize("parameters", [{"inference": "minibatch"}, {"posterior": Inducing(8)}])
def test_other_fits_that_can(parameters: Any, fitted: StructuredGPClassifier, data: Any) -> None:
    other = StructuredGPClassifier(structure=SPEC, n_draws=16, **parameters).fit(*data)
    X, y = sequences(20, 1)
    assert other.score(X, y) > fitted.score(X, y) - 0.1


def test_grid_search() -> None:
    model = StructuredGPClassifier(structure=SPEC, n_draws=4)
    grid = {"prior__transition_sd": [0.01, 1.5]}
    search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(*sequences(48, 0))
    assert search.best_params_ == {"prior__transition_sd": 1.5}
    low, high = search.cv_results_["mean_test_score"]
    assert low < high


# -- what is shown -----------------------------------------------------------------------------------


def test_explanations(fitted: StructuredGPClassifier, oracles: ModuleType) -> None:
    """The parts add up to the log-odds of the posterior mean, which enumeration gives too; steps are scored
    with the features of their second token."""
    x = [{"turn": "n", "word": "a"}, {"turn": "y", "word": "b"}, {"turn": "n", "word": "b"}]
    model, table = fitted.model_, fitted.model_.posterior["next"]
    rows = torch.from_numpy(model.encoder.encode(x))
    ((_, at),) = model.ask([x]).one_by_one(n_draws=0)
    f, g = at.f, at.g
    scores, _ = table.scores_at(model.split.next.select(rows[1:]))
    torch.testing.assert_close(g[0, 0], scores)
    p = oracles.chain_table(f[0, 0].numpy(), scores.numpy()).nodes.astype(float)
    for t in range(3):
        found = explain(fitted, x, t, "A", "B")
        assert found.log_odds == pytest.approx(np.log(p[t, 0] / p[t, 1]), abs=1e-8)
        assert found.log_odds == pytest.approx(found.unary + found.left + found.right)
        for step, at in ((found.before, t - 1), (found.after, t)):
            if step is None:
                continue
            i, j = LABELS.index(step.if_label), LABELS.index(step.if_other)
            mean = scores[at] if step is found.after else scores[at].T
            assert step.score == pytest.approx(float(mean[0, i] - mean[1, j]))
            assert step.sd > 0
    assert "before" in str(explain(fitted, x, 1))


def test_the_summary(fitted: StructuredGPClassifier) -> None:
    found = describe(fitted)
    assert found.transitions.shape == (2, 2)
    assert found.transition_templates.keys() == {"turn", "label frequency"}
    assert found.transition_templates["turn"] > 0
    assert "transition weights (prior variance)" in str(found)
    assert "chain(features=('turn',))" in str(found) or "turn" in str(found)


# -- going on ----------------------------------------------------------------------------------------


def test_a_posterior_in_a_larger_world(fitted: StructuredGPClassifier) -> None:
    """A new value of the feature and a new label: what was known stays, of the rest nothing is."""
    model = fitted.model_
    X, y = sequences(6, 2, "ynm", ["A", "B", "C"])
    examples = read_examples(X, y, encoder=model.encoder, classes=model.labels.classes)
    after, view = carried_over(model, examples)["next"], model.split.next
    token = [{"turn": turn, "word": "a"} for turn in ("y", "n")]
    mean, sd = model.posterior["next"].scores_at(view.select(torch.from_numpy(model.encoder.encode(token))))
    rows = torch.from_numpy(examples.encoder.encode([*token, {"turn": "m", "word": "a"}]))
    wide = type(view)(examples.encoder, view.kept, whole=False).select(rows)
    new_mean, new_sd = after.scores_at(wide)
    torch.testing.assert_close(new_mean[:2, :2, :2], mean)
    torch.testing.assert_close(new_sd[:2, :2, :2], sd)
    assert not new_mean[:, 2].any()
    assert not new_mean[:, :, 2].any()
    assert (new_sd[2, :2, :2] > new_sd[:2, :2, :2].amax(0) * 0.99).all(), (
        "a new value adds what is not known"
    )


def test_partial_fit_takes_new_values_and_labels(data: Any) -> None:
    model = StructuredGPClassifier(structure=SPEC, n_draws=16).partial_fit(*data)
    X, y = sequences(30, 3, "ynm", ["A", "B", "C"])
    model.partial_fit(X, y, remember=False)
    assert model.classes_.tolist() == ["A", "B", "C"]
    assert model.training_log_["optimizer"] == "minibatch"
    new = sequences(20, 4, "ynm", ["A", "B", "C"])
    alone = StructuredGPClassifier(n_draws=16).fit(X, y)
    assert model.score(*new) > alone.score(*new)
    assert model.model_.info["n_sequences"] == 54


def test_a_warm_start_takes_new_values_and_labels(data: Any) -> None:
    model = StructuredGPClassifier(structure=SPEC, n_draws=16, warm_start=True).fit(*data)
    again = model.fit(*data).training_log_
    first = StructuredGPClassifier(structure=SPEC, n_draws=16).fit(*data).training_log_
    assert again["trace"][0][1] > first["trace"][0][1]
    X, y = sequences(30, 3, "ynm", ["A", "B", "C"])
    model.fit(X, y)
    assert model.classes_.tolist() == ["A", "B", "C"]
    cold = StructuredGPClassifier(structure=SPEC, n_draws=16).fit(X, y)
    assert model.training_log_["elbo"] > cold.training_log_["elbo"] - 0.1 * len(X)
    with pytest.warns(StructgpWarning, match="starts from the prior"):
        model.set_params(structure="chain").fit(X, y, callback=lambda info: True)


def test_a_warm_start_without_transitions(data: Any) -> None:
    model = StructuredGPClassifier(structure=chain(order=0), n_draws=4, warm_start=True).fit(*data)
    model.fit(*data)  # warnings are errors here
    assert model.model_.posterior["next"].is_silent


# -- what cannot be ----------------------------------------------------------------------------------


class Steep(Chain):
    """A chain that says nothing of its curvature."""

    curvature = Structure.curvature
    local_curvature = Structure.local_curvature
    has_curvature = has_local_curvature = False  # type: ignore[assignment]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "natural": ({"inference": "natural"}, "'natural' optimiser"),
    "adam": ({"inference": "adam"}, "'adam' optimiser"),
    "saga": ({"inference": "saga"}, "'saga' optimiser"),
    "lbfgs": ({"inference": "lbfgs"}, "'lbfgs' optimiser"),
    "paper-batch": ({"inference": "paper-batch"}, "'paper-batch' optimiser"),
    "paper-stochastic": ({"inference": "paper-stochastic"}, "'paper-stochastic' optimiser"),
    "mixture": ({"posterior": Mixture(2)}, "optimiser does not fit weights"),
    "no curvature": ({"structure": Steep(spec=SPEC)}, "'natural' optimiser"),
    "full covariance": (
        {"posterior": Inducing(8, transition_covariance="full"), "inference": SecondOrder()},
        "a full covariance is for one table",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fits_that_cannot_have_them(name: str, data: Any) -> None:
    parameters, says = REFUSED[name]
    model = StructuredGPClassifier(**({"structure": SPEC} | parameters))
    with pytest.raises(
        InputError, match=r"^structure: chain\(features=\('turn',\)\) gives transitions feat"
    ) as error:
        model.fit(*data)
    assert says in error.value.problem
    assert "use" in error.value.remedy


def test_shards_cannot_have_them(data: Any, tmp_path: Path) -> None:
    folder = shards.write(list(zip(*data, strict=True)), tmp_path / "shards")
    for parameters in ({}, {"posterior": Weights()}):
        with pytest.raises(
            InputError, match=r"^structure: .* shards do not keep the features of transitions"
        ):
            StructuredGPClassifier(structure=SPEC, **parameters).fit(folder)


def test_no_feature_is_left_for_nodes(data: Any) -> None:
    structure = chain(features=["turn", "word"], shared=False)
    with pytest.raises(InputError, match=r"^structure: .*leaves none for single tokens; use shared=True"):
        StructuredGPClassifier(structure=structure).fit(*data)


@pytest.mark.parametrize("basis", ["contrast", "label"])
def test_a_basis_is_of_the_nodes_alone(basis: str, data: Any) -> None:
    model = StructuredGPClassifier(structure=SPEC, posterior=Weights(basis=basis), n_draws=4).fit(*data)
    posterior = model.model_.posterior
    assert posterior.node.n_functions == (1 if basis == "contrast" else 2)
    assert posterior["next"].has_own_functions


def test_features_and_no_transitions(data: Any) -> None:
    with pytest.raises(InputError, match=r"^transition_sd: 0 leaves transitions out, and chain\(features"):
        StructuredGPClassifier(structure=SPEC, prior=Prior(transition_sd=0)).fit(*data)
    with pytest.raises(InputError, match=r"^structure: transitions have features, and no sequence has two"):
        StructuredGPClassifier(structure=SPEC).fit([x[:1] for x in data[0]], [y[:1] for y in data[1]])
    with pytest.raises(InputError, match=r"^feature 'shape': not a feature"):
        StructuredGPClassifier(structure=chain(features=["shape"])).fit(*data)
