"""A fitted model with its parameters: all that is needed to answer.

It does without scikit-learn, whose import takes most of a second."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from structgp.answers import model_file
from structgp.answers.annotators import Annotators
from structgp.answers.ask import Asked, Model, Question
from structgp.api.questions import Answers, class_shift
from structgp.data.examples import as_list
from structgp.errors import ModelFileError, NotThereError, StructgpWarning
from structgp.plan.decisions import decoder_of
from structgp.plan.options import Options, Parameters, answer_draws, check_class_weight, from_json

F = TypeVar("F", bound="Fitted")


class Fitted(Answers, Parameters):
    """Answers questions with ``model_`` and the parameters; the attributes are as in
    :class:`structgp.StructuredGPClassifier`."""

    model_: Model
    training_log_: dict[str, Any]
    classes_: np.ndarray

    def _options(self) -> Options:
        """The parameters as they are now, checked."""
        return Options(**{f.name: getattr(self, f.name) for f in fields(Parameters)})

    @property
    def annotators_(self) -> Annotators:
        """How reliable the annotators are, if the model was fitted to :class:`structgp.Annotations`."""
        if self.model_.annotators is None:
            problem = "the model was fitted to labels that were taken for true"
            raise NotThereError("annotators_", problem, "fit it to structgp.Annotations")
        return self.model_.annotators

    def ask(self, X: Iterable[Any]) -> Asked:
        """X, encoded once, so that several questions can be asked about it, under the current parameters.
        Answers are arrays of label indices, see :class:`structgp.answers.ask.Asked`."""
        options, model = self._options(), self.model_
        shift = None
        if options.class_weight is not None:
            check_class_weight(options.class_weight, model.labels.classes)
            shift = class_shift(options.class_weight, model)
        decide = decoder_of(options, model.info, model.labels.classes)
        n_draws = answer_draws(options.n_draws, model.spec)
        question = Question(n_draws, shift, options.torch_device, *decide, local=options.local)
        return model.ask(as_list(X), question)


def read_as(kind: type[F], path: str | Path, structure: Any) -> F:
    """Reads a model file as an object of class ``kind``. ``structure`` : see :func:`structgp.load`."""
    model = model_file.load(path, structure)
    structure = None if isinstance(structure, str) else structure
    params = {"kernel": model.posterior.node.kernel}
    try:
        params |= from_json(model.extra.get("params", {}))
        found = kind(**params)
        found._options()
    except Exception as error:  # a file may hold anything
        problem = f"does not hold the parameters of a fit ({str(error)[:200]})"
        raise ModelFileError(str(path), problem, "get it again, or train it again") from error
    if structure is not None:
        params["structure"] = found.structure = structure
    found.model_, found.training_log_ = model, dict(model.info)
    if "vectors" in model.extra:
        found.training_log_["vectors"] = model.extra["vectors"].get("coverage")
    found.classes_ = np.array(model.labels.classes)
    model.posterior.requires_grad_(False)
    if structure is None and "structure" not in params:
        message = f"{path}: fitted with a likelihood that a file does not hold; the chain "
        message += "answers. Set the structure again before another fit"
        warnings.warn(message, StructgpWarning, stacklevel=3)
    return found
