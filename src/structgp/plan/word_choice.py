"""Decides whether parts of words become features, and what the plan says about it."""

from __future__ import annotations

import warnings

from structgp.data.encode import FeatureEncoder
from structgp.errors import InputError, StructgpWarning
from structgp.gp.kernels.build import KernelChoice
from structgp.inference import Minibatch, SecondOrder
from structgp.plan.choices import AS_BEFORE, ASKED, Choice
from structgp.plan.options import Options, Weights

NOT_NEW = "no feature is a word whose parts tell more than other features"
IN_VAIN = "parts of what is named say no more than other features, or an earlier fit had none"
UNLEARNED = "the fit does not learn the relevance of single features"


def parts_wanted(options: Options) -> bool | str:
    """True if words are looked for among the features, to take them apart, or the name of the feature that
    is a word. By default True where the fit learns the relevance of every feature, so that parts which tell
    little get a small one."""
    if options.word_parts != "auto":
        return options.word_parts or False
    learned = options.optimizer is None or isinstance(options.optimizer, SecondOrder | Minibatch)
    by_weights = options.family is None or isinstance(options.family, Weights)
    return options.preset is None and learned and by_weights and _has_relevances(options.kernel)


def _has_relevances(kernel: KernelChoice) -> bool:
    of_words = kernel.get("categorical", "auto") if isinstance(kernel, dict) else kernel
    return isinstance(of_words, str) and of_words in ("auto", "relevance")


def taken_apart(encoder: FeatureEncoder) -> str | None:
    """The feature whose parts are features too; None where there is none."""
    return None if encoder.parts is None else encoder.templates[encoder.parts.word]


def parts_stay(options: Options, encoder: FeatureEncoder) -> bool:
    """True if an existing encoder has the parts of words that are asked for, or 'auto' leaves them open."""
    return options.word_parts in ("auto", taken_apart(encoder))


def warn_of_parts(options: Options, encoder: FeatureEncoder, stacklevel: int) -> None:
    """Warns where a model goes on with other parts of words than are asked for."""
    if not parts_stay(options, encoder):
        has = f"those of {taken_apart(encoder)!r}" if encoder.parts is not None else "none"
        message = (
            f"word_parts: {options.word_parts!r} is not heeded: the model has learned from data that it "
        )
        message += f"does not remember, and keeps the parts of words that it has ({has}); fit all data anew"
        warnings.warn(message, StructgpWarning, stacklevel=stacklevel + 1)


def words_of(options: Options, encoder: FeatureEncoder, on_disk: bool = False) -> Choice[str | None]:
    """The feature that is taken apart, for the plan; None where there is none. on_disk : whether the
    encoder is that of shards. InputError where shards lack the parts that are asked for."""
    word, asked = taken_apart(encoder), options.word_parts
    if on_disk and isinstance(asked, str) and not parts_stay(options, encoder):
        problem = f"parts of {asked!r} are asked for, and shards hold features as they were written"
        raise InputError("word_parts", problem, "write them as features of their own, or pass X and y")
    if word is not None and not parts_stay(options, encoder):
        return Choice(word, AS_BEFORE)
    if word is not None:
        by_default = "its values are words: beginnings, ends and shapes are features too"
        return Choice(word, by_default if asked == "auto" else ASKED)
    if asked is None:
        return Choice(None, ASKED)
    if on_disk:
        return Choice(None, "shards hold features as they were written")
    if asked != "auto":
        return Choice(None, IN_VAIN)
    return Choice(None, NOT_NEW if parts_wanted(options) else UNLEARNED)
