from __future__ import annotations

import dataclasses

import pytest
from experiments.ablation import ABLATIONS, KEY, NONE, markdown, plot, run_cell
from experiments.data import TASKS
from experiments.methods.sgd import SGD

from experiments import ablation
from structgp.paper import Saga

CHANGES = [(base, change) for base, changes in ABLATIONS.items() for change in changes]


def row(base, change, fold, **figures):
    key = dict(zip(KEY, (base, change, "segmentation", fold, False), strict=True))
    plain = {"error": 10.0, "nll": 0.3, "bound": -20.0, "seconds": 2.0, "hit_limit": False}
    return key | plain | figures


def settings(model):
    params = model.get_params(deep=False)
    optimizer = params.pop("inference")
    inner = dataclasses.asdict(optimizer) if dataclasses.is_dataclass(optimizer) else {}
    return params | {"inference": str(optimizer) if not inner else inner.pop("name", "")} | inner


def test_every_row_changes_something_of_its_base_and_no_two_the_same():
    for changes in ABLATIONS.values():
        base, *others = (settings(make(False)) for make in changes.values())
        told = [repr(sorted(other.items(), key=str)) for other in (base, *others)]
        assert len(set(told)) == len(told)


def test_bases_are_what_is_said_of_them():
    make = ABLATIONS["stochastic"]
    base = make[NONE](False)
    own = base.inference
    assert (own.gradient, own.n_draws, base.posterior.n_inducing) == ("control-variate", 4000, 500)
    assert type(own) is Saga
    assert own.max_steps == 1500
    assert type(make["SGD"](False).inference) is SGD
    assert make["no control variate"](False).inference.gradient == "score"
    assert ABLATIONS["default"][NONE](False).get_params() == type(base)().get_params()


@pytest.mark.parametrize(
    ("base", "change"), [("default", NONE), ("inducing", "M = 50"), ("stochastic", "SGD")]
)
def test_a_cell_on_made_up_data(base, change, data, monkeypatch):
    if base == "stochastic":
        few = ABLATIONS[base][change](True)
        few.set_params(inference__max_steps=30, inference__n_draws=200)
        monkeypatch.setitem(ABLATIONS[base], change, lambda quick: few)
    cell = ablation.Cell(base, change, TASKS[0], 0, True, str(data))
    found = run_cell(cell)
    assert tuple(found[name] for name in KEY) == cell.key
    assert 0 < found["error"] < 100
    assert found["nll"] > 0
    assert found["bound"] < 0
    assert found["hit_limit"] == (base == "stochastic")


def test_differences_are_from_the_base_on_the_same_folds():
    rows = [row("default", NONE, 0), row("default", NONE, 1, error=12.0)]
    rows += [
        row("default", "S = 4", 0, error=10.5, bound=-21.0),
        row("stochastic", "SGD", 0, hit_limit=True),
    ]
    lines = markdown(rows).splitlines()
    assert lines[-3:] == [
        "| segmentation | default | none | 11.00 | 0.300 | -20.00 | 2.0 | 2 |",
        "| segmentation | default | S = 4 | 10.50 (+0.50) | 0.300 (+0.000) | -21.00 (-1.00) "
        "| 2.0 (+0.0) | 1 |",
        "| segmentation | stochastic | SGD | 10.00* | 0.300 | -20.00 | 2.0 | 1 |",
    ]
    assert markdown(rows[::-1]) == markdown(rows)
    assert plot(rows[::-1]) == plot(rows)


def test_cells_that_are_there_are_not_done_again(tmp_path, monkeypatch):
    asked = []

    def none(work, cells, n_jobs):
        asked.append([(cell.base, cell.change, cell.task) for cell in cells])
        return iter(())

    monkeypatch.setattr("experiments.cells.run_all", none)
    store = ablation.Store(tmp_path / "ablation-quick.jsonl", KEY)
    store.add(row("inducing", "K = 2", 0, minutes=None) | {"quick": True})
    words = ["--quick", "--data", str(tmp_path), "--results", str(tmp_path), "--base", "inducing"]
    assert ablation.main(words) == 0
    others = [change for change in ABLATIONS["inducing"] if change != "K = 2"]
    assert asked == [[("inducing", change, "segmentation") for change in others]]
