"""The fitted model: a value that can be saved, loaded and asked.

A model file is one safetensors file: the tensors, and under the metadata key ``structgp`` a JSON
object with everything else. It holds no code and is read without pickle. A digest over both says
whether the file is still what was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from structgp import predict
from structgp._version import __version__
from structgp.data.atomic import atomic_write
from structgp.data.batch import Batch, by_length, pad
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.errors import ModelFileError
from structgp.gp import Posterior, WeightPosterior
from structgp.kernels.describe import describe, rebuild
from structgp.structures import Chain, Structure

FORMAT = 4
STRUCTURES: dict[str, type[Structure]] = {"chain": Chain}

_BATCH_TOKENS = 2_000


@dataclass
class Model:
    """A fitted posterior with the encoders that lead to it.

    likelihood : the name of what the posterior was fitted with, 'custom' for a user's function; for
    the reader. predict_with : the structure that answers, one of ``STRUCTURES``; predictor : another
    one in its place, which a file does not keep. n_draws, seed : of the draws that predictions average
    over. info : what is worth keeping of the fit (bound, time, versions). extra : what the caller
    wants kept with the model, such as the source of a feature template; JSON values only.
    """

    encoder: FeatureEncoder
    labels: LabelEncoder
    posterior: Posterior
    likelihood: str = "chain"
    n_draws: int = 128
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    predict_with: str = "chain"
    predictor: Structure | None = None
    _kept: dict[tuple[str, int, int], predict.Draws] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}

    # -- answers -------------------------------------------------------------------------------

    @property
    def structure(self) -> Structure:
        """What predictions are asked of."""
        return STRUCTURES[self.predict_with]() if self.predictor is None else self.predictor

    def draws(self, average: str) -> predict.Draws:
        """'draws': joint draws of (f, g); 'mean': the posterior mean plugged in. Kept for the next
        call: a fitted posterior does not change any more."""
        key = (average, self.n_draws, self.seed)
        if key not in self._kept:
            self._kept.clear()
            self._kept[key] = (
                predict.mean(self.posterior)
                if average == "mean"
                else predict.sample(self.posterior, self.n_draws, self.seed)
            )
        return self._kept[key]

    def marginals(self, X: Sequence[Any], average: str = "draws") -> list[np.ndarray]:
        """(T, V) label probabilities of each sequence."""
        draws = self.draws(average)

        def ask(batch: Batch) -> Tensor:
            return predict.marginals(self.posterior, self.structure, draws, batch)

        return self._each(X, ask, np.empty((0, len(self.labels.classes))))

    def viterbi(self, X: Sequence[Any]) -> list[np.ndarray]:
        """(T,) label indices of the best whole labelling of each sequence."""

        mean = self.draws("mean")

        def ask(batch: Batch) -> Tensor:
            return predict.viterbi(self.posterior, self.structure, mean, batch)

        return self._each(X, ask, np.empty(0, dtype=np.int64))

    def log_probs(
        self, X: Sequence[Any], y: Sequence[Sequence[str]], average: str = "draws"
    ) -> list[float | None]:
        """log p(y | x) of each labelling; None where a label was never seen in training."""
        encoded = self.labels.transform(y)
        draws = self.draws(average)

        def ask(batch: Batch) -> Tensor:
            return predict.log_prob(self.posterior, self.structure, draws, batch)

        rows = self.encoder.transform(X)
        answers: list[float | None] = [0.0 if not len(r) else None for r in rows]
        known = [len(r) if (e >= 0).all() else 0 for r, e in zip(rows, encoded, strict=True)]
        for index in by_length(known, _BATCH_TOKENS):
            values = ask(pad(rows, encoded, self.encoder.pad_row, index))
            for i, value in zip(index, values.tolist(), strict=True):
                answers[i] = value
        return answers

    def _each(self, X: Sequence[Any], ask: Any, empty: np.ndarray) -> list[np.ndarray]:
        rows = self.encoder.transform(X)
        answers = [empty] * len(rows)
        for batch in self._batches(rows):
            values = ask(batch).numpy()
            for b, i in enumerate(batch.index.tolist()):
                answers[i] = values[b, : len(rows[i])]
        return answers

    def _batches(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        for index in by_length([len(r) for r in rows], _BATCH_TOKENS):
            yield pad(rows, None, self.encoder.pad_row, index)

    # -- the file ------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes one file, atomically: an existing one stays as it was if anything fails."""
        # Copies, since a ScaleKernel shares the active_dims of the kernel in it.
        state = self.posterior.state_dict()
        tensors = {
            k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in state.items()
        }
        tensors["factor"] = _pack(tensors["factor"], self.posterior.is_diagonal)
        header = {
            "format": FORMAT,
            "version": __version__,
            "likelihood": self.likelihood,
            "predict_with": self.predict_with,
            "posterior": _options(self.posterior),
            "kernel": describe(self.posterior.kernel),
            "encoder": self.encoder.to_json(),
            "labels": self.labels.classes,
            "n_draws": self.n_draws,
            "seed": self.seed,
            "info": self.info,
            "extra": self.extra,
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
    factor = _unpack(tensors["factor"], posterior.n_inducing, posterior.is_diagonal)
    posterior.load_state_dict(tensors | {"factor": factor})
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
    )


def _options(posterior: Posterior) -> dict[str, Any]:
    """What ``Posterior`` has to be given for the tensors to fit."""
    return {
        "space": "weights" if isinstance(posterior, WeightPosterior) else "functions",
        "n_components": posterior.n_components,
        "covariance": "diagonal" if posterior.is_diagonal else "full",
        "pairwise_covariance": "full" if posterior.pairs_are_full else "diagonal",
    }


def _pack(factor: Tensor, diagonal: bool) -> Tensor:
    """(K, R, M, M) lower triangular float64 -> (K, R, M (M + 1) / 2) float32, exact after
    ``Posterior.round_factor``: a quarter of the space. Standard deviations (K, R, M): float32."""
    if diagonal:
        return factor.float()
    row, column = torch.tril_indices(*factor.shape[-2:])
    return factor[..., row, column].float().contiguous()


def _unpack(packed: Tensor, M: int, diagonal: bool) -> Tensor:
    if diagonal:
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
