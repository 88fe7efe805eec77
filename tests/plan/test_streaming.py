"""Fits on shards: the same as in memory, cut off and taken up again, in memory that stays flat."""

from __future__ import annotations

import math
import functools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import Generated, generate
from gpytorch.kernels import RBFKernel

import structgp.plan.run
from structgp import Inducing, InputError, Mixture, Prior, StructuredGPClassifier, Weights
from structgp.data import shards
from structgp.data.shards import Shards
from structgp.inference import Minibatch, StepInfo
from structgp.inference.checkpoint import Checkpoint

FAST = Minibatch(batch_tokens=40, n_draws=4, steps=3, learning_rounds=1, tolerance=1.0)


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(30, n_labels=3, mean_length=5, n_templates=2, n_values=8, strength=2.0, seed=2)


@pytest.fixture
def kept(data: Generated, tmp_path: Path) -> Shards:
    return shards.write(list(zip(data.X, data.y, strict=True)), tmp_path / "shards")


def model(**parameters: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(n_draws=4, **{"inference": FAST} | parameters)


def assert_same(one: StructuredGPClassifier, other: StructuredGPClassifier) -> None:
    a, b = (m.model_.posterior.state_dict() for m in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    for name in ("steps", "elbo", "fresh_elbo", "stopped", "kernel_scales", "n_inducing"):
        assert one.training_log_[name] == other.training_log_[name], name


# -- the same as in memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"inference": Minibatch(n_draws=4, learn_scales="auto")},
        {"prior": Prior(amplitude=3.0, transition_sd=0.0)},
        {"constraints": {"forbidden": [("L0", None)]}},
        {"kernel": {"categorical": "relevance"}, "posterior": Weights(basis="label")},
        {"structure": "piecewise", "posterior": "weights"},
    ],
    ids=["plain", "by name", "amplitude", "constraints", "kernel", "piecewise"],
)
def test_the_fit_in_memory_to_the_last_bit(parameters: dict[str, Any], tmp_path: Path) -> None:
    data = generate(30, n_labels=3, mean_length=5, n_templates=2, n_values=8, strength=2.0, seed=2)
    y = data.y
    if "constraints" in parameters:
        y = [["L1" if own == len(of) - 1 else v for own, v in enumerate(of)] for of in data.y]
    kept = shards.write(list(zip(data.X, y, strict=True)), tmp_path / "shards")
    one, other = model(**parameters).fit(kept), model(**parameters).fit(data.X, y)
    assert_same(one, other)
    assert one.predict(data.X[:3]) == other.predict(data.X[:3])
    names = ("n_sequences", "n_tokens", "label_counts")
    assert [one.model_.info[n] for n in names] == [other.model_.info[n] for n in names]


def test_numbers_beside_templates_and_labels_that_are_missing(data: Generated, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = [[{"w": t[0], "n": float(rng.normal()), t[1]: True} for t in x] for x in data.X]
    y = [[None if t == 1 else v for t, v in enumerate(of)] for of in data.y]
    kept = shards.write(list(zip(X, y, strict=True)), tmp_path / "shards")
    for amplitude in ("auto", 2.0):
        parameters: dict[str, Any] = {"prior": Prior(amplitude=amplitude)}
        assert_same(model(**parameters).fit(kept), model(**parameters).fit(X, y))


def test_auto_says_why(kept: Shards, data: Generated) -> None:
    fitted = StructuredGPClassifier(n_draws=4).fit(kept, callback=lambda info: True)
    log = fitted.training_log_
    assert log["optimizer"] == "minibatch"
    assert "the data is on disk" in log["reason"]
    assert log["posterior"] == "weights"
    with_dev = model().fit(kept, X_dev=data.X[:4], y_dev=data.y[:4])
    assert with_dev.training_log_["dev"]["n_sequences"] == 4


def test_several_shards_come_to_the_same_bound(data: Generated, tmp_path: Path) -> None:
    pairs = list(zip(data.X, data.y, strict=True))
    kept = shards.write(pairs, tmp_path / "shards", shard_tokens=50)
    assert kept.n_shards > 2
    exact = Minibatch(batch_tokens=40, n_draws=64, steps=8, tolerance=0.01, learning_rounds=0)
    one = model(inference=exact).fit(kept).training_log_["elbo"]
    assert one == pytest.approx(model(inference=exact).fit(data.X, data.y).training_log_["elbo"], abs=1.5)


def test_nothing_is_left_behind(kept: Shards, tmp_path: Path) -> None:
    before = sorted(p.name for p in kept.folder.iterdir())
    model().fit(kept, checkpoint=tmp_path / "checkpoint")
    model().fit(kept)
    assert sorted(p.name for p in kept.folder.iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


def test_the_pace_suits_the_size() -> None:
    few, many = Minibatch().paced(1_000), Minibatch().paced(1_000_000)
    assert (few.batch_tokens, many.batch_tokens) == (500, 4_000)
    assert few.steps == 8
    assert Minibatch(batch_tokens=7, steps=9).paced(1_000_000).batch_tokens == 7


# -- what is not possible ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all data": ({"inference": "second-order"}, "'second-order' needs all data in memory; use 'auto'"),
    "adam": ({"inference": "adam"}, "'adam' needs all data in memory"),
    "early": ({"early_stopping": True}, "early_stopping: is for data in memory"),
    "kernel": ({"kernel": RBFKernel()}, "kernel: shards are fitted with one weight per feature"),
    "template": ({"kernel": "template"}, "kernel: shards are fitted with one weight per feature"),
    "stray": ({"kernel": {"sparse": "relevance"}}, "kernel: no sparse features in the data"),
    "by name": ({"posterior": "inducing"}, "posterior: inducing inputs are chosen from data in memory"),
    "inducing": ({"posterior": Inducing(n_inducing=10)}, "posterior: inducing inputs are chosen from"),
    "mixture": ({"posterior": Mixture(n_components=2)}, "posterior: inducing inputs are chosen from"),
    "fixed": ({"prior": Prior(learn_kernel=False)}, "posterior: 'weights' is for the fit that learns"),
    "full": ({"posterior": Weights(transition_covariance="full")}, "'minibatch' fits one Gaussian"),
    "opaque": (
        {"structure": lambda f, g, y: 0 * f.sum((1, 2)) - len(y) * math.log(f.shape[-1])},
        "needs the curvature, and BlackBox offers none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_all_data_is_refused(name: str, kept: Shards, data: Generated) -> None:
    parameters, message = REFUSED[name]
    early = {name: parameters.pop(name) for name in ("early_stopping",) if name in parameters}
    dev = (data.X[:2], data.y[:2]) if early else ()
    with pytest.raises(InputError, match=message):
        model(**parameters).fit(kept, None, *dev, **early)


def test_arguments_that_do_not_go_with_shards(kept: Shards, data: Generated) -> None:
    with pytest.raises(InputError, match="y: given beside shards"):
        model().fit(kept, data.y)
    with pytest.raises(InputError, match="sample_weight: given beside shards"):
        model().fit(kept, sample_weight=np.ones(30))
    with pytest.raises(InputError, match="y: no labels; pass one list of labels per sequence"):
        model().fit(data.X)
    with pytest.raises(InputError, match="partial_fit: shards are fitted as a whole"):
        model().partial_fit(kept, [])
    warm = model(warm_start=True).fit(kept)
    with pytest.raises(InputError, match="warm_start: a fit on shards starts from nothing"):
        warm.fit(kept)
    with pytest.raises(InputError, match=r"y\[\d+\].*which the constraints forbid"):
        model(constraints={"forbidden": [("L0", "L0"), ("L1", "L1"), ("L2", "L2")]}).fit(kept)


# -- cut off and taken up again ----------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import structgp.inference.checkpoint
from structgp import StructuredGPClassifier
from structgp.data import shards
from structgp.inference import Minibatch
structgp.inference.checkpoint.Checkpoint.__init__.__defaults__ = (0.0,)
last = int(sys.argv[3])
def stop(info):
    if info.iteration == last:
        os.kill(os.getpid(), signal.SIGKILL)
fast = Minibatch(batch_tokens=40, n_draws=4, steps=3, learning_rounds=1, tolerance=1.0)
model = StructuredGPClassifier(n_draws=4, inference=fast)
model.fit(shards.read(sys.argv[1]), callback=stop, checkpoint=sys.argv[2])
"""


def test_a_killed_fit_goes_on_from_its_checkpoint(kept: Shards, tmp_path: Path) -> None:
    last, path = 11, tmp_path / "checkpoint"
    n_batches = len(shards.ShardBatches(kept, 40))
    assert n_batches < last < 3 * n_batches, "killed in a pass after the first"
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(kept.folder), str(path), str(last)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "checkpoint.sites", "shards"]
    seen: list[StepInfo] = []

    def watch(info: StepInfo) -> None:
        seen.append(info)

    again = model().fit(shards.read(kept.folder), checkpoint=path, callback=watch)
    assert seen[0].iteration == last
    assert_same(again, model().fit(kept))
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


class CutOffError(Exception):
    """Instead of a power cut."""


def cut_off(info: StepInfo) -> None:
    if info.iteration == 4:
        raise CutOffError


def test_sites_behind_the_checkpoint_are_cut(
    kept: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is some steps, and a pass, older than the files of the sites."""

    class Old(Checkpoint):
        def write(self, *given: Any) -> bool:
            return given[2].steps[-1].iteration == 1 and super().write(*given)

    monkeypatch.setattr(structgp.plan.run, "Checkpoint", functools.partial(Old, seconds=0.0))
    path = tmp_path / "checkpoint"
    with pytest.raises(CutOffError):
        model().fit(kept, checkpoint=path, callback=cut_off)
    assert_same(model().fit(kept, checkpoint=path), model().fit(kept))


def test_a_checkpoint_without_its_sites(
    kept: Shards, data: Generated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = functools.partial(Checkpoint, seconds=0.0)
    monkeypatch.setattr(structgp.plan.run, "Checkpoint", often)
    path = tmp_path / "checkpoint"
    with pytest.raises(CutOffError):
        model().fit(kept, checkpoint=path, callback=cut_off)
    other = shards.write(list(zip(data.X[1:], data.y[1:], strict=True)), tmp_path / "other")
    with pytest.raises(InputError, match="of other data or other parameters"):
        model().fit(other, checkpoint=path)
    for file in (tmp_path / "checkpoint.sites").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="sites of the fit are missing in it; remove the checkp"):
        model().fit(kept, checkpoint=path)


# -- memory ------------------------------------------------------------------------------------------

MEMORY = """
import resource, sys
import torch
torch.set_num_threads(1)
from structgp import StructuredGPClassifier
from structgp.data import shards
from benchmarks.generate import generate_stream
from structgp.inference import Minibatch
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
folder = sys.argv[1]
def make(n):
    return lambda: generate_stream(n, n_labels=4, mean_length=8, n_templates=2, n_values=300, seed=1)
def run(n):
    kept = shards.write(make(n), folder, features="columns", shard_tokens=2000, overwrite=True)
    fast = Minibatch(batch_tokens=1000, n_draws=2, steps=1, max_passes=1)
    StructuredGPClassifier(inference=fast, n_draws=2).fit(kept)
    return peak()
first = run(500)
print(first, run(3000))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_memory_does_not_grow_with_the_number_of_sequences(tmp_path: Path) -> None:
    """In memory, 2,500 sequences more are 13 MB."""
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(tmp_path / "shards")]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    few, many = map(float, ended.stdout.split())
    assert many - few < 6
