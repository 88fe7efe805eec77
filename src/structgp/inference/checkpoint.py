"""Checkpoints: files that hold posterior, optimiser, random numbers and history, from which a killed run
continues.

The state that an optimiser carries from step to step is a tree of dataclasses, lists and tensors. Like a
model, it is written as one safetensors file with the tree as JSON, and is read without pickle: only
dataclasses of the modules in ``ROOMS`` are built from it, with fields of the declared types. Whoever can
write the file can also compute its digest, so nothing in it is believed before it is checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import stat
import sys
import time
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_origin, get_type_hints

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from structgp.answers.file_checks import check_values, read_tensors
from structgp.data.atomic import atomic_write
from structgp.data.json_form import FormError, check_form, read_object
from structgp.errors import InputError, StructgpWarning
from structgp.inference import StepInfo
from structgp.inference.latents import Sites

FORMAT = 5

KINDS = ("list", "tuple", "dict", "ago", "tensor", "generator", "optimizer", "dataclass")
"""Kinds of nodes in a tree, beside plain values."""

ROOMS = ("structgp.inference.", "structgp.paper.", "structgp.gp.")
"""Prefixes of the modules whose dataclasses a state may contain."""

MOST_DRAWS = 1 << 20
"""Largest number of draws that a state may ask for."""

LARGEST_SHARE = 0.05
"""Largest share of the time that writing checkpoints may take."""


@dataclass
class Reached:
    """How far a fit has come. state : the optimiser's state. elapsed : seconds so far. memory :
    ``Problem.memory``. best : the best posterior of early stopping, if there is any."""

    state: Any
    steps: list[StepInfo]
    elapsed: float
    memory: dict[int, Sites]
    best: Any = None


class Keeper(Protocol):
    """A place that keeps the state of a fit. ``Checkpoint`` documents the methods."""

    def write(self, posterior: nn.Module, generator: torch.Generator, reached: Reached) -> bool: ...

    def read(self, posterior: nn.Module, generator: torch.Generator) -> Reached | None: ...

    def unfit(self, error: Exception) -> Exception: ...


@dataclass
class Checkpoint:
    """path : the file. fingerprint : identifies the data and parameters; a file must have the same one.
    seconds : least time between two writes; more where writing would take more than its share of the
    time."""

    path: str | Path
    fingerprint: str
    seconds: float = 5.0
    _written: float = field(default_factory=lambda: time.monotonic(), init=False)
    _took: float = field(default=0.0, init=False)

    def write(self, posterior: nn.Module, generator: torch.Generator, reached: Reached) -> bool:
        """Writes the state after a step, unless the last write was a moment ago. Returns True if it
        wrote."""
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
            # Going on with the fit is worth more than the file.
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
            with safetensors.safe_open(_regular(self.path), framework="pt") as file:
                tree = read_object((file.metadata() or {}).get("checkpoint", "{}"))
        except (OSError, safetensors.SafetensorError, FormError):
            return False
        return bool(tree.get("fingerprint") == self.fingerprint)

    def read(self, posterior: nn.Module, generator: torch.Generator) -> Reached | None:
        """Reads how far the fit has come; sets the posterior and the generator, in place. None if there is
        no file."""
        if not Path(self.path).exists():
            return None
        try:
            with safetensors.safe_open(_regular(self.path), framework="pt") as file:
                metadata, tensors = file.metadata() or {}, read_tensors(file)
        except (OSError, safetensors.SafetensorError, FormError):
            metadata, tensors = {}, {}
        text = metadata.get("checkpoint", "{}")
        if metadata.get("digest") != _digest(text, tensors):
            raise InputError(str(self.path), "no checkpoint, or a damaged one", "remove it")
        try:
            tree = read_object(text)
            check_form(tree, {"format": int, "fingerprint": str})
        except FormError as error:
            raise self.unfit(error) from None
        if tree["format"] != FORMAT:
            raise InputError(str(self.path), "a checkpoint of another version", "remove it")
        if tree["fingerprint"] != self.fingerprint:
            remedy = "remove it, or name another file"
            raise InputError(str(self.path), "of other data or other parameters", remedy)
        unpack = _Unpack(tensors, dict(posterior.named_parameters()), generator)
        try:
            state, reached = unpack(tree["posterior"]), unpack(tree["reached"])
            check_values(state)
            posterior.load_state_dict(state)
            if not isinstance(reached, Reached) or not all(isinstance(s, StepInfo) for s in reached.steps):
                raise FormError("it does not say what was reached")
            unpack(tree["generator"])
        except Exception as error:  # whatever the parts of a damaged file make a constructor raise
            raise self.unfit(error) from error
        return reached

    def unfit(self, error: Exception) -> InputError:
        """The error for a file whose digest is right and whose content is not."""
        told = str(error).split("\n")[0][:200] if isinstance(error, FormError) else type(error).__name__
        return InputError(str(self.path), f"a fit cannot go on from it ({told})", "remove it")

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)


def _regular(path: str | Path) -> str:
    """The path of a regular file; FormError for anything else, such as a pipe, on which a read may wait
    forever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FormError("not a regular file")
    return str(path)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _pack(value: Any, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    """JSON that represents ``value``. Its tensors are added to ``tensors``; an optimiser's parameters are
    given by name (``names``)."""

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
    """Builds the value that a tree of ``_pack`` represents. generator : the only one of the fit, which
    every generator in the tree stands for."""

    tensors: dict[str, Tensor]
    parameters: dict[str, nn.Parameter]
    generator: torch.Generator

    def __call__(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, value),) = tree.items()
        if kind not in KINDS:
            raise FormError("values of an unknown kind")
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(self(v) for v in value)
        if kind == "dict":
            return {self(k): self(v) for k, v in value}
        if kind == "ago":
            return time.monotonic() - value
        if kind == "tensor":
            # A copy: how a tensor of the file is aligned in memory may change the last bit of sums.
            found = self.tensors[value]
            return found.clone().to(next(iter(self.parameters.values())).device)
        if kind == "generator":
            return self.generator.set_state(self.tensors[value].to(torch.uint8))
        return self._optimizer(*value) if kind == "optimizer" else self._dataclass(*value)

    def _optimizer(self, names: list[list[str]], state: Any) -> torch.optim.Adam:
        groups = [{"params": [self.parameters[n] for n in group]} for group in names]
        for parameter in (p for group in groups for p in group["params"]):
            parameter.requires_grad_(True)  # a kernel's do not require it until an optimiser moves them
        made = torch.optim.Adam(groups, lr=0.1)
        made.load_state_dict(self(state))
        return made

    def _dataclass(self, module: str, name: str, fields: dict[str, Any]) -> Any:
        kind = getattr(sys.modules.get(module), name, None) if module.startswith(ROOMS) else None
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module):
            raise FormError(f"{module}.{name} is not a state of a fit"[:100])
        found = {k: self(v) for k, v in fields.items()}
        hints = get_type_hints(kind)
        for field_name, value in found.items():
            if not _has_type(value, hints[field_name]):
                raise FormError(f"{name}.{field_name} is of another type"[:100])
        n_draws = found.get("n_draws")
        if isinstance(n_draws, int) and n_draws > MOST_DRAWS:
            raise FormError(f"{name}.n_draws is too large"[:100])
        return kind(**found)


def _has_type(value: Any, hint: Any) -> bool:
    """True if a value fits the declared type of a field, as far as single types tell; an int may stand for
    a float."""
    hint = get_origin(hint) or hint
    if hint in (Any, typing.Union, types.UnionType):
        return True
    if hint is float:
        return isinstance(value, int | float)
    if hint is int:
        return type(value) is int
    return not isinstance(hint, type) or isinstance(value, hint)
