"""The first round of a trial, kept for other trials that differ from it only from the second round on."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from structgp.inference.checkpoint import Reached


class FirstRound:
    """A checkpoint in memory, written once: after the first round, in which no scale of a kernel has moved,
    so that the tails have had no effect yet. Trials that read it continue from there. Memory: one
    posterior."""

    def __init__(self) -> None:
        self._kept: tuple[dict[str, Any], torch.Tensor, Reached] | None = None

    def write(self, posterior: nn.Module, generator: torch.Generator, reached: Reached) -> bool:
        if self._kept is None and len(reached.steps) == 1:
            values = {name: x.clone() for name, x in posterior.state_dict().items()}
            reached = replace(reached, state=copy.copy(reached.state), steps=list(reached.steps))
            self._kept = values, generator.get_state(), reached
        return False

    def read(self, posterior: nn.Module, generator: torch.Generator) -> Reached | None:
        """How far the fit has come, None if nothing has been kept; sets the posterior and the generator, in
        place."""
        if self._kept is None:
            return None
        values, random, reached = self._kept
        posterior.load_state_dict(values)
        generator.set_state(random)
        state = replace(reached.state, generator=generator)
        return replace(reached, state=state, steps=list(reached.steps))

    def unfit(self, error: Exception) -> Exception:
        return error
