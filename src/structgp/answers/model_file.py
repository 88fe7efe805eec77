"""Reads and writes model files, each a single safetensors file.

It holds the tensors and, under the metadata key ``structgp``, a JSON object with everything else. It holds
no code and is read without pickle. A digest over both tells whether the file is still what was written."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from structgp import __version__
from structgp.answers.annotators import Annotators
from structgp.answers.ask import Model
from structgp.answers.conformal import Calibration
from structgp.answers.file_checks import check_block_size, check_header, check_scores, read_tensors
from structgp.data.atomic import atomic_write
from structgp.data.encode import FeatureEncoder
from structgp.data.json_form import FormError, check_form, read_object
from structgp.data.labels import LabelEncoder
from structgp.data.schemes import Allowed
from structgp.errors import InputError, ModelFileError
from structgp.gp import FAMILIES, Posterior
from structgp.gp.kernels.kernel_json import describe, rebuild
from structgp.structures import ByValues, Custom, Spec, Structure, answers_of, as_structure

FORMAT = 11


def save(model: Model, path: str | Path) -> None:
    """Writes one file atomically: an existing file stays as it was if anything fails."""
    posterior = model.posterior
    # Copies, since a ScaleKernel shares the active_dims of the kernel in it.
    tensors = {
        k: v.detach().clone(memory_format=torch.contiguous_format)
        for k, v in posterior.state_dict().items()
    }
    _recode(tensors, posterior, _pack)
    header = {
        "format": FORMAT,
        "version": __version__,
        "structure": model.spec.to_json(),
        "predictor": _name_of(model.predictor),
        "by_values": isinstance(model.predictor, ByValues),
        "posterior": [_block_to_json(name, block) for name, block in posterior.items()],
        "encoder": model.encoder.to_json(),
        "own": {name: encoder.to_json() for name, encoder in model.own.items()},
        "labels": model.labels.classes,
        "integer_labels": model.labels.integers,
        "constraints": None if model.constraints is None else model.constraints.to_json(),
        "n_draws": model.n_draws,
        "seed": model.seed,
        "spread": model.spread,
        "calibration": None if model.calibration is None else model.calibration.to_json(),
        "annotators": None if model.annotators is None else model.annotators.to_json(),
        "info": model.info,
        "extra": model.extra,
    }
    text = json.dumps(header)
    metadata = {"structgp": text, "digest": _digest(text, tensors)}
    content = safetensors.torch.save(tensors, metadata)
    with atomic_write(path, "wb") as file:
        file.write(content)


def load(path: str | Path, structure: Any = None) -> Model:
    """Reads a model file; ModelFileError, in one line, if it is not one or was damaged. ``structure`` : the
    user's own function or Structure that answers, if the model had one (a file holds no code); 'chain' to
    have the chain answer in its place."""
    place = str(path)
    header, tensors = _read(place)
    predictor = _given_predictor(place, header, structure)
    for family in (block["family"] for block in header["posterior"]):
        if family not in FAMILIES:
            problem = f"a posterior of family {family[:50]!r}, which structgp {__version__} does not know"
            raise ModelFileError(place, problem, f"update structgp (it was written by {header['version']})")
    try:
        model = _built(header, tensors, predictor)
        check_scores(model)
    except Exception as error:  # a constructor may raise anything when given parts of a damaged file
        raise _unfit(place, error) from error
    return model


def _built(header: dict[str, Any], tensors: dict[str, Tensor], predictor: Structure | None) -> Model:
    return Model(
        encoder=FeatureEncoder.from_json(header["encoder"]),
        labels=LabelEncoder(header["labels"], header["integer_labels"]),
        posterior=_posterior_from_json(header["posterior"], tensors),
        spec=Spec.from_json(header["structure"]),
        n_draws=header["n_draws"],
        seed=header["seed"],
        spread=header["spread"],
        info=header["info"],
        extra=header["extra"],
        predictor=predictor,
        constraints=Allowed.from_json(header["constraints"]),
        calibration=Calibration.from_json(header["calibration"]),
        annotators=Annotators.from_json(header.get("annotators")),
        own={name: FeatureEncoder.from_json(state) for name, state in header["own"].items()},
    )


def _given_predictor(place: str, header: dict[str, Any], structure: Any) -> Structure | None:
    """The structure that answers in place of the declared one; ModelFileError if it is not the one that the
    file names."""
    name, predictor = header["predictor"], _predictor(structure)
    given = _name_of(predictor)
    short, given_short = (n and n.split(".")[-1] for n in (name, given))
    if name is None and given is not None:
        raise ModelFileError(place, "answers by the chain", "leave structure out")
    if short != given_short and not _is_chain(structure):
        problem = f"answers by {name}, which a file does not hold"
        problem += "" if given is None else f", and was given {given}"
        remedy = f"pass it: load(path, structure={short}())"
        if header["by_values"]:
            remedy = f"pass it: load(path, structure={short}), or structure='chain' for the chain's answers"
        raise ModelFileError(place, problem, remedy)
    return predictor


def _unfit(place: str, error: Exception) -> ModelFileError:
    """The error for a file with the right digest but invalid content."""
    told = f"{error.place}: {error.problem}" if isinstance(error, InputError) else str(error)
    told = told.split("\n")[0][:200] if isinstance(error, FormError | InputError) else type(error).__name__
    return ModelFileError(place, f"does not hold a model ({told})", "get it again, or train it again")


def _mode(place: str) -> int:
    try:
        return os.stat(place).st_mode
    except ValueError:
        raise ModelFileError(repr(place), "not a name of a file", "check the path") from None


def _read(place: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON and the tensors of a file."""
    try:
        if not stat.S_ISREG(_mode(place)):  # reading a pipe would wait for its writer
            reason = "a folder" if os.path.isdir(place) else "not a regular file"
            raise ModelFileError(place, reason, "pass a file that structgp wrote")
        with safetensors.safe_open(place, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = read_tensors(file) if "structgp" in metadata else {}
    except FileNotFoundError:
        raise ModelFileError(place, "no such file", "check the path") from None
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ModelFileError(place, reason, "check the path and its permissions") from None
    except safetensors.SafetensorError:
        problem = "not a structgp model, or cut short"
        raise ModelFileError(place, problem, "train it again, or copy it again") from None
    except FormError as error:
        raise _unfit(place, error) from None
    if "structgp" not in metadata:
        problem = "a safetensors file of another program"
        raise ModelFileError(place, problem, "pass a file that structgp wrote")
    text = metadata["structgp"]
    if metadata.get("digest") != _digest(text, tensors):
        raise ModelFileError(place, "altered since it was written", "copy or train it again")
    try:
        header = read_object(text)
        check_form(header, {"format": int, "version": str})
    except FormError as error:
        raise _unfit(place, error) from None
    _check_version(place, header["format"], header["version"][:50])
    try:
        check_header(header, tensors)
    except Exception as error:
        raise _unfit(place, error) from error
    return header, tensors


def _check_version(place: str, version: int, written_by: str) -> None:
    if version < FORMAT:
        problem = f"format {version}, written by an earlier development version of structgp"
        raise ModelFileError(place, problem, "train it again")
    if version > FORMAT:
        problem = f"format {version}, written by structgp {written_by}"
        remedy = f"update structgp (this is {__version__}, which reads up to format {FORMAT})"
        raise ModelFileError(place, problem, remedy)


def _is_chain(structure: Any) -> bool:
    return isinstance(structure, str) and structure == "chain"


def _predictor(structure: Any) -> Structure | None:
    """The structure that answers, given the one that is passed to ``load``."""
    if structure is None or _is_chain(structure):
        return None
    if isinstance(structure, Custom):
        asked = structure.predict_with
        if isinstance(asked, Structure) or _is_chain(asked):
            return _predictor(asked)
    return answers_of(as_structure(structure))


def _name_of(structure: Structure | None) -> str | None:
    """Module and name of a user's own structure or function."""
    if structure is None:
        return None
    if isinstance(structure, ByValues):
        return structure.full_name
    return f"{type(structure).__module__}.{type(structure).__qualname__}"


def _posterior_from_json(states: list[dict[str, Any]], tensors: dict[str, Tensor]) -> Posterior:
    posterior = Posterior({state["template"]: _block_from_json(state, tensors) for state in states})
    _recode(tensors, posterior, _unpack)
    posterior.load_state_dict(tensors)
    return posterior


def _block_to_json(template: str, block: Any) -> dict[str, Any]:
    """The description from which a block is rebuilt so that its tensors fit."""
    state = {"template": template, "family": block.name, "labels": list(block.labels)}
    state["options"] = block.options()
    return state if block.kernel is None else state | {"kernel": describe(block.kernel)}


def _block_from_json(state: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    family: Any = FAMILIES[state["family"]]
    options, prefix = state["options"], f"{state['template']}."
    basis, inducing = (tensors.get(prefix + name) for name in ("basis", "inducing"))
    kernel = rebuild(state["kernel"]) if "kernel" in state else None
    n_functions = math.prod(state["labels"]) if basis is None else basis.shape[1]
    check_block_size(family.size(kernel, inducing, n_functions, options), state["template"], tensors)
    if kernel is None:
        return family(state["labels"], **options)
    rows = () if inducing is None else (inducing,)
    return family(kernel, *rows, state["labels"], basis=basis, **options)


def _recode(
    tensors: dict[str, Tensor], posterior: Posterior, code: Callable[[Tensor, bool, bool], Tensor]
) -> None:
    """Packs or unpacks, in place, the tensors of the covariance of each block of the posterior."""
    for name, block in posterior.items():
        for kind in ("factor", "directions", "root"):
            key, triangular = f"{name}.{kind}", kind == "root" or getattr(block, "form", None) == "full"
            if key in tensors:
                tensors[key] = code(tensors[key], triangular, kind == "root")


def _triangle(M: int, upper: bool) -> Tensor:
    """(2, M (M + 1) / 2) rows and columns of a triangle."""
    return torch.triu_indices(M, M) if upper else torch.tril_indices(M, M)


def _pack(spread: Tensor, triangular: bool, upper: bool) -> Tensor:
    """Turns triangular float64 (..., M, M) into float32 (..., M (M + 1) / 2), exact after ``round_factor``,
    in a quarter of the space. Other tensors only become float32."""
    if not triangular:
        return spread.float()
    row, column = _triangle(spread.shape[-1], upper)
    return spread[..., row, column].float().contiguous()


def _unpack(packed: Tensor, triangular: bool, upper: bool) -> Tensor:
    if not triangular:
        return packed.double()
    M = math.isqrt(2 * packed.shape[-1])
    factor = packed.new_zeros((*packed.shape[:-1], M, M), dtype=torch.float64)
    row, column = _triangle(M, upper)
    factor[..., row, column] = packed.double()
    return factor


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
