"""Fits on data that is on disk, in shards: what they start from, and what they cannot do.

One weight a feature, and one site a batch: the fit needs a batch at a time and nothing else of the data.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel

from structgp.data.encode import Block
from structgp.data.shards import ShardedExamples, Shards
from structgp.errors import InputError
from structgp.gp import Posterior, Table, Weights
from structgp.gp.kernels.block_sum import BlockSumKernel, relevance_kernel
from structgp.inference import Minibatch
from structgp.inference.batch_sites import remove_sites
from structgp.plan.choose_optimizer import Choice, choose
from structgp.plan.posterior_family import choose_space, learns_on_bound, setting
from structgp.plan.start import Start, label_basis
from structgp.structures import Structure

REASON = "the data is on disk, and this way needs a batch at a time"


def check_possible(given: Any, has_model: bool, **passed: Any) -> None:
    """InputError for what asks for all data at once. ``given`` : the estimator; ``passed`` : arguments of
    its fit that are None where they were not given."""
    for name, value in passed.items():
        if value is not None:
            raise InputError(
                name, "given beside shards, which hold tokens and labels", "leave it out"
            )
    if isinstance(given.inference, str):
        possible = given.inference in ("auto", "minibatch")
    else:
        possible = isinstance(given.inference, Minibatch)
    if not possible:
        name = given.inference if isinstance(given.inference, str) else given.inference.name
        raise InputError(
            "inference", f"{name!r} needs all data in memory", "use 'auto' or 'minibatch' on shards"
        )
    if given.early_stopping:
        raise InputError(
            "early_stopping",
            "is for data in memory: on shards a step is one batch of many",
            "stop with a callback, or leave it out",
        )
    if given.warm_start and has_model:
        raise InputError(
            "warm_start",
            "a fit on shards starts from nothing: their features are numbered anew",
            "use warm_start=False, or go on from a checkpoint",
        )
    kernels = given.kernel.values() if isinstance(given.kernel, Mapping) else [given.kernel]
    if not all(isinstance(kernel, str) and kernel in ("auto", "relevance") for kernel in kernels):
        raise InputError(
            "kernel",
            "shards are fitted with one weight a feature, which this kernel does not have",
            "use 'auto' or 'relevance', or fit data that is in memory",
        )


def sharded_start(given: Any, examples: ShardedExamples, structure: Structure) -> Start:
    """The posterior of the weights at its prior."""
    on_bound = learns_on_bound(_by_minibatch(given), structure, examples.encoder.blocks)
    kernel = _kernel(given, examples)
    choose_space(_by_minibatch(given), kernel, on_bound)
    V = examples.n_labels
    node = Weights(kernel, (V,), label_basis(given, structure, examples))
    posterior = Posterior({"node": node, "next": Table((V, V), float(given.pairwise_sd))})
    return Start(posterior, on_bound)


def sharded_choice(given: Any, structure: Structure, posterior: Posterior) -> Choice:
    """Minibatches, for a reason."""
    asked = given.inference != "auto"
    choice = choose(
        given.inference if asked else "minibatch",
        structure,
        posterior,
        gradient=given.gradient,
        n_gradient_draws=given.n_gradient_draws,
        learn_scales=setting(given, "learn_scales", "all"),
    )
    return choice if asked else replace(choice, reason=REASON)


@contextmanager
def sites_beside(choice: Choice, shards: Shards, checkpoint: str | Path | None) -> Iterator[Choice]:
    """The choice with its sites on disk: beside the checkpoint, where they stay if the fit is cut off, or
    in a folder of the shards' that goes with the fit."""
    optimizer = choice.optimizer
    assert isinstance(optimizer, Minibatch)
    if optimizer.sites_folder is not None:
        yield choice
    elif checkpoint is not None:
        folder = f"{checkpoint}.sites"
        yield replace(choice, optimizer=replace(optimizer, sites_folder=folder))
        remove_sites(folder)
    else:
        try:
            made = tempfile.TemporaryDirectory(prefix=".sites-", dir=shards.folder)
        except OSError as error:
            raise InputError(
                str(shards.folder),
                f"the sites of the fit cannot be written there ({error.strerror})",
                "name a checkpoint in another place: they are kept beside it",
            ) from error
        with made as folder:
            yield replace(choice, optimizer=replace(optimizer, sites_folder=folder))


def _by_minibatch(given: Any) -> Any:
    """The parameters as if what shards leave open had been asked for."""
    asked = copy.copy(given)
    asked.space = "weights" if given.space == "auto" else given.space
    if given.inference == "auto":
        asked.inference = "minibatch"
    if given.space == "functions":
        raise InputError(
            "space",
            "'functions' needs inducing inputs, which are chosen from data in memory",
            "use 'auto' or 'weights' on shards",
        )
    return asked


def _kernel(given: Any, examples: ShardedExamples) -> Kernel:
    """As ``build_kernel`` makes it of all rows, from what is known of them."""
    shards, blocks, amplitude = examples.shards, examples.encoder.blocks, given.amplitude
    kinds = [block.kind for block in blocks]
    stray = sorted(set(given.kernel) - set(kinds)) if isinstance(given.kernel, Mapping) else []
    if stray:
        raise InputError(
            "kernel", f"no {stray[0]} features in the data", f"name only: {', '.join(kinds)}"
        )
    share = amplitude if isinstance(amplitude, str) else amplitude / len(blocks)
    parts = [_part(block, shards, share) for block in blocks]
    whole = parts[0]
    if len(parts) > 1:
        whole = BlockSumKernel(parts, [(block.start, block.stop) for block in blocks])
    return whole.double().requires_grad_(False)


def _part(block: Block, shards: Shards, amplitude: float | str) -> Kernel:
    n, encoder = shards.n_tokens, shards.encoder
    if block.kind == "sparse":
        size = max(1, len(encoder.columns or encoder.attributes))
        return relevance_kernel([size], None, shards.about["sparse_squares"] / n, amplitude)
    counts = [torch.from_numpy(np.array(found)) for found in shards.value_counts]
    square = float(sum(int(found.sum()) for found in counts)) / n
    return relevance_kernel([len(found) for found in counts], counts, square, amplitude, n)
