"""What there is to say of a fit, for ``training_log_`` and the model file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from structgp.data.encode import Block
from structgp.gp import Posterior
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
            "space": "weights" if posterior.node.name == "weights" else "functions",
            "covariance": getattr(posterior.node, "form", "diagonal"),
            "covariance_rank": getattr(posterior.node, "rank", 0),
            "covariance_reason": start.form_reason,
            "kernel_scales": kernel_scales(posterior.node.kernel, blocks),
            "function_scales": posterior.node.basis.square().sum(0).tolist(),
            "effective_parameters": float(posterior.node.effective_parameters()),
            "kl_inducing": kl_inducing,
            "kl_pairwise": float(posterior["next"].kl()),
            "amplitude_factor": float(posterior.node.log_amplitude.exp()),
            "pairwise_sd": float(posterior["next"].sd),
            "n_inducing": posterior.node.n_values,
            "inducing_residual": start.residual,
            "evaluations": history.evaluations + (before.evaluations if before else 0),
            "seconds": history.seconds + (before.seconds if before else 0.0),
        }
