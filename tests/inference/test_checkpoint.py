"""A fit that is cut off goes on as if it had not been."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from benchmarks.generate import Generated, generate
from experiments.methods.sgd import SGD
from torch import nn

import structgp.inference.checkpoint
import structgp.plan.run
from structgp import Adam, Custom, Inducing, InputError, Mixture, Prior, StructuredGPClassifier
from structgp.data.json_form import FormError
from structgp.inference import Minibatch, Natural, SecondOrder, StepInfo
from structgp.inference.bound import Plateau
from structgp.inference.checkpoint import Checkpoint, Reached, _pack, _Unpack
from structgp.inference.natural import NaturalState
from structgp.paper import PRESETS, LbfgsBlocks, Saga
from structgp.paper.lbfgs_blocks import LbfgsBlocksState
from structgp.paper.saga import SagaState
from structgp.plan.options import INFERENCE, NAMED


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(6, n_labels=3, n_values=4, n_templates=2, mean_length=3, strength=2.0, seed=2)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write after every step."""
    monkeypatch.setattr(structgp.plan.run, "Checkpoint", functools.partial(Checkpoint, seconds=0.0))


class CutOffError(Exception):
    """Instead of a power cut."""


def numpy_softmax(f: Any, g: Any, y: Any) -> Any:
    f, g, y = np.asarray(f), np.asarray(g), np.asarray(y)
    f = f - np.logaddexp.reduce(f, axis=-1, keepdims=True)
    g = g - np.logaddexp.reduce(g, axis=-1, keepdims=True)
    return f[:, np.arange(len(y)), y].sum(-1) + g[:, y[:-1], y[1:]].sum(-1)


OWN = Custom(numpy_softmax, "chain")
FEW: dict[str, Any] = {"prior": Prior(learn_kernel=False), "posterior": Inducing(n_inducing=5)}
STEPS = ("node_steps", "transition_steps", "hyper_steps")
SHORT: dict[str, Any] = {
    "node_steps": 4, "transition_steps": 2, "hyper_steps": 2,
    "objective_tolerance": 0.0, "parameter_tolerance": 0.0,
}  # fmt: skip
BATCH = PRESETS["paper-batch"].optimizer
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    # Parameters, the step that is cut off, the last step.
    "auto": ({}, 2, 99),
    "second-order": ({"inference": "second-order", "posterior": "inducing"}, 2, 99),
    "minibatch": ({"inference": Minibatch(batch_tokens=8)}, 6, 9),
    "natural": ({"inference": "natural"} | FEW, 3, 8),
    "adam": ({"inference": "adam"} | FEW, 4, 8),
    "sgd": ({"inference": SGD()} | FEW, 3, 8),
    "saga": ({"inference": "saga"} | FEW, 61, 63),
    "saga, filling": ({"inference": "saga"} | FEW, 3, 12),
    "lbfgs": ({"inference": LbfgsBlocks(**SHORT, learn_scales="transitions")} | FEW, 1, 2),
    "paper-batch": (
        {"inference": replace(BATCH, **SHORT | dict.fromkeys(STEPS, 1), n_draws=4)} | FEW, 1, 2,
    ),
    "paper-stochastic": (
        {"inference": replace(PRESETS["paper-stochastic"].optimizer, n_draws=30)} | FEW, 9, 15,
    ),
    "mixture": (FEW | {"posterior": Mixture(2, n_inducing=5)}, 3, 8),
    "adam, kernel": ({"posterior": Inducing(n_inducing=5), "inference": Adam(learn_scales="all")}, 7, 14),
    "adam, remembering": (
        {"structure": OWN, "inference": Adam(n_draws=20, learn_scales="auto")} | FEW, 7, 12,
    ),
    "saga, remembering": (
        {"structure": OWN, "inference": replace(NAMED["saga"], n_draws=20)} | FEW, 9, 14,
    ),
    "no pairs": ({"prior": Prior(transition_sd=0)}, 1, 99),
    "full pairs": (
        FEW | {"inference": "adam", "posterior": Inducing(5, transition_covariance="full")}, 4, 8,
    ),
    "labels missing": ({"inference": "natural", "structure": "chain"} | FEW, 3, 6),
}  # fmt: skip


def test_roll_call() -> None:
    tried = {p.get("inference", "auto") for p, _, _ in CASES.values()}
    named = {name if isinstance(name, str) else name.name for name in tried}
    assert named == {*INFERENCE, "sgd"}, "a way to fit whose checkpoints are not tried"


def until(last: int, seen: list[StepInfo] | None = None) -> Any:
    def callback(info: StepInfo) -> bool:
        if seen is not None:
            seen.append(info)
        return info.iteration >= last

    return callback


def cut_off(at: int) -> Any:
    def callback(info: StepInfo) -> None:
        if info.iteration == at:
            raise CutOffError

    return callback


def labels(name: str, data: Generated) -> Any:
    y: list[Any] = [list(own) for own in data.y]
    if name == "labels missing":
        for own in y[1:]:
            own[0] = None if len(own) > 1 else own[0]
    return y


def outcome(model: StructuredGPClassifier) -> dict[str, Any]:
    log = model.training_log_
    names = ("trace", "elbo", "fresh_elbo", "stopped", "evaluations", "steps", "optimizer")
    return {name: log[name] for name in names}


def assert_same(one: StructuredGPClassifier, other: StructuredGPClassifier) -> None:
    a, b = (m.model_.posterior.state_dict() for m in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert outcome(one) == outcome(other)


# -- cut off and taken up again ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the .* optimiser stopped")
@pytest.mark.parametrize("name", CASES)
def test_the_same_to_the_last_bit(name: str, data: Generated, tmp_path: Path) -> None:
    """As a fit that was never cut off. Natural gradients forget where they last were, and cannot take back
    the one step after: the same if that step is not taken back, as here."""
    parameters, at, last = CASES[name]
    y, path = labels(name, data), tmp_path / "checkpoint"

    def make() -> StructuredGPClassifier:
        return StructuredGPClassifier(n_draws=2, **parameters)

    whole = make().fit(data.X, y, callback=until(last))
    with pytest.raises(CutOffError):
        make().fit(data.X, y, callback=cut_off(at), checkpoint=path)
    assert path.exists()
    seen: list[StepInfo] = []
    again = make().fit(data.X, y, callback=until(last, seen), checkpoint=path)
    assert [info.iteration for info in seen] == list(range(at, at + len(seen)))
    assert len(seen) > 1
    assert_same(again, whole)
    assert not path.exists()


def test_again_and_again(data: Generated, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    whole = StructuredGPClassifier(inference="natural", **FEW)
    whole.fit(data.X, data.y, callback=until(7))
    model = StructuredGPClassifier(inference="natural", **FEW)
    for at in (1, 2, 5):
        with pytest.raises(CutOffError):
            model.fit(data.X, data.y, callback=cut_off(at), checkpoint=str(path))
    assert_same(model.fit(data.X, data.y, callback=until(7), checkpoint=str(path)), whole)


@pytest.mark.parametrize("at", [1, 2])
def test_early_stopping_remembers_the_best(at: int, data: Generated, tmp_path: Path) -> None:
    dev = data.X[:3], [["L0"] * len(y) for y in data.y[:3]]
    parameters = {"inference": "adam", "n_draws": 8} | FEW
    fit = functools.partial(
        StructuredGPClassifier(**parameters).fit, data.X, data.y, *dev, early_stopping=True
    )
    whole = copy.copy(fit())
    n = len(whole.training_log_["steps"])
    assert whole.training_log_["stopped"] == "interrupted"
    assert n > at
    path = tmp_path / "checkpoint"
    with pytest.raises(CutOffError):
        fit(callback=cut_off(n - at), checkpoint=path)
    assert_same(fit(checkpoint=path), whole)


def test_a_warm_start_that_is_cut_off(data: Generated, tmp_path: Path) -> None:
    def fit(**options: Any) -> StructuredGPClassifier:
        model = StructuredGPClassifier(n_draws=2, warm_start=True)
        model.fit(data.X[:4], data.y[:4])
        return model.fit(data.X, data.y, **options)

    path = tmp_path / "checkpoint"
    with pytest.raises(CutOffError):
        fit(callback=cut_off(1), checkpoint=path)
    assert_same(fit(checkpoint=path), fit())


SCRIPT = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import structgp.inference.checkpoint
from structgp import Prior, StructuredGPClassifier
from benchmarks.generate import generate
structgp.inference.checkpoint.Checkpoint.__init__.__defaults__ = (0.0,)
data = generate(6, n_labels=3, n_values=4, n_templates=2, mean_length=3, strength=2.0, seed=2)
def stop(info):
    if info.iteration == 2:
        os.kill(os.getpid(), signal.SIGKILL)
model = StructuredGPClassifier(n_draws=2, prior=Prior(data_weight=1))  # nothing to choose
model.fit(data.X, data.y, callback=stop, checkpoint=sys.argv[1])
"""


def test_a_process_that_is_killed(data: Generated, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    seen: list[StepInfo] = []
    model, other = (StructuredGPClassifier(n_draws=2, prior=Prior(data_weight=1)) for _ in range(2))
    model.fit(data.X, data.y, checkpoint=path, callback=until(99, seen))
    assert seen[0].iteration == 2
    assert_same(model, other.fit(data.X, data.y))


def test_time_goes_on_from_where_it_was(data: Generated, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def slow(info: StepInfo) -> None:
        time.sleep(0.1)
        if info.iteration == 2:
            raise CutOffError

    with pytest.raises(CutOffError):
        StructuredGPClassifier(n_draws=2).fit(data.X, data.y, callback=slow, checkpoint=path)
    model = StructuredGPClassifier(n_draws=2).fit(data.X, data.y, checkpoint=path)
    assert model.training_log_["seconds"] > 0.2


# -- the file ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(data: Generated, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a fit that was cut off has left."""
    path = tmp_path_factory.mktemp("left") / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structgp.plan.run, "Checkpoint", functools.partial(Checkpoint, seconds=0.0))
        with pytest.raises(CutOffError):
            StructuredGPClassifier(n_draws=2).fit(
                data.X, data.y, sample_weight=np.ones(6), callback=cut_off(2), checkpoint=path
            )
    return path.read_bytes()


@pytest.fixture
def left(content: bytes, tmp_path: Path) -> Path:
    """A file of that, one's own."""
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    return path


def fit(data: Generated, path: Path, X: Any = None, y: Any = None, **parameters: Any) -> Any:
    weight = parameters.pop("weight", np.ones(6))
    model = StructuredGPClassifier(**({"n_draws": 2} | parameters))
    return model.fit(
        data.X if X is None else X, data.y if y is None else y, sample_weight=weight, checkpoint=path
    )


def renamed(y: list[list[str]]) -> list[list[str]]:
    return [[f"X{label}" for label in own] for own in y]


def other_features(X: list[Any]) -> list[Any]:
    return [[("v0", token[1]) for token in x] for x in X]


def cut_elsewhere(items: list[Any]) -> list[Any]:
    """The same tokens, in sequences that end elsewhere."""
    lengths = [len(x) for x in items]
    order = np.argsort(lengths, kind="stable").tolist()
    assert sorted(lengths) != lengths
    flat = [token for x in items for token in x]
    found, start = [], 0
    for i in order:
        found.append(flat[start : start + lengths[i]])
        start += lengths[i]
    return found


OTHERS: dict[str, Any] = {
    "parameters": lambda d: {"prior": Prior(transition_sd=1.0)},
    "optimiser": lambda d: {"inference": SecondOrder(tolerance=0.5)},
    "kind of optimiser": lambda d: {"inference": Natural()},
    "labels": lambda d: {"y": [["L0"] * len(y) for y in d.y[:3]] + d.y[3:]},
    "names of labels": lambda d: {"y": renamed(d.y)},
    "features": lambda d: {"X": other_features(d.X)},
    "weights": lambda d: {"weight": np.full(6, 2.0)},
    "no weights": lambda d: {"weight": None},
    "bounds of sequences": lambda d: {"X": cut_elsewhere(d.X), "y": cut_elsewhere(d.y)},
    "order": lambda d: {"X": d.X[::-1], "y": d.y[::-1]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_of_another_fit(name: str, left: Path, data: Generated) -> None:
    before = left.read_bytes()
    with pytest.raises(InputError, match=r": of other data or other parameters; remove it") as caught:
        fit(data, left, **OTHERS[name](data))
    assert caught.value.place == str(left)
    assert left.read_bytes() == before


def test_of_an_optimiser_with_other_values(data: Generated, tmp_path: Path) -> None:
    """Given as an object, which is no plain parameter."""
    path = tmp_path / "checkpoint"
    with pytest.raises(CutOffError):
        StructuredGPClassifier(inference=SecondOrder(), n_draws=2).fit(
            data.X, data.y, callback=cut_off(2), checkpoint=path
        )
    for other in (SecondOrder(tolerance=0.5), Minibatch()):
        with pytest.raises(InputError, match="of other data or other parameters"):
            fit(data, path, weight=None, inference=other)
    fit(data, path, weight=None, inference=SecondOrder())


def test_the_same_fit_is_the_same(left: Path, data: Generated) -> None:
    lists = [[list(token) for token in x] for x in data.X]
    fit(data, left, X=lists, weight=[1] * 6, n_draws=np.int64(2))
    assert not left.exists()


def flip(content: bytes, n: int) -> bytes:
    return content[:n] + bytes([content[n] ^ 1]) + content[n + 1 :]


DAMAGES: dict[str, Any] = {
    "cut short": lambda content: content[: len(content) // 2],
    "a bit of a tensor": lambda content: flip(content, len(content) - 5),
    "a bit of the tree": lambda content: flip(content, content.index(b"elapsed") + 3),
    "nothing": lambda content: b"",
    "a text": lambda content: b"my notes",
    "another program's": lambda content: safetensors.torch.save({"a": torch.ones(1)}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file(name: str, left: Path, data: Generated) -> None:
    left.write_bytes(DAMAGES[name](left.read_bytes()))
    with pytest.raises(InputError, match=r": no checkpoint, or a damaged one; remove it$"):
        fit(data, left)


def test_another_version(left: Path, data: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structgp.inference.checkpoint, "FORMAT", structgp.inference.checkpoint.FORMAT + 1)
    with pytest.raises(InputError, match=r": a checkpoint of another version; remove it$"):
        fit(data, left)


def test_a_place_that_cannot_be_written_to(data: Generated, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written \(No such file"):
        fit(data, tmp_path / "no" / "folder")


def test_no_checkpoint_no_file(data: Generated, tmp_path: Path) -> None:
    fit(data, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
    StructuredGPClassifier(n_draws=2).fit(data.X, data.y)


def test_nothing_is_unpickled(left: Path, data: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a checkpoint is no code")

    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, never)
    fit(data, left)


def test_a_write_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.0]
    monkeypatch.setattr(structgp.inference.checkpoint.time, "monotonic", lambda: now[0])
    path = tmp_path / "checkpoint"
    checkpoint = Checkpoint(path, "mine")
    assert checkpoint.seconds == 5.0
    written = []
    for second in (1, 3, 5, 7, 8, 11, 12.5):
        now[0] = second
        path.unlink(missing_ok=True)
        checkpoint.write(nn.Linear(1, 1), torch.Generator(), Reached(None, [], 0.0, {}))
        if path.exists():
            written.append(second)
    assert written == [7, 12.5]


# -- what it can hold ----------------------------------------------------------------------------------


def round_trip(value: Any, module: nn.Module | None = None) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    module = module or nn.Linear(1, 1)
    names = {id(p): name for name, p in module.named_parameters()}
    tree = json.loads(json.dumps(_pack(value, tensors, names)))
    return _Unpack(tensors, dict(module.named_parameters()), torch.Generator())(tree)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 1.5, float("inf"), -float("inf"), "text", [], (), {}, [1, (2, [None])],
        {1: "a", "b": (2.0,)}, {"tensor": 3}, StepInfo(3, -1.5, 7, True),
        [Plateau(3, 0.1, [1.0], mean=1.0)],
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values(value: Any) -> None:
    found = round_trip(value)
    assert found == value
    assert type(found) is type(value)


def test_tensors_and_generators() -> None:
    given = torch.arange(6.0).view(2, 3).T
    assert torch.equal(round_trip([given])[0], given)
    empty = torch.zeros(0, 3, dtype=torch.int64)
    assert round_trip(empty).shape == (0, 3)
    generator = torch.Generator().manual_seed(3)
    torch.randn(5, generator=generator)
    found = round_trip(generator)
    assert torch.equal(torch.randn(4, generator=found), torch.randn(4, generator=generator))


def test_torchs_optimisers() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(
        [{"params": [module.weight], "lr": 0.3}, {"params": [module.bias], "lr": 0.1}], betas=(0.8, 0.95)
    )
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    module.bias.requires_grad_(False)  # as a kernel's are before a fit
    again = round_trip(optimizer, module)
    assert module.bias.requires_grad
    assert [g["lr"] for g in again.param_groups] == [0.3, 0.1]
    assert again.param_groups[0]["betas"] == (0.8, 0.95)
    for p in module.parameters():
        for name, value in optimizer.state[p].items():
            assert torch.equal(again.state[p][name], value)


CLOCKS = [
    LbfgsBlocksState(1, {}, 40.0),
    SagaState(torch.Generator(), Plateau(1, 0.1), 40.0, [1.0, 1.0], [1.0, 1.0]),
]


@pytest.mark.parametrize("state", CLOCKS, ids=lambda s: type(s).__name__)
def test_clocks_that_begin_anew(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute had passed, and a minute has, whatever the next machine's clock says."""
    now = [100.0]
    monkeypatch.setattr(structgp.inference.checkpoint.time, "monotonic", lambda: now[0])
    tensors: dict[str, torch.Tensor] = {}
    tree = _pack(state, tensors, {})
    now[0] = 5.0
    assert _Unpack(tensors, {}, torch.Generator())(tree).began == 5.0 - 60.0


def test_states_with_a_time_limit_say_which_field_is_a_clock() -> None:
    for optimizer in (LbfgsBlocks, Saga):
        assert "max_seconds" in {f.name for f in dataclasses.fields(optimizer)}
    for state in CLOCKS:
        marked = [f.name for f in dataclasses.fields(state) if f.metadata.get("clock")]
        assert marked == ["began"]


@dataclasses.dataclass
class Foreign:
    command: str = "rm"


def test_what_it_does_not_build() -> None:
    tree = _pack(Foreign(), {}, {})
    unpack = _Unpack({}, {}, torch.Generator())
    with pytest.raises(FormError, match=r"test_checkpoint\.Foreign is not a state of a fit"):
        unpack(tree)
    for module, name in (
        ("os", "system"),
        ("structgpx", "f"),
        ("structgp", "load"),
        ("structgp.data.atomic", "atomic_write"),
        ("structgp.__main__", "main"),
        ("structgp.data.sources.readers", "Stream"),
        ("structgp.inference.checkpoint", "Path"),
        ("structgp.inference.checkpoint", "nothing"),
    ):
        with pytest.raises(FormError, match="is not a state of a fit"):
            unpack({"dataclass": [module, name, {}]})


def test_natural_gradients_leave_their_last_look_behind() -> None:
    """It is as large as the data, and all it is good for is to take one step back."""
    last: Any = object()
    state = NaturalState(torch.Generator(), Plateau(1, 0.1), 0.5, [None], last=last, iteration=3)
    again = round_trip(state)
    assert (again.last, again.iteration, again.rate) == (None, 3, 0.5)


def test_what_it_cannot_hold() -> None:
    with pytest.raises(TypeError, match="a checkpoint cannot hold a set"):
        _pack([{1, 2}], {}, {})
