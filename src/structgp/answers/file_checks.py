"""Checks of a model file before a model is built: the form of its JSON, and whether it fits the tensors.

Whoever writes a file can make its digest fit, so the digest says nothing about who wrote it. Whatever a
file holds, reading it here may raise nothing but a FormError, and allocate no more than the file's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from structgp.answers.ask import MOST_DRAWS
from structgp.data.json_form import NUMBER, WHOLE, FormError, check_form
from structgp.data.links import spans_of
from structgp.data.word_parts import PARTS
from structgp.structures import Spec
from structgp.structures.segments.span_scheme import SpanScheme

MOST_NUMBERS = 1_000_000
"""How many numbers a kernel may hold however few its file holds (8 MB): room for sizes without a stored
tensor."""

MOST_DIMENSIONS = 8
DTYPES = ("F64", "F32", "I64", "I32", "U8", "BOOL")

KERNEL: dict[str, Any] = {"class": str, "arguments": dict, "positional": [dict]}
BLOCK = {"template": str, "family": str, "labels": [WHOLE], "options": dict, "kernel?": KERNEL}
ENCODER = {
    "features": str,
    "form": str,
    "templates": [str],
    "values": [[str]],
    "vectors": [list],
    "attributes": [str],
    "has_sparse": bool,
    "width": WHOLE,
    "columns": [WHOLE],
    "parts?": (None, [WHOLE]),
}
FLAG = (bool, WHOLE)
RULES = {"follows": [[FLAG]], "starts": [FLAG], "ends": [FLAG], "more?": dict}
HELD_OUT = {"n_tokens": WHOLE, "n_folds": WHOLE, "token_error": NUMBER, "token_nll": NUMBER, "verdict": str}
INFO = {
    "plan?": {str: {"value": object, "reason": str}},
    "threshold?": (None, NUMBER),
    "decode?": (None, str),
    "length_quartiles?": (None, [NUMBER]),
    "label_counts?": {str: NUMBER},
    "error_ratio?": (None, [NUMBER]),
    "held_out?": (None, HELD_OUT),
    "elbo?": (None, NUMBER),
    "fresh_elbo?": (None, NUMBER),
    "kernel_scales?": (None, {str: (None, NUMBER, {str: NUMBER})}),
    "length_scales?": (None, NUMBER, [(None, NUMBER)]),
}
CALIBRATION = {
    "lengths": [WHOLE],
    "quartiles": [NUMBER],
    "targets": {str: [[NUMBER]]},
    "settings": {"n_draws": WHOLE, "shift": (None, [NUMBER])},
}
HEADER = {
    "version": str,
    "structure": dict,
    "predictor": (None, str),
    "by_values": bool,
    "posterior": [BLOCK],
    "encoder": ENCODER,
    "own": {str: ENCODER},
    "labels": [str],
    "integer_labels": bool,
    "constraints": (None, RULES),
    "n_draws": WHOLE,
    "seed": WHOLE,
    "spread": NUMBER,
    "calibration": (None, CALIBRATION),
    "info": INFO,
    "extra": dict,
}


def read_tensors(file: Any) -> dict[str, Tensor]:
    """The tensors of an open safetensors file; FormError, before reading, for a tensor that no model
    holds."""
    names = list(file.keys())
    for name in names:
        part = file.get_slice(name)
        shape, dtype = part.get_shape(), part.get_dtype()
        if dtype not in DTYPES:
            raise FormError(f"the tensor {name[:50]!r} has the type {dtype[:20]}")
        if len(shape) > MOST_DIMENSIONS:
            raise FormError(f"the tensor {name[:50]!r} has {len(shape)} dimensions")
    return {name: file.get_tensor(name) for name in names}


def check_header(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """FormError if the JSON has the wrong form, contradicts itself, or does not fit the tensors."""
    check_form(header, HEADER)
    labels = header["labels"]
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise FormError("labels must be two or more, all different")
    if not header["spread"] > 0 or header["n_draws"] > MOST_DRAWS:
        raise FormError(f"spread must be above 0, and n_draws at most {MOST_DRAWS:,}")
    threshold, decode = (header["info"].get(name) for name in ("threshold", "decode"))
    if decode not in (None, "f1", "accuracy", "sequence") or not 0 < (threshold or 0.5) <= 1:
        raise FormError("info does not say how to choose labels")
    check_values(tensors)
    for name, encoder in {"encoder": header["encoder"], **header["own"]}.items():
        _check_encoder(encoder, name, sum(t.numel() for t in tensors.values()))
    spec = Spec.from_json(header["structure"])
    expected = label_shapes(spec, labels)
    found = {block["template"]: tuple(block["labels"]) for block in header["posterior"]}
    if list(found) != list(expected) or len(found) < len(header["posterior"]):
        raise FormError("posterior and structure do not have the same templates")
    for name, shape in expected.items():
        left_out = name == "next" and spec.next is None and found[name] == (1, 1)
        if found[name] != shape and not left_out:
            raise FormError(f"the template {name[:50]!r} has scores for other labels")
    for block in header["posterior"]:
        _check_kernel_size(block, own_tensors(block["template"], tensors))
    _check_rules(header["constraints"], len(labels))


def label_shapes(spec: Spec, classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The shape of the joint labels of each template's tuples."""
    spans = spans_of(spec.layers, classes)
    found: dict[str, tuple[int, ...]] = {}
    for template in spec.templates:
        if template.rule == "length":
            found[template.name] = (len(SpanScheme.of(list(classes)).inside), template.longest + 1)
        else:
            layers = template.layers or ("",) * template.labels
            if not all(layer in spans for layer in layers):
                raise FormError(f"the template {template.name[:50]!r} has layers that do not exist")
            found[template.name] = tuple(stop - start for start, stop in (spans[w] for w in layers))
    if spec.is_chain:  # omitted transitions have scores of 0, or a single score that is never read
        found["next"] = (len(classes),) * 2
    return found


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """FormError for a tensor with values that no fit can produce."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        last = name.rpartition(".")[2]
        if last in ("lower_bound", "upper_bound"):  # bounds of a parameter of the user's kernel
            wrong = tensor.isnan()
        elif last == "log_amplitude":  # -inf where the block is silent
            wrong = ~(tensor <= 700)
        elif last.startswith("log_"):
            wrong = ~(tensor.abs() <= 700)
        else:
            wrong = ~tensor.isfinite()
        if bool(wrong.any()):
            raise FormError(f"the tensor {name[:50]!r} has values that are not finite, or too large")


def own_tensors(template: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one block, without the prefix of the template's name."""
    start = f"{template}."
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def check_block_size(numbers: int, template: str, tensors: Mapping[str, Tensor]) -> None:
    """FormError if a block would hold many more numbers than the file has for it. (Of triangular factors,
    only one half is stored.)"""
    stored = sum(t.numel() for t in own_tensors(template, tensors).values())
    if numbers > 4 * stored + 1000:
        raise FormError(f"the template {template[:50]!r} needs {numbers:,} numbers, and has {stored:,}")


def _check_encoder(encoder: Mapping[str, Any], name: str, stored: int) -> None:
    if encoder["form"] not in ("strings", "dicts", "dense", "sparse"):
        raise FormError(f"{name}.form is not known")
    if len(encoder["values"]) != len(encoder["templates"]):
        raise FormError(f"{name}.values and templates are not equally many")
    parts = encoder.get("parts") or []
    if parts and not (parts[0] < len(encoder["templates"]) and set(parts[1:]) <= set(range(len(PARTS)))):
        raise FormError(f"{name}.parts are not parts of a template")
    for vector in encoder["vectors"]:
        if len(vector) != 2 or type(vector[0]) is not str or type(vector[1]) is not int or vector[1] < 1:
            raise FormError(f"{name}.vectors must be names with numbers of columns")
    width = encoder["width"] if encoder["form"] == "dense" else sum(n for _, n in encoder["vectors"])
    if width > stored:  # every column has a number in some tensor
        raise FormError(f"{name} has {width:,} dense columns, more than there are numbers")
    columns = encoder["columns"]
    if columns != sorted(set(columns)) or (columns and columns[-1] >= encoder["width"]):
        raise FormError(f"{name}.columns must be sorted, and below the width")


def _check_kernel_size(block: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """FormError if the kernel of a block would be much larger than its part of the file."""
    if "kernel" in block:
        most = max(MOST_NUMBERS, 4 * sum(t.numel() for t in tensors.values()))
        numbers = _kernel_numbers(block["kernel"])
        if numbers > most:
            raise FormError(f"the kernel of {block['template'][:50]!r} has sizes that its tensors do not")


def _kernel_numbers(described: Any) -> int:
    """An upper bound on how many numbers a kernel holds, from its description: for each kernel in it, the
    product of all whole numbers among its arguments, and of the sum of its ``sizes``."""
    check_form(described, KERNEL, "kernel")
    product, inside = 1, sum(map(_kernel_numbers, described["positional"]))
    for name, value in described["arguments"].items():
        if isinstance(value, Mapping) and "kernel" in value:
            inside += _kernel_numbers(value["kernel"])
        elif isinstance(value, Mapping) and "kernels" in value:
            check_form(value, {"kernels": [dict]}, "kernel")
            inside += sum(map(_kernel_numbers, value["kernels"]))
        elif isinstance(value, Mapping):
            check_form(value, ({"dims": [WHOLE]}, {"list": list}), f"kernel.{name[:50]}")
            if name == "sizes":
                check_form(value["list"], [WHOLE], "kernel.sizes")
                product *= 1 + sum(value["list"])
        elif type(value) is int:
            product *= 1 + abs(value)
    return 1 + inside + product


def _check_rules(rules: Mapping[str, Any] | None, n_labels: int) -> None:
    if rules is None:
        return
    rows = [rules["starts"], rules["ends"], rules["follows"], *rules["follows"]]
    if any(len(row) != n_labels for row in rows):
        raise FormError("constraints are for other labels")


def check_scores(model: Any) -> None:
    """FormError if the scores of a token with unknown features are not what the structure takes, because
    kernels expect other columns than the encoder makes, or because numbers overflow. Cost: that of the mean
    of one token."""
    for (name, block), view in zip(model.posterior.items(), _views(model), strict=True):
        rows = None
        if (view is None) != (block.kernel is None):
            raise FormError(f"the template {name[:50]!r} has features without a kernel, or the reverse")
        if view is not None:
            unused = [-1.0, 0.0] * view.has_sparse
            rows = torch.tensor([[[*view.pad_row.tolist(), *unused]]], dtype=torch.float64)
        with torch.no_grad():
            scores = block.mean_draw().at(block, rows, torch.ones(1, 1, dtype=torch.bool))
        shape = (1, *block.labels) if block.shared else (1, 1, 1, *block.labels)
        if tuple(scores.shape) != shape or not bool(scores.isfinite().all()):
            raise FormError(f"the template {name[:50]!r} has no finite scores")


def _views(model: Any) -> list[Any]:
    """The features that each template sees; None for a template without features."""
    split = model.split
    return [split.node, split.next] if model.spec.is_chain else list(split.views)
