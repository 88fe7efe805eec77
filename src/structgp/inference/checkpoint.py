"""Checkpoints: posterior, optimiser, random numbers and history in a file, from which a killed run
continues.

What an optimiser carries from step to step is a tree of dataclasses, lists and tensors. It is written as
one safetensors file with the tree as JSON, as a model is, and is read without pickle: only dataclasses of
this package are built from it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from structgp.data.atomic import atomic_write
from structgp.errors import InputError, StructgpWarning
from structgp.inference import StepInfo
from structgp.inference.latents import Sites

FORMAT = 4

LARGEST_SHARE = 0.05
"""Share of the time that writing checkpoints may take."""


@dataclass
class Reached:
    """How far a fit has come. state : of the optimiser; elapsed : seconds; memory : of the problem; best :
    of early stopping."""

    state: Any
    steps: list[StepInfo]
    elapsed: float
    memory: dict[int, Sites]
    best: Any = None


@dataclass
class Checkpoint:
    """path : the file. fingerprint : of the data and parameters, which a file has to agree with. seconds :
    between two writes, at least; longer where writing would take more than its share of the time."""

    path: str | Path
    fingerprint: str
    seconds: float = 5.0
    _written: float = field(default_factory=lambda: time.monotonic(), init=False)
    _took: float = field(default=0.0, init=False)

    def write(self, posterior: nn.Module, generator: torch.Generator, reached: Reached) -> bool:
        """After a step; does nothing if the last write was a moment ago. Returns whether it wrote."""
        now = time.monotonic()
        if now - self._written < max(self.seconds, self._took / LARGEST_SHARE):
            return False
        tensors: dict[str, Tensor] = {}
        names = {id(p): name for name, p in posterior.named_parameters()}
        parts = {"posterior": dict(posterior.state_dict()), "reached": reached, "generator": generator}
        tree = {name: _pack(part, tensors, names) for name, part in parts.items()}
        text = json.dumps({"format": FORMAT, "fingerprint": self.fingerprint} | tree)
        content = safetensors.torch.save(tensors, {"checkpoint": text, "digest": _digest(text, tensors)})
        try:
            with atomic_write(self.path, "wb") as file:
                file.write(content)
        except InputError as error:
            # A fit that goes on is worth more than the file.
            warnings.warn(f"no more checkpoints: {error}", StructgpWarning, stacklevel=2)
            self.seconds = math.inf
            return False
        self._written = time.monotonic()
        self._took = 0.0 if self.seconds == 0 else self._written - now
        return True

    @property
    def is_there(self) -> bool:
        """True if the file exists and belongs to this data and these parameters."""
        try:
            with safetensors.safe_open(str(self.path), framework="pt") as file:
                tree = json.loads((file.metadata() or {}).get("checkpoint", "{}"))
        except (OSError, safetensors.SafetensorError):
            return False
        return bool(tree.get("fingerprint") == self.fingerprint)

    def read(self, posterior: nn.Module, generator: torch.Generator) -> Reached | None:
        """What was reached; the posterior and the generator are set, in place. None where there is no
        file."""
        if not Path(self.path).exists():
            return None
        try:
            with safetensors.safe_open(str(self.path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError):
            metadata, tensors = {}, {}
        text = metadata.get("checkpoint", "{}")
        if metadata.get("digest") != _digest(text, tensors):
            raise InputError(str(self.path), "no checkpoint, or a damaged one", "remove it")
        tree = json.loads(text)
        if tree["format"] != FORMAT:
            raise InputError(str(self.path), "a checkpoint of another version", "remove it")
        if tree["fingerprint"] != self.fingerprint:
            remedy = "remove it, or name another file"
            raise InputError(str(self.path), "of other data or other parameters", remedy)
        unpack = _Unpack(tensors, dict(posterior.named_parameters()), generator)
        posterior.load_state_dict(unpack(tree["posterior"]))
        reached: Reached = unpack(tree["reached"])
        unpack(tree["generator"])
        return reached

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _pack(value: Any, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    """JSON that stands for ``value``; its tensors go to ``tensors``, parameters by name (``names``)."""

    def keep(tensor: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    def inner(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": keep(value)}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [inner(v) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[inner(k), inner(v)] for k, v in value.items()]}
        if isinstance(value, torch.Generator):
            return {"generator": keep(value.get_state())}
        if isinstance(value, torch.optim.Adam):
            groups = [[names[id(p)] for p in g["params"]] for g in value.param_groups]
            return {"optimizer": [groups, inner(value.state_dict())]}
        if not dataclasses.is_dataclass(value):
            raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")
        kind, fields = type(value), {}
        for f in dataclasses.fields(value):
            field = getattr(value, f.name)
            if f.metadata.get("clock"):  # kept as how long ago: a clock begins anew with the machine
                fields[f.name] = {"ago": time.monotonic() - field}
            elif f.init and f.metadata.get("checkpoint", True):
                fields[f.name] = inner(field)
        return {"dataclass": [kind.__module__, kind.__qualname__, fields]}

    return inner(value)


@dataclass
class _Unpack:
    """The value that a tree of ``_pack`` stands for. generator : of the fit, which has one, whoever holds
    it."""

    tensors: dict[str, Tensor]
    parameters: dict[str, nn.Parameter]
    generator: torch.Generator

    def __call__(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, value),) = tree.items()
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(self(v) for v in value)
        if kind == "dict":
            return {self(k): self(v) for k, v in value}
        if kind == "ago":
            return time.monotonic() - value
        if kind == "tensor":
            # A copy: how a tensor of the file lies in memory may change sums in their last bit.
            return self.tensors[value].clone().to(next(iter(self.parameters.values())).device)
        if kind == "generator":
            return self.generator.set_state(self.tensors[value].to(torch.uint8))
        return self._optimizer(*value) if kind == "optimizer" else self._dataclass(*value)

    def _optimizer(self, names: list[list[str]], state: Any) -> torch.optim.Adam:
        groups = [{"params": [self.parameters[n] for n in group]} for group in names]
        for parameter in (p for group in groups for p in group["params"]):
            parameter.requires_grad_(True)  # a kernel's do not, until an optimiser moves them
        made = torch.optim.Adam(groups, lr=0.1)
        made.load_state_dict(self(state))
        return made

    def _dataclass(self, module: str, name: str, fields: dict[str, Any]) -> Any:
        if not module.startswith("structgp."):
            raise InputError("checkpoint", f"{module} does not belong to structgp", "remove the file")
        kind = getattr(importlib.import_module(module), name, None)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise InputError("checkpoint", f"{module}.{name} is not a dataclass", "remove the file")
        return kind(**{k: self(v) for k, v in fields.items()})
