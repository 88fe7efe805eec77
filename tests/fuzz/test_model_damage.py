"""Model files whose digest fits and whose content does not: each is refused in one line, in little memory,
before anything is built from it."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.container import Container, Tensor

import structgp
from fuzz import damage, models
from structgp import ModelFileError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One small model of some kinds, as bytes."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name in ("weights", "dense", "inducing", "annotators"):
        models.fitted(name, random.Random(0)).save(folder / name)
        found[name] = (folder / name).read_bytes()
    return found


def changed(content: bytes, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> bytes:
    """The file after a change to its JSON and tensors, signed again."""
    found = Container.read(content)
    header = json.loads(found.metadata["structgp"])
    change(header, found.tensors)
    found.metadata["structgp"] = json.dumps(header)
    found.sign("structgp")
    return found.write()


def test_what_is_not_changed_is_read(files: dict[str, bytes], tmp_path: Path) -> None:
    """The container of these tests writes and signs what structgp reads."""
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(changed(content, lambda *_: None))
        assert models.answers(str(path), name) == "answered"


def _kernel(header: dict[str, Any]) -> Any:
    return header["posterior"][0]["kernel"]["arguments"]


def _set(value: Any, *path: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(header: dict[str, Any], _: dict[str, Tensor]) -> None:
        owner: Any = header
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = value

    return change


def _values(name: str, value: float) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        numbers = torch.frombuffer(bytearray(tensors[name].data), dtype=torch.float64)
        tensors[name].data = torch.full_like(numbers, value).numpy().tobytes()

    return change


CASES: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], None]]] = {
    "a kernel of 10^9 columns": ("dense", _set(10**9, "posterior", 0, "kernel", "arguments", "n_columns")),
    "10^9 length-scales": (
        "dense",
        lambda h, _: _kernel(h)["smooth"]["kernel"]["arguments"].update(ard_num_dims=10**9),
    ),
    "10^9 inducing inputs": ("dense", _set(10**9, "posterior", 0, "kernel", "arguments", "n_inducing")),
    "10^9 values": ("weights", lambda h, _: _kernel(h)["sizes"].update(list=[10**9, 3])),
    "a rank of 10^9": (
        "inducing",
        _set({"covariance": "low-rank", "rank": 10**9}, "posterior", 0, "options"),
    ),
    "10^9 components": ("inducing", _set({"n_components": 10**9}, "posterior", 0, "options")),
    "10^9 labels of a table": ("weights", _set([10**9, 10**9], "posterior", 1, "labels")),
    "10^9 dense columns": ("dense", _set(10**9, "encoder", "width")),
    "10^9 draws": ("weights", _set(10**9, "n_draws")),
    "10^9 draws as a parameter": ("weights", _set(10**9, "extra", "params", "n_draws")),
    "no labels": ("weights", _set([], "labels")),
    "a label twice": ("weights", _set(["O", "O"], "labels")),
    "one label more": ("weights", _set(["B-X", "O", "P"], "labels")),
    "labels that are numbers": ("weights", _set([1, 2], "labels")),
    "constraints of other labels": ("weights", _set([1], "constraints", "starts")),
    "values that are a flag": ("weights", _set(True, "encoder", "values")),
    "a template less": ("weights", lambda h, _: h["encoder"]["templates"].pop()),
    "an unknown form": ("weights", _set("trees", "encoder", "form")),
    "parameters of another program": ("weights", _set({"depth": 3}, "extra", "params")),
    "a calibration of text": ("weights", _set("", "calibration", "quartiles")),
    "a count of minus infinity": ("annotators", _set(float("-inf"), "annotators", "counts", 0, 0, 1, 0)),
    "annotators of other labels": ("annotators", _set(["x"], "annotators", "classes")),
    "a threshold of text": ("weights", _set("high", "info", "threshold")),
    "a bound that is a list": ("weights", _set([0, 0], "info", "fresh_elbo")),
    "NaN as a mean": ("weights", _values("node.m", float("nan"))),
    "an infinite length-scale": ("dense", _values("node.kernel.log_length", float("inf"))),
    "a scale that overflows": ("weights", _values("node.kernel.log_scale", 1e4)),
    "a tensor less": ("weights", lambda _, t: t.pop("node.m")),
    "a tensor more": ("weights", lambda _, t: t.update(x=Tensor("F64", [1], bytes(8)))),
    "8-bit floats": ("weights", lambda _, t: t.update(x=Tensor("F8_E4M3", [8], bytes(8)))),
    "500 dimensions": ("weights", lambda _, t: t.update(x=Tensor("F64", [1] * 500, bytes(8)))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_signed_file_that_does_not_fit(case: str, files: dict[str, bytes], tmp_path: Path) -> None:
    name, change = CASES[case]
    path = tmp_path / "model"
    path.write_bytes(changed(files[name], change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError) as caught:
        structgp.load(path)
    assert str(caught.value).startswith(f"{path}: does not hold ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, "kilobytes"


def test_a_log_without_bounds(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(changed(files["weights"], lambda h, _: h["info"].pop("elbo")))
    assert models.answers(str(path), "weights") == "answered"
    assert "evidence lower bound" not in str(structgp.describe(structgp.load(path)))


def test_brackets_without_end(files: dict[str, bytes], tmp_path: Path) -> None:
    found = Container.read(files["weights"])
    for text, says in (("[" * 10**5, "nested too deeply"), ("{", "not JSON"), ("[]", "not a JSON object")):
        found.metadata["structgp"] = text
        found.sign("structgp")
        (tmp_path / "model").write_bytes(found.write())
        with pytest.raises(ModelFileError, match=says):
            structgp.load(tmp_path / "model")


def test_scores_that_overflow_are_not_answered(files: dict[str, bytes], tmp_path: Path) -> None:
    """What only some features make overflow is found when those are met."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        numbers = torch.frombuffer(bytearray(tensors["node.m"].data), dtype=torch.float64).clone()
        numbers[:-1] = 1e300
        tensors["node.m"].data = numbers.numpy().tobytes()

    (tmp_path / "model").write_bytes(changed(files["weights"], change))
    model = structgp.load(tmp_path / "model")
    with pytest.raises(structgp.InputError, match="scores are not finite, or beyond 1e"):
        model.predict_marginals([[["a", "A"]]])


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_not_a_regular_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = {"fifo": tmp_path / "pipe", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(ModelFileError, match="a folder" if kind == "folder" else "not a regular file"):
        structgp.load(path)


@pytest.mark.parametrize("signed", [True, False])
def test_random_damage(signed: bool, files: dict[str, bytes], tmp_path: Path) -> None:
    """Some of the campaign (``make fuzz``): a model that is read answers, others are refused in a line."""
    path, seen = tmp_path / "model", set()
    for i in range(60):
        name = list(files)[i % len(files)]
        content, what = damage.container(files[name], "structgp", signed, random.Random(i))
        path.write_bytes(content)
        try:
            found = models.answers(str(path), name).partition(":")[0]
        except Exception as error:
            raise AssertionError(f"{name}, {what}") from error
        seen.add(found)
        if not signed and found == "answered":
            assert Container.read(content) == Container.read(files[name]), "a change that changed nothing"
    assert "refused" in seen
    assert "answered" in seen or not signed
