"""scikit-learn's own suite of checks, as far as an estimator of sequences can take it.

Checks that fit nothing are run on the classifier itself. Those that fit feed arrays, one row a sample: they
are run on ``Rows``, in which a row is a sequence of one token. What is left is named with its reason, and a
check that scikit-learn adds is in no list, which fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from sklearn.base import ClassifierMixin
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import estimator_checks_generator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from structgp import StructuredGPClassifier


def tokens(X: np.ndarray) -> list[list[list[str]]]:
    return [[[f"{value:.0f}" for value in x]] for x in X]


class Rows(ClassifierMixin, StructuredGPClassifier):
    """A row is a sequence of one token, a number a word; labels are counted through."""

    partial_fit = property()  # type: ignore[assignment]

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Rows:  # type: ignore[override]
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        values, index = np.unique(y, return_inverse=True)
        super().fit(tokens(X), [[f"{i:03}"] for i in index], sample_weight=sample_weight)
        self.classes_ = values
        return self

    def predict(self, X: Any) -> Any:  # type: ignore[override]
        return self.classes_[[int(y[0]) for y in super().predict(self._tokens(X))]]

    def predict_proba(self, X: Any) -> np.ndarray:
        return np.array([list(p[0].values()) for p in self.predict_marginals(self._tokens(X))])

    def score(self, X: Any, y: Any) -> float:
        return float(np.mean(self.predict(X) == y))

    def _tokens(self, X: Any) -> list[Any]:
        check_is_fitted(self, "model_")
        return tokens(validate_data(self, X, reset=False))


WITHOUT_A_FIT = {
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_set_params",
    "check_valid_tag_types",
}

ON_ROWS = {
    "check_all_zero_sample_weights_error",
    "check_classifiers_classes",
    "check_classifiers_one_label",
    "check_classifiers_one_label_sample_weights",
    "check_classifiers_train",
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_estimators_dtypes",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_estimators_pickle",
    "check_f_contiguous_array_estimator",
    "check_fit2d_1feature",
    "check_fit2d_1sample",
    "check_fit_check_is_fitted",
    "check_fit_idempotent",
    "check_fit_score_takes_y",
    "check_methods_sample_order_invariance",
    "check_methods_subset_invariance",
    "check_pipeline_consistency",
    "check_positive_only_tag_during_fit",
    "check_readonly_memmap_input",
    "check_sample_weights_list",
    "check_sample_weights_not_an_array",
    "check_sample_weights_not_overwritten",
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
}

EXCLUDED: dict[str, tuple[str, ...]] = {
    "of arrays, which X is not: what is checked would be validate_data in Rows": (
        "check_array_api_input",
        "check_array_api_input_and_values",
        "check_array_api_mixed_inputs",
        "check_array_api_same_namespace",
        "check_classifier_data_not_an_array",
        "check_classifiers_regression_target",
        "check_complex_data",
        "check_dataframe_column_names_consistency",
        "check_dtype_object",
        "check_estimator_sparse_array",
        "check_estimator_sparse_matrix",
        "check_estimator_sparse_tag",
        "check_estimators_data_not_an_array",
        "check_estimators_empty_data_messages",
        "check_estimators_nan_inf",
        "check_fit1d",
        "check_fit2d_predict1d",
        "check_inplace_ensure_writeable",
        "check_n_features_in",
        "check_n_features_in_after_fitting",
        "check_nonsquare_error",
        "check_requires_y_none",
        "check_supervised_y_2d",
        "check_supervised_y_no_nan",
    ),
    "a sequence has draws of its own, so that a weight of two is two of them only but for the draws: "
    "tests/api/test_weights_of_data.py": (
        "check_sample_weight_equivalence_on_dense_data",
        "check_sample_weight_equivalence_on_sparse_data",
    ),
    "labels are strings, and the weights of classes are named by them: tests/api/test_weights_of_data.py": (
        "check_class_weight_balanced_classifiers",
        "check_class_weight_balanced_linear_classifier",
        "check_class_weight_classifiers",
    ),
    "features are learned on, and their number grows: tests/api/test_going_on.py": (
        "check_estimators_partial_fit_n_features",
    ),
    "there is no max_iter or n_iter_: optimisers have limits of their own": (
        "check_non_transformer_estimators_n_iter",
        "check_transformer_n_iter",
    ),
    "there is no decision_function": (
        "check_classifiers_multilabel_output_format_decision_function",
        "check_classifiers_predictions",
        "check_decision_proba_consistency",
    ),
    "a default may be an option object, which is frozen: tests/api/test_options.py": (
        "check_parameters_default_constructible",
    ),
    "of several outputs, or of two classes at most": (
        "check_classifier_multioutput",
        "check_classifier_not_supporting_multiclass",
        "check_classifiers_multilabel_output_format_predict",
        "check_classifiers_multilabel_output_format_predict_proba",
        "check_classifiers_multilabel_representation_invariance",
    ),
    "of scikit-learn's declarations of parameters; ours are checked in tests/api/test_estimator.py": (
        "check_param_validation",
    ),
    "of transformers": (
        "check_get_feature_names_out_error",
        "check_global_output_transform_pandas",
        "check_global_set_output_transform_polars",
        "check_set_output_transform",
        "check_set_output_transform_pandas",
        "check_set_output_transform_polars",
        "check_transformer_data_not_an_array",
        "check_transformer_general",
        "check_transformer_get_feature_names_out",
        "check_transformer_get_feature_names_out_pandas",
        "check_transformer_preserve_dtypes",
        "check_transformers_unfitted",
        "check_transformers_unfitted_stateless",
    ),
    "of regressors": (
        "check_regressor_data_not_an_array",
        "check_regressor_multioutput",
        "check_regressors_int",
        "check_regressors_no_decision_function",
        "check_regressors_train",
    ),
    "of clusterers": ("check_clusterer_compute_labels_predict", "check_clustering"),
    "of detectors of outliers": (
        "check_outlier_contamination",
        "check_outlier_corruption",
        "check_outliers_fit_predict",
        "check_outliers_train",
    ),
    "of features that may not be negative": ("check_fit_non_negative",),
    "of linear models": ("check_sparsify_coefficients",),
    "the suite itself": ("check_estimator",),
}


def name_of(check: Any) -> str:
    name: str = getattr(check, "func", check).__name__
    return name


def of(estimator: Any, names: set[str]) -> list[Any]:
    """Those of the suite's checks on the estimator that are named, each as a case."""
    found = []
    for own, check in estimator_checks_generator(estimator):
        if name_of(check) in names:
            keywords = getattr(check, "keywords", {})
            told = "-".join(f"{k}={v}" for k, v in keywords.items())
            found.append(pytest.param(own, check, id=f"{name_of(check)}-{told}".strip("-")))
    return found


def run(estimator: Any, check: Callable[[Any], None]) -> None:
    try:
        check(estimator)
    except SkipTest as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(("estimator", "check"), of(StructuredGPClassifier(), WITHOUT_A_FIT))
def test_without_a_fit(estimator: Any, check: Any) -> None:
    run(estimator, check)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("estimator", "check"), of(Rows(n_draws=4), ON_ROWS))
def test_on_rows(estimator: Any, check: Any) -> None:
    run(estimator, check)


def test_every_check_is_run_or_has_a_reason_not_to_be() -> None:
    suite = {
        name
        for name, part in vars(estimator_checks).items()
        if name.startswith("check_")
        and inspect.isfunction(part)
        and part.__module__ == estimator_checks.__name__
    }
    for estimator in (StructuredGPClassifier(), Rows()):
        suite |= {name_of(check) for _, check in estimator_checks_generator(estimator)}
    excluded = [name for names in EXCLUDED.values() for name in names]
    named = [*WITHOUT_A_FIT, *ON_ROWS, *excluded]
    assert len(named) == len(set(named)), "each in one list"
    assert not suite - set(named), "new in scikit-learn: run it, or say why not"
    for names, estimator in ((WITHOUT_A_FIT, StructuredGPClassifier()), (ON_ROWS, Rows())):
        offered = {name_of(check) for _, check in estimator_checks_generator(estimator)}
        assert names & suite <= offered, "named as run, and not run"
