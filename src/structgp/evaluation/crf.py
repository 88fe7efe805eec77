"""The baseline to beat: a linear-chain CRF with a cross-validated regulariser.

    p(y | x)  is proportional to  exp( sum_t sum_a x_ta w[a, y_t]  +  sum_{t>0} G[y_{t-1}, y_t] )

trained by python-crfsuite (L-BFGS) to minimise -log p(y | x) + c2 (|w|^2 + |G|^2). There is a weight for
every attribute with every label, and for every label with every next label, whether or not the two occur
together in training.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse
from scipy.special import logsumexp

from structgp.data.arrays import as_numpy, is_dense
from structgp.errors import InputError
from structgp.evaluation.metrics import check_lengths

C2_GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

# A token as CRFsuite reads it: names of attributes (each of value 1), or name -> value.
Item = list[str] | Mapping[str, Any]
# Items and label numbers of each sequence.
Examples = list[tuple[list[Item], list[str]]]


class LinearCRF:
    """Linear-chain CRF behind the estimator's interface.

    A sequence of X is one of

    - a list of tokens that are lists or tuples of strings: the string s in place j is the attribute
      ``j=s``, so that columns are told apart;
    - a (T, D) scipy-sparse or dense array, or a list of T rows of one: attribute ``d`` has the value in
      column d;
    - a list of feature dicts, as python-crfsuite takes them; entry i of an array under the key k is the
      attribute ``k:i``.

    Parameters
    ----------
    c2 : strength of the L2 regulariser, or several to choose from by cross-validation: the one with the
        fewest wrong tokens is taken, and among equally good ones the largest, which gives the simplest
        model. With a single training sequence nothing can be held out, and the middle one is taken.
    n_folds : folds of that cross-validation (fewer if there are fewer sequences), split at random by
        sequence.
    decode : 'viterbi', the most probable labelling of the sequence, or 'marginal', the most probable label
        of each token; the cross-validation uses it too.
    random_state : seed of the folds.
    n_jobs : processes for the cross-validation, -1 for one per core; None runs it in this process.

    Attributes (after ``fit``)
    ----------
    classes_ : labels seen in training, sorted.
    c2_ : the regulariser used.
    cv_scores_ : c2 -> token error over all held-out tokens; empty if there was no choice to make.
    model_ : the trained model, in CRFsuite's file format."""

    def __init__(
        self,
        c2: float | Sequence[float] = C2_GRID,
        *,
        n_folds: int = 5,
        decode: str = "viterbi",
        random_state: int = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.c2, self.n_folds, self.decode = c2, n_folds, decode
        self.random_state, self.n_jobs = random_state, n_jobs

    def fit(self, X: Iterable[Any], y: Iterable[Sequence[Any]]) -> LinearCRF:
        """Choose c2 by cross-validation, then train on everything."""
        _crfsuite()
        grid = self._checked_grid()
        items, labels = _all_items(X), [list(labels) for labels in y]
        check_lengths(items, labels, "y", "X")
        self.classes_ = _classes(labels)
        number = {label: str(v) for v, label in enumerate(self.classes_)}
        examples = [(x, [number[v] for v in path]) for x, path in zip(items, labels, strict=True) if x]
        self.c2_, self.cv_scores_ = self._choose(examples, grid)
        (self.model_,) = _train(examples, [self.c2_])
        return self

    def predict(self, X: Iterable[Any]) -> list[list[Any]]:
        """Labels, one list per sequence, decoded as ``decode`` says."""
        self._check_fitted()
        paths = _decode(self.model_, _all_items(X), self.decode)
        return [[self.classes_[int(v)] for v in path] for path in paths]

    def predict_marginals(self, X: Iterable[Any]) -> list[list[dict[Any, float]]]:
        """p(y_t = label | x) as a dict label -> probability for each token of each sequence."""
        self._check_fitted()
        tagger = _tagger(self.model_)
        found = (_marginals(tagger, x, len(self.classes_)).tolist() for x in _all_items(X))
        return [[dict(zip(self.classes_, row, strict=True)) for row in rows] for rows in found]

    def sequence_log_probs(self, X: Iterable[Any], y: Iterable[Sequence[Any]]) -> list[float | None]:
        """log p(y | x) of each sequence; None where y has a label never seen in training.

        Computed in log space, since CRFsuite's own probability of a labelling underflows for sequences of
        some hundred tokens. O(T V^2) per sequence."""
        self._check_fitted()
        items, labels = _all_items(X), [list(labels) for labels in y]
        check_lengths(items, labels, "y", "X")
        number, tagger = {label: v for v, label in enumerate(self.classes_)}, _tagger(self.model_)
        # A sequence of one token has p(y | x) proportional to exp(node score), and two tokens without
        # attributes exp(transition score): so CRFsuite's probabilities of such short sequences give its
        # scores up to constants, which cancel in log p(y | x).
        tagger.set([{}, {}])
        names = list(map(str, number.values()))
        transition = _log(np.array([[tagger.probability([a, b]) for b in names] for a in names]))
        found: list[float | None] = [None] * len(items)
        for i, (x, path) in enumerate(zip(items, labels, strict=True)):
            if number.keys() >= set(path):
                node = _log(np.array([_marginals(tagger, [token], len(number))[0] for token in x]))
                found[i] = _log_prob(node, transition, [number[v] for v in path])
        return found

    def _checked_grid(self) -> list[float]:
        grid = sorted({float(c2) for c2 in np.atleast_1d(np.asarray(self.c2, dtype=np.float64))})
        if not grid or not all(0 <= c2 < math.inf for c2 in grid):
            raise InputError("c2", f"must be 0 or more, got {self.c2!r}", "give one number or several")
        if self.decode not in ("viterbi", "marginal"):
            raise InputError("decode", f"{self.decode!r} is not known", "use viterbi or marginal")
        if self.n_folds < 2:
            raise InputError("n_folds", f"must be 2 or more, got {self.n_folds}", "use 5")
        return grid

    def _check_fitted(self) -> None:
        if not hasattr(self, "model_"):
            raise InputError("LinearCRF", "not fitted yet", "call fit(X, y) first")

    def _choose(self, examples: Examples, grid: list[float]) -> tuple[float, dict[float, float]]:
        """The c2 with the lowest token error over held-out folds, and the error of each c2."""
        if len(grid) == 1 or len(examples) == 1:
            return grid[len(grid) // 2], {}
        order = np.random.default_rng(self.random_state).permutation(len(examples))
        folds = np.array_split(order, min(self.n_folds, len(examples)))
        parts = ((np.setdiff1d(order, held_out), held_out) for held_out in folds)
        tasks = [[[examples[i] for i in part] for part in both] for both in parts]
        # joblib's workers are fresh processes: no forked locks of torch's threads, and a caller's script
        # needs no __main__ guard. max_nbytes keeps joblib from writing files.
        jobs = (delayed(_count_errors)(*task, grid, self.decode) for task in tasks)
        wrong = Parallel(n_jobs=self.n_jobs or 1, max_nbytes=None)(jobs)
        errors = np.sum(wrong, axis=0) / sum(len(x) for x, _ in examples)
        scores = dict(zip(grid, errors.tolist(), strict=True))
        return max(c2 for c2 in grid if scores[c2] == min(errors)), scores


def _crfsuite() -> Any:
    """python-crfsuite, imported only when a CRF is used: it is an optional extra."""
    try:
        import pycrfsuite
    except ImportError as err:
        problem = "not installed, and the linear CRF needs it"
        raise InputError("python-crfsuite", problem, 'run pip install "structgp[crf]"') from err
    return pycrfsuite


def _train(examples: Examples, grid: Sequence[float]) -> list[bytes]:
    """One model for each c2, trained on the same data."""
    trainer = _crfsuite().Trainer("lbfgs", verbose=False)
    for x, labels in examples:
        trainer.append(x, labels)
    trainer.set_params({"c1": 0.0, "feature.possible_states": True, "feature.possible_transitions": True})
    # CRFsuite drops a feature whose values add up to less than this, 0 by default.
    trainer.set("feature.minfreq", -1e300)
    models = []
    with tempfile.TemporaryDirectory(prefix="structgp-crf-") as folder:
        file = Path(folder) / "model"
        for c2 in grid:
            trainer.set("c2", c2)
            trainer.train(str(file))
            models.append(file.read_bytes())
    return models


def _tagger(model: bytes) -> Any:
    """An open tagger; the caller keeps ``model`` alive, since the tagger reads from its memory."""
    tagger = _crfsuite().Tagger()
    tagger.open_inmemory(model)
    return tagger


def _decode(model: bytes, items: Iterable[list[Item]], decode: str) -> list[list[str]]:
    """Label numbers, as strings, of each sequence."""
    tagger = _tagger(model)
    if decode == "viterbi":
        return [tagger.tag(x) if x else [] for x in items]
    labels = sorted(tagger.labels(), key=int)
    return [[labels[v] for v in _marginals(tagger, x, len(labels)).argmax(1)] for x in items]


def _marginals(tagger: Any, x: list[Item], n_labels: int) -> NDArray[np.float64]:
    """(T, V) p(y_t = label | x) of one sequence."""
    if x:
        tagger.set(x)
    found = [tagger.marginal(str(v), t) for t in range(len(x)) for v in range(n_labels)]
    return np.array(found).reshape(len(x), n_labels)


def _count_errors(train: Examples, held_out: Examples, grid: list[float], decode: str) -> list[int]:
    """Number of wrong tokens in ``held_out`` for each c2, trained on ``train``."""
    items, truth = [x for x, _ in held_out], [v for _, path in held_out for v in path]
    decoded = (_decode(model, items, decode) for model in _train(train, grid))
    return [sum(map(ne, truth, (v for path in paths for v in path))) for paths in decoded]


def _log(p: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(p)


def _log_prob(node: NDArray[np.float64], transition: NDArray[np.float64], path: Sequence[int]) -> float:
    """log p(path) of a chain with node scores (T, V) and transition scores (V, V)."""
    if not path:
        return 0.0
    score, ahead = node[0, path[0]], node[0]
    for t in range(1, len(path)):
        score = score + transition[path[t - 1], path[t]] + node[t, path[t]]
        ahead = logsumexp(ahead[:, None] + transition, axis=0) + node[t]
    return float(score - logsumexp(ahead))


def _all_items(X: Iterable[Any]) -> list[list[Item]]:
    return [_items(x, f"X[{i}]") for i, x in enumerate(X)]


def _items(x: Any, place: str) -> list[Item]:
    """One sequence in any of the accepted forms -> CRFsuite's items."""
    if issparse(x) or is_dense(x):
        x = as_numpy(x, place)
        if x.ndim != 2:
            raise InputError(place, f"an array of {x.ndim} dimensions", "give tokens by features")
        return _matrix_items(csr_array(x), place)
    if isinstance(x, str):
        raise InputError(place, "a string is not a sequence of tokens", "give a list of tokens")
    return [_token_item(token, f"{place}[{t}]") for t, token in enumerate(x)]


def _token_item(token: Any, place: str) -> Item:
    if isinstance(token, Mapping):
        return {name: _checked_value(name, value, place) for name, value in token.items()}
    if issparse(token):
        return _matrix_items(csr_array(token.reshape((1, -1))), place)[0]
    remedy = "give a list of strings, a feature dict or a row of numbers"
    if isinstance(token, str):
        raise InputError(place, f"the token is the bare string {token!r}", remedy)
    try:
        values = list(as_numpy(token, place))
        if all(isinstance(value, str) for value in values):
            return [f"{j}={value}" for j, value in enumerate(values)]
        row = np.asarray(values, dtype=np.float64).reshape(1, len(values))
    except (TypeError, ValueError) as err:
        raise InputError(place, f"a token of type {type(token).__name__}", remedy) from err
    return _matrix_items(csr_array(row), place)[0]


def _checked_value(name: Any, value: Any, place: str) -> Any:
    """A vector as a dict from position to number, as python-crfsuite takes it; other values unchanged."""
    if not isinstance(name, str):
        raise InputError(place, f"the feature name {name!r} is not a string", "use strings")
    is_vector = isinstance(value := as_numpy(value, place), np.ndarray)
    if (is_vector or isinstance(value, float)) and not np.isfinite(value).all():
        shown = "not finite" if is_vector else value
        raise InputError(place, f"feature {name!r} is {shown}", "use finite numbers")
    return {str(i): float(v) for i, v in enumerate(value)} if is_vector else value


def _matrix_items(matrix: csr_array, place: str) -> list[Item]:
    matrix = matrix.astype(np.float64)
    matrix.sum_duplicates()
    if not np.isfinite(matrix.data).all():
        raise InputError(place, "a value is not finite", "use finite numbers")
    names, values = list(map(str, matrix.indices.tolist())), matrix.data.tolist()
    spans = zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)
    return [{name: v for name, v in zip(names[a:b], values[a:b], strict=True) if v} for a, b in spans]


def _classes(labels: list[list[Any]]) -> list[Any]:
    try:
        classes = sorted({label for path in labels for label in path})
    except TypeError as err:
        raise InputError("y", f"labels of mixed types ({err})", "use strings") from err
    if not classes:
        raise InputError("y", "no labels", "give at least one labelled token")
    return classes
