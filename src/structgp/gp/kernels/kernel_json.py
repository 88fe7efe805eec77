"""Turns kernels into JSON plus named tensors and back, so that a model file needs no pickle.

A kernel is described by its class, the constructor arguments that can be read off it, and its
children; its parameters travel as a ``state_dict``. Only classes of ``gpytorch.kernels`` and
``structgp.gp.kernels`` are ever constructed, so a model file cannot make the reader run anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gpytorch.kernels
import torch
from gpytorch.kernels import Kernel

from structgp.errors import InputError
from structgp.gp.kernels import block_sum, dense, relevance, sparse, template

_OURS = (
    block_sum.BlockSumKernel,
    dense.DenseKernel,
    relevance.RelevanceKernel,
    sparse.SparseLinearKernel,
    sparse.SparseRBFKernel,
    template.TemplateKernel,
)
_SCALARS = (bool, int, float, str, type(None))


def describe(kernel: Kernel) -> dict[str, Any]:
    """JSON description of ``kernel``; InputError if it could not be rebuilt from that."""
    if not _comes_back(kernel):
        # The last kernel at fault in this order contains no other one.
        *_, odd = (part for part in (kernel, *kernel.sub_kernels()) if not _comes_back(part))
        raise InputError(
            "kernel",
            f"a {type(odd).__name__} with these arguments cannot be saved",
            "build it from kernels of gpytorch.kernels and structgp.gp.kernels with plain arguments",
        )
    return _describe(kernel)


def _comes_back(kernel: Kernel) -> bool:
    """True if the kernel can be rebuilt from its description and its state."""
    try:
        copy = rebuild(_describe(kernel))
        copy.load_state_dict(kernel.state_dict())
    except Exception:  # whatever a foreign constructor raises, the answer is the same
        return False
    return _same_code(copy, kernel)


def rebuild(description: Mapping[str, Any]) -> Kernel:
    """The kernel that a description stands for, with fresh parameters."""
    known = _known_classes()
    if description["class"] not in known:
        raise InputError("kernel", f"unknown kernel {description['class']!r}", "update structgp")
    kernel_class = known[description["class"]]
    arguments = {name: _decode(value) for name, value in description["arguments"].items()}
    positional = [rebuild(child) for child in description["positional"]]
    return kernel_class(*positional, **arguments).double()


def _same_code(copy: Kernel, kernel: Kernel) -> bool:
    """True if equal parameters make the two kernels equal functions: they contain the same classes and,
    since constraints are not part of a description, the same transforms of raw parameters."""
    return _describe(copy) == _describe(kernel) and _code(copy) == _code(kernel)


def _code(kernel: Kernel) -> list[Any]:
    found = []
    for name, part in kernel.named_modules(remove_duplicate=False):
        transform = getattr(part, "_transform", None)
        known = type(transform) if isinstance(transform, torch.nn.Module) else transform
        found.append((name, type(part), known))
    return found


def _known_classes() -> dict[str, type[Kernel]]:
    names = {name: getattr(gpytorch.kernels, name) for name in gpytorch.kernels.__all__}
    classes = {n: c for n, c in names.items() if inspect.isclass(c) and issubclass(c, Kernel)}
    return classes | {c.__name__: c for c in _OURS}


def _describe(kernel: Kernel) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    positional: list[Any] = []
    signature = inspect.signature(type(kernel).__init__).parameters
    for name, parameter in list(signature.items())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional = [_describe(child) for child in getattr(kernel, name)]
        elif parameter.kind is not parameter.VAR_KEYWORD and hasattr(kernel, name):
            value = _encode(getattr(kernel, name))
            if value is not None:
                arguments[name] = value
    for name in ("active_dims", "ard_num_dims"):
        value = _encode(getattr(kernel, name, None))
        if value is not None:
            arguments[name] = value
    return {"class": type(kernel).__name__, "arguments": arguments, "positional": positional}


def _encode(value: Any) -> Any:
    """JSON form of a constructor argument; None where it has none or stands for the default."""
    if isinstance(value, Kernel):
        return {"kernel": _describe(value)}
    if isinstance(value, torch.nn.ModuleList):
        return {"kernels": [_describe(child) for child in value]}
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return {"dims": value.tolist()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return {"list": [_encode(v) if not isinstance(v, _SCALARS) else v for v in value]}
    return value if isinstance(value, _SCALARS) else None


def _decode(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "kernel" in value:
        return rebuild(value["kernel"])
    if "kernels" in value:
        return [rebuild(child) for child in value["kernels"]]
    if "dims" in value:
        return tuple(value["dims"])
    return [
        tuple(v["list"]) if isinstance(v, Mapping) and "list" in v else _decode(v) for v in value["list"]
    ]
