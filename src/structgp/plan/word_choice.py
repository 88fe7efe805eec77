"""Whether parts of words become features, and what the plan says of it."""

from __future__ import annotations

from structgp.data.encode import FeatureEncoder
from structgp.gp.kernels.build import KernelChoice
from structgp.inference import Minibatch, SecondOrder
from structgp.plan.choices import ASKED, Choice
from structgp.plan.options import Options, Weights


def parts_wanted(options: Options) -> bool | str:
    """Whether words are looked for, to take them apart; or the name of the feature that is one. By default
    where the fit learns the relevance of every feature, so that those of parts which tell little are
    small."""
    if options.word_parts != "auto":
        return options.word_parts or False
    learned = options.optimizer is None or isinstance(options.optimizer, SecondOrder | Minibatch)
    by_weights = options.family is None or isinstance(options.family, Weights)
    return options.preset is None and learned and by_weights and _has_relevances(options.kernel)


def _has_relevances(kernel: KernelChoice) -> bool:
    of_words = kernel.get("categorical", "auto") if isinstance(kernel, dict) else kernel
    return isinstance(of_words, str) and of_words in ("auto", "relevance")


def words_of(options: Options, encoder: FeatureEncoder) -> Choice[str | None]:
    """The feature that is taken apart, for the plan; None where there is none."""
    if encoder.parts is not None:
        named = options.word_parts != "auto"
        reason = ASKED if named else "its values are words: beginnings, ends and shapes are features too"
        return Choice(encoder.templates[encoder.parts.word], reason)
    if options.word_parts is None:
        return Choice(None, ASKED)
    return Choice(
        None,
        "no feature is a word whose parts tell more than other features"
        if parts_wanted(options)
        else UNLEARNED,
    )


UNLEARNED = "the fit does not learn the relevance of single features"
