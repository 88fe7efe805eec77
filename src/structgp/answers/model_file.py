"""A model file: one safetensors file, with the tensors, and under the metadata key ``structgp`` a JSON
object
with everything else. It holds no code and is read without pickle. A digest over both says whether the
file is still what was written.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from structgp import __version__
from structgp.answers.model import STRUCTURES, Model
from structgp.data.atomic import atomic_write
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.data.schemes import Allowed
from structgp.errors import ModelFileError
from structgp.gp import CovarianceForm, Posterior, WeightPosterior
from structgp.gp.kernels.kernel_json import describe, rebuild

FORMAT = 5


def save(model: Model, path: str | Path) -> None:
    """Writes one file, atomically: an existing one stays as it was if anything fails."""
    posterior = model.posterior
    # Copies, since a ScaleKernel shares the active_dims of the kernel in it.
    tensors = {
        k: v.detach().clone(memory_format=torch.contiguous_format)
        for k, v in posterior.state_dict().items()
    }
    tensors["factor"] = _pack(tensors["factor"], posterior.form)
    if posterior.form == "low-rank":
        tensors["directions"] = tensors["directions"].float()
    header = {
        "format": FORMAT,
        "version": __version__,
        "likelihood": model.likelihood,
        "predict_with": model.predict_with,
        "posterior": _options(posterior),
        "kernel": describe(posterior.kernel),
        "encoder": model.encoder.to_json(),
        "labels": model.labels.classes,
        "constraints": None if model.constraints is None else model.constraints.to_json(),
        "n_draws": model.n_draws,
        "seed": model.seed,
        "info": model.info,
        "extra": model.extra,
    }
    text = json.dumps(header, sort_keys=True)
    metadata = {"structgp": text, "digest": _digest(text, tensors)}
    content = safetensors.torch.save(tensors, metadata)
    with atomic_write(path, "wb") as file:
        file.write(content)


def load(path: str | Path) -> Model:
    """Reads a model file; ModelFileError, in one line, if it is not one or was damaged."""
    place = str(path)
    try:
        with safetensors.safe_open(place, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelFileError(place, "no such file", "check the path") from None
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ModelFileError(place, reason, "check the path and its permissions") from None
    except safetensors.SafetensorError:
        raise ModelFileError(
            place, "not a structgp model, or cut short", "train it again, or copy it again"
        ) from None
    if "structgp" not in metadata:
        raise ModelFileError(
            place, "a safetensors file of another program", "pass a file that structgp wrote"
        )
    text = metadata["structgp"]
    if metadata.get("digest") != _digest(text, tensors):
        raise ModelFileError(place, "altered since it was written", "copy or train it again")
    header = json.loads(text)
    if header["format"] < FORMAT:
        raise ModelFileError(
            place,
            f"format {header['format']}, written by an earlier development version of structgp",
            "train it again",
        )
    if header["format"] > FORMAT:
        raise ModelFileError(
            place,
            f"format {header['format']}, written by structgp {header['version']}",
            f"update structgp (this is {__version__}, which reads up to format {FORMAT})",
        )
    if header["predict_with"] not in STRUCTURES:
        raise ModelFileError(
            place,
            f"predicts with {header['predict_with']!r}, which structgp {__version__} does not know",
            f"update structgp (it was written by {header['version']})",
        )
    return _from_parts(header, tensors)


def _from_parts(header: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
    kernel, n_labels = rebuild(header["kernel"]), len(header["labels"])
    options, basis = header["posterior"], tensors["basis"]
    posterior: Posterior
    if options.pop("space") == "weights":
        options.pop("covariance")
        posterior = WeightPosterior(kernel, n_labels, basis=basis, **options)
    else:
        posterior = Posterior(kernel, tensors["inducing"], n_labels, basis=basis, **options)
    tensors["factor"] = _unpack(tensors["factor"], posterior.n_inducing, posterior.form)
    if posterior.form == "low-rank":
        tensors["directions"] = tensors["directions"].double()
    posterior.load_state_dict(tensors)
    return Model(
        encoder=FeatureEncoder.from_json(header["encoder"]),
        labels=LabelEncoder(header["labels"]),
        posterior=posterior,
        likelihood=header["likelihood"],
        n_draws=header["n_draws"],
        seed=header["seed"],
        info=header["info"],
        extra=header["extra"],
        predict_with=header["predict_with"],
        constraints=Allowed.from_json(header["constraints"]),
    )


def _options(posterior: Posterior) -> dict[str, Any]:
    """What ``Posterior`` has to be given for the tensors to fit."""
    rank = {"rank": posterior.rank} if posterior.form == "low-rank" else {}
    return rank | {
        "space": "weights" if isinstance(posterior, WeightPosterior) else "functions",
        "n_components": posterior.n_components,
        "covariance": posterior.form,
        "pairwise_covariance": "full" if posterior.pairs_are_full else "diagonal",
    }


def _pack(factor: Tensor, form: CovarianceForm) -> Tensor:
    """(K, R, M, M) lower triangular float64 -> (K, R, M (M + 1) / 2) float32, exact after
    ``Posterior.round_factor``: a quarter of the space. Standard deviations (K, R, M): float32."""
    if form != "full":
        return factor.float()
    row, column = torch.tril_indices(*factor.shape[-2:])
    return factor[..., row, column].float().contiguous()


def _unpack(packed: Tensor, M: int, form: CovarianceForm) -> Tensor:
    if form != "full":
        return packed.double()
    factor = packed.new_zeros((*packed.shape[:-1], M, M), dtype=torch.float64)
    row, column = torch.tril_indices(M, M)
    factor[..., row, column] = packed.double()
    return factor


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
