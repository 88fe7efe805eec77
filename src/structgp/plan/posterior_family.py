"""Of what the posterior is: of weights, or of functions at inducing inputs. Read off the estimator's
parameters, the likelihood and the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpytorch.kernels import Kernel

from structgp.data.encode import Block
from structgp.errors import InputError
from structgp.gp.kernels import has_weights
from structgp.inference import Minibatch, SecondOrder
from structgp.plan.choose_optimizer import PRESETS, takes_second_order
from structgp.structures import BlackBox, Differences, Structure

CHEAP_DIFFERENCES = 400
"""Values a gradient may take, for each draw and sequence, for differences to be the way."""


def setting(given: Any, name: str, usual: Any) -> Any:
    """The parameter ``name``, or if it is left open what the preset has, or what is usual."""
    value = getattr(given, name)
    if value is not None and value != "auto":
        return value
    inference = given.inference
    if isinstance(inference, str) and inference in PRESETS:
        return getattr(PRESETS[inference], name)
    return usual


def learns_on_bound(given: Any, structure: Structure, blocks: Sequence[Block]) -> bool:
    """Whether the fit itself learns what each feature is worth."""
    if isinstance(given.inference, SecondOrder | Minibatch):
        learns = given.inference.learn_scales
    else:
        learns = setting(given, "learn_scales", "all")
    if learns != "all" or not setting(given, "learn_kernel", True):
        return False
    full = given.pairwise_covariance == "full"
    if takes_second_order(given.inference, structure, given.gradient, full):
        return True
    return structure.has_local_curvature and _may_be_weights(given, blocks)


def _may_be_weights(given: Any, blocks: Sequence[Block]) -> bool:
    """Whether nothing stands against the second-order fit in weight space but what it asks of the
    likelihood."""
    return (
        (given.inference, given.gradient) == ("auto", "auto")
        and given.learn_scales in ("auto", "all")
        and given.learn_kernel in ("auto", True)
        and isinstance(given.kernel, str)
        and given.kernel in ("auto", "relevance")
        and needs_functions(given) is None
        and given.pairwise_covariance != "full"
        and all(block.kind != "dense" for block in blocks)
    )


def with_differences(
    given: Any,
    structure: Structure,
    blocks: Sequence[Block],
    length: float,
    n_labels: int,
) -> Structure:
    """A likelihood that has only values, with differences for slopes where those are cheap and
    nothing asks for another way. ``length`` : of the sequence that a token is in: a long one takes many
    values for each of its many positions."""
    if not isinstance(structure, BlackBox) or structure.has_gradient:
        return structure
    cheap = Differences.evaluations(length, n_labels) <= CHEAP_DIFFERENCES
    return Differences(structure) if cheap and _may_be_weights(given, blocks) else structure


def needs_functions(given: Any) -> str | None:
    """The parameter that asks for inducing inputs, if one does."""
    asked = {
        "space": given.space == "functions",
        "n_inducing": given.n_inducing is not None,
        "covariance": given.covariance in ("full", "low-rank"),
        "n_components": given.n_components > 1,
    }
    return next((name for name, wanted in asked.items() if wanted), None)


def choose_space(given: Any, kernel: Kernel, on_bound: bool) -> str:
    """'weights' or 'functions'; InputError if what is asked for does not go together."""
    other = needs_functions(given)
    possible = on_bound and has_weights(kernel)
    if given.space != "weights":
        return "weights" if possible and other is None else "functions"
    if other is not None:
        raise InputError(
            other, f"{getattr(given, other)!r} is not for space='weights'", "leave it out"
        )
    if not on_bound:
        raise InputError(
            "space",
            "'weights' is for the fit that learns the kernel in closed form, and another one is asked "
            "for (by inference, gradient, learn_scales or learn_kernel), or the likelihood has no "
            "curvature",
            "leave those at 'auto', or use space='functions'",
        )
    if not has_weights(kernel):
        raise InputError(
            "space",
            "'weights' needs a kernel that is linear in features that can be told apart",
            "use kernel='relevance' on categorical or sparse features, or space='functions'",
        )
    return "weights"
