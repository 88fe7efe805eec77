"""The paper's two settings on its folds, with a linear kernel of unit variance and unit transition scale.

    python -m experiments.presets --data DIR --task japanesene --inference paper-batch
    python -m experiments.presets --data DIR --task japanesene --inference paper-batch --gradient score

The second line leaves the control variate out. Rows are also added to experiments/results/presets.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.data import arguments, keep, load_fold, run_command
from structgp import Inducing, Prior, StructuredGPClassifier, metrics
from structgp.inference import StepInfo
from structgp.paper import PRESETS
from structgp.plan.options import GRADIENTS


def paper_model(
    name: str,
    *,
    n_inducing: int | None = None,
    structure: str = "chain",
    seed: int = 0,
    device: str = "cpu",
    **changes: Any,
) -> StructuredGPClassifier:
    """A preset with the paper's prior; ``changes`` : fields of its optimiser."""
    preset = PRESETS[name]
    return StructuredGPClassifier(
        structure=structure,
        kernel="linear",
        prior=Prior(transition_sd=1.0, learn_kernel=preset.learn_kernel),
        posterior=Inducing(n_inducing or preset.n_inducing, basis=preset.basis),
        inference=replace(preset.optimizer, **changes),
        random_state=seed,
        device=device,
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("presets", __doc__, ["segmentation"])
    parser.add_argument("--inference", choices=list(PRESETS), default="paper-batch")
    parser.add_argument("--gradient", choices=GRADIENTS, default="auto")
    parser.add_argument("--likelihood", choices=["chain", "piecewise"], default="chain")
    parser.add_argument("--minutes", type=float, default=330, help="time limit of a fit")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(words)
    for task in options.task:
        for k in options.fold:
            row = run(task, k, options.data, options.inference, options)
            print(row, flush=True)
            keep("presets", row)


def run(
    task: str, k: int, data: str | None, inference: str, options: argparse.Namespace
) -> dict[str, object]:
    fold = load_fold(task, data, k)
    gradient = options.gradient
    if gradient == "auto":
        gradient = PRESETS[inference].optimizer.gradient
    model = paper_model(
        inference,
        structure=options.likelihood,
        device=options.device,
        max_seconds=60 * options.minutes,
        gradient=gradient,
    )
    began = time.monotonic()

    def say(step: StepInfo) -> None:
        if inference == "paper-batch" or step.iteration % 500 == 0:
            spent = time.monotonic() - began
            print(f"{task} {k}: step {step.iteration}, bound {step.elbo:.1f}, {spent:.0f} s", flush=True)

    model.fit(fold.X, fold.y, callback=say)
    log = model.training_log_
    marginals = model.predict_marginals(fold.X_test)
    return {
        "task": task,
        "fold": k,
        "inference": inference,
        "gradient": gradient,
        "likelihood": options.likelihood,
        "token_error": 100 * metrics.token_error(fold.y_test, model.predict(fold.X_test)),
        "token_nll": metrics.token_nll(fold.y_test, marginals),
        "bound": log["fresh_elbo"],
        "stopped": log["stopped"],
        "steps": len(log["steps"]),
        "evaluations": log["evaluations"],
        "seconds": round(log["seconds"]),
        "device": options.device,
    }


if __name__ == "__main__":
    run_command(main)
