"""Which basis of functions a fit gets, and that a file keeps it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.generate import generate

import structgp
from structgp import Inducing, InputError, Mixture, Prior, StructuredGPClassifier
from structgp.data.examples import read_examples
from structgp.gp import contrasts
from structgp.plan.options import Options, Weights
from structgp.plan.resolve import resolve
from structgp.plan.start import start_of


@pytest.fixture(scope="module")
def data() -> Any:
    return generate(16, n_labels=3, n_values=12, n_templates=3, mean_length=4, seed=1)


def fit(data: Any, **parameters: Any) -> StructuredGPClassifier:
    usual = {"n_draws": 8, "posterior": Inducing(n_inducing=8)}
    return StructuredGPClassifier(**(usual | parameters)).fit(data.X[:6], data.y[:6])


@pytest.mark.parametrize(
    "parameters",
    [
        {"posterior": Inducing(8, basis="contrast")},
        {"inference": "natural", "posterior": Mixture(n_inducing=8, basis="contrast")},
        {
            "prior": Prior(transition_sd=0),
            "posterior": Inducing(8, covariance="diagonal", basis="contrast"),
        },
        {"posterior": Inducing(8, basis="label")},
    ],
)
def test_a_file_keeps_the_basis(parameters: dict[str, Any], data: Any, tmp_path: Path) -> None:
    fitted = fit(data, **parameters)
    q = fitted.model_.posterior.node
    assert q.n_functions == (3 if parameters["posterior"].basis == "label" else 2)
    path, y = tmp_path / "model", [["L0"] * len(x) for x in data.X]
    fitted.save(path)
    loaded = structgp.load(path)
    assert torch.equal(loaded.model_.posterior.node.basis, q.basis)
    assert loaded.predict_marginals(data.X) == fitted.predict_marginals(data.X)
    assert loaded.sequence_log_probs(data.X, y) == fitted.sequence_log_probs(data.X, y)
    loaded.decode = fitted.decode = "sequence"
    assert loaded.predict(data.X) == fitted.predict(data.X)


def test_who_gets_contrasts(data: Any, cases: ModuleType) -> None:
    """'auto': who ignores the direction that is left out, but for the paper's presets."""
    examples = read_examples([[["a"]], [["b"]], [["c"]], [["c"]]], [["x"], ["y"], ["z"], ["z"]])

    def chosen(**parameters: Any) -> str:
        return resolve(Options(**parameters), examples).basis.value

    options = Options()
    start = start_of(options, resolve(options, examples), examples, torch.Generator())
    expected = contrasts(torch.tensor([1.0, 1.0, 2.0]))
    torch.testing.assert_close(start.posterior.node.basis, expected, rtol=0, atol=1e-12)
    assert chosen() == "contrast"
    assert chosen(structure=cases.ValueOnly()) == "label"
    assert chosen(posterior=Inducing(basis="label")) == "label"
    assert chosen(posterior=Weights(basis="label")) == "label"
    assert chosen(inference="paper-batch") == "label"
    assert chosen(inference="paper-batch", posterior=Inducing(basis="contrast")) == "contrast"
    with pytest.raises(InputError, match="a direction that ValueOnly may depend on"):
        fit(data, structure=cases.ValueOnly(), posterior=Inducing(8, basis="contrast"))
    with pytest.raises(InputError, match="basis: 'both' is not known"):
        fit(data, posterior=Inducing(8, basis="both"))
