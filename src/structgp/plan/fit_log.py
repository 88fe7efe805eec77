"""What there is to say of a fit, for ``training_log_`` and the model file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from structgp.data.encode import Block
from structgp.gp import Posterior, WeightPosterior
from structgp.gp.kernels.block_sum import kernel_scales
from structgp.inference.loop import History
from structgp.plan.start import Start


def fit_log(
    history: History,
    posterior: Posterior,
    kl_inducing: float,
    start: Start,
    blocks: Sequence[Block],
) -> dict[str, Any]:
    relaxation, pilot = start.relaxation, start.pilot
    before = None if pilot is None else pilot.history
    with torch.no_grad():
        return {
            "optimizer": history.optimizer,
            "reason": history.reason,
            "gradient": history.gradient,
            "stopped": history.stopped,
            "steps": history.steps,
            "trace": history.trace,
            "elbo": history.elbo,
            "fresh_elbo": history.fresh_elbo,
            "relaxation": None if relaxation is None else vars(relaxation),
            "pilot": None if pilot is None else pilot.summary,
            "space": "weights" if isinstance(posterior, WeightPosterior) else "functions",
            "covariance": posterior.form,
            "covariance_rank": posterior.rank,
            "covariance_reason": start.form_reason,
            "kernel_scales": kernel_scales(posterior.kernel, blocks),
            "function_scales": posterior.basis.square().sum(0).tolist(),
            "effective_parameters": float(posterior.effective_parameters()),
            "kl_inducing": kl_inducing,
            "kl_pairwise": float(posterior.kl_pairwise()),
            "amplitude_factor": float(posterior.log_amplitude.exp()),
            "pairwise_sd": float(posterior.pairwise_sd),
            "n_inducing": posterior.n_inducing,
            "inducing_residual": start.residual,
            "evaluations": history.evaluations + (before.evaluations if before else 0),
            "seconds": history.seconds + (before.seconds if before else 0.0),
        }
