from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_fscore_support

from structgp.errors import InputError
from structgp.evaluation.metrics import (
    Report,
    SpanCounts,
    calibration,
    chunks,
    deferral,
    evaluate,
    label_scores,
    risk_coverage,
    sequence_nll,
    span_scores,
    token_error,
    token_nll,
)

BIO = ["O", "B-A", "I-A", "B-C", "I-C", "E-A", "S-C", "B", "I", "X"]


def labellings(labels=BIO, max_size=6):
    """Pairs (y_true, y_pred) of equal shapes, at least one token."""
    token = st.tuples(st.sampled_from(labels), st.sampled_from(labels))
    sequences = st.lists(st.lists(token, min_size=1, max_size=max_size), min_size=1, max_size=5)
    return sequences.map(lambda s: ([[a for a, _ in q] for q in s], [[b for _, b in q] for q in s]))


@st.composite
def scored(draw):
    """(y_true, marginals), labels a b c, where the true label may be the unseen d."""
    sequences = draw(
        st.lists(
            st.lists(
                st.tuples(
                    st.sampled_from("abcd"),
                    st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any),
                ),
                min_size=1,
                max_size=6,
            ),
            min_size=1,
            max_size=5,
        )
    )
    y = [[label for label, _ in s] for s in sequences]
    marginals = [
        [dict(zip("abc", [w / sum(weights) for w in weights], strict=True)) for _, weights in s]
        for s in sequences
    ]
    return y, marginals


# --- token error -----------------------------------------------------------------------------


def test_token_error_by_hand():
    assert token_error([["a", "b"], ["a"]], [["a", "a"], ["b"]]) == pytest.approx(2 / 3)


def test_lengths_are_checked_and_named():
    with pytest.raises(InputError, match=r"y_pred\[1\]: 2 tokens where y_true\[1\] has 1"):
        token_error([["a"], ["a"]], [["a"], ["a", "b"]])
    with pytest.raises(InputError, match=r"y_pred: 1 sequences where y_true has 2"):
        span_scores([["a"], ["a"]], [["a"]])
    with pytest.raises(InputError, match=r"marginals\[0\]"):
        token_nll([["a"]], [[]])
    with pytest.raises(InputError, match="no tokens"):
        token_error([[]], [[]])
    with pytest.raises(InputError, match="no tokens"):
        calibration([[]], [[]])


# --- spans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("B-A I-A O B-A", [(0, 2, "A"), (3, 4, "A")]),
        # I starts a chunk after O, at the start, and after another type.
        ("I-A I-A O I-C", [(0, 2, "A"), (3, 4, "C")]),
        ("B-A I-C I-C", [(0, 1, "A"), (1, 3, "C")]),
        ("I-A B-A", [(0, 1, "A"), (1, 2, "A")]),
        ("B-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]),
        # IOE: E ends a chunk; an E or I right after it starts another.
        ("I-A E-A I-A E-A E-A", [(0, 2, "A"), (2, 4, "A"), (4, 5, "A")]),
        ("O E-A O", [(1, 2, "A")]),
        # IOBES
        ("S-A S-A B-A I-A E-A", [(0, 1, "A"), (1, 2, "A"), (2, 5, "A")]),
        ("I-A S-A I-A", [(0, 1, "A"), (1, 2, "A"), (2, 3, "A")]),
        # Brackets are chunks of one token; the dot is outside.
        # BILOU
        ("U-A B-A I-A L-A U-A L U", [(0, 1, "A"), (1, 4, "A"), (4, 5, "A"), (5, 6, "L"), (6, 7, "U")]),
        ("[-A [-A . ]-A", [(0, 1, "A"), (1, 2, "A"), (3, 4, "A")]),
        # Without type: one unnamed type.
        ("B I O I B", [(0, 2, ""), (3, 4, ""), (4, 5, "")]),
        ("B I I B", [(0, 3, ""), (3, 4, "")]),
        # The type is what follows the first hyphen.
        ("B-A-x I-A-x I-A-y", [(0, 2, "A-x"), (2, 3, "A-y")]),
        # Without prefix: one token each.
        ("NOUN NOUN O X-Y", [(0, 1, "NOUN"), (1, 2, "NOUN"), (3, 4, "X-Y")]),
        ("O O", []),
        ("", []),
    ],
)
def test_chunks(labels, expected):
    assert chunks(labels.split()) == expected


def test_a_chunk_ends_with_its_sequence():
    scores = span_scores([["B-A"], ["I-A"]], [["B-A"], ["I-A"]])
    assert (scores.n_true, scores.n_pred, scores.n_correct) == (2, 2, 2)


def test_span_scores_by_hand():
    y_true = [["B-A", "I-A", "O", "B-C"], ["B-A", "O"]]
    y_pred = [["B-A", "I-A", "O", "B-A"], ["B-A", "I-A"]]
    scores = span_scores(y_true, y_pred)
    assert (scores.n_true, scores.n_pred, scores.n_correct) == (3, 3, 1)
    assert scores.precision == scores.recall == scores.f1 == pytest.approx(1 / 3)
    assert scores.by_type == {"A": SpanCounts(2, 3, 1), "C": SpanCounts(1, 0, 0)}
    assert scores.by_type["A"].precision == pytest.approx(1 / 3)
    assert scores.by_type["A"].recall == pytest.approx(1 / 2)
    assert scores.by_type["A"].f1 == pytest.approx(2 / 5)
    assert scores.by_type["C"].precision == 0.0


def test_a_chunk_that_overlaps_but_differs_is_wrong():
    assert span_scores([["B-A", "I-A", "I-A"]], [["B-A", "I-A", "O"]]).n_correct == 0
    assert span_scores([["B-A", "I-A"]], [["B-C", "I-C"]]).n_correct == 0


def test_no_chunks_gives_zero_as_conlleval_does():
    scores = span_scores([["O"]], [["O"]])
    assert (scores.precision, scores.recall, scores.f1) == (0.0, 0.0, 0.0)


def test_without_prefixes_f1_is_token_accuracy():
    y_true, y_pred = [["N", "V", "N"]], [["N", "N", "N"]]
    assert span_scores(y_true, y_pred).f1 == pytest.approx(1 - token_error(y_true, y_pred))


@given(labellings())
def test_perfect_prediction(both):
    y, _ = both
    scores = span_scores(y, y)
    expected = 1.0 if scores.n_true else 0.0
    assert scores.f1 == scores.precision == scores.recall == expected
    assert token_error(y, y) == 0.0


@given(labellings())
def test_counts_add_up_and_agree_with_conllevals_running_count(both):
    y_true, y_pred = both
    scores = span_scores(y_true, y_pred)
    for name in ("n_true", "n_pred", "n_correct"):
        assert getattr(scores, name) == sum(getattr(c, name) for c in scores.by_type.values())
    assert (scores.n_true, scores.n_pred, scores.n_correct) == running_count(y_true, y_pred)


def running_count(y_true, y_pred):
    """conlleval's way: one pass, pairwise start and end rules, both labellings side by side."""

    def split(label):
        if label == "O":
            return "O", ""
        tag, _, kind = label.partition("-")
        return (tag, kind) if tag in ("B", "I", "E", "S") else ("S", label)

    def ends(before, now):
        pairs = {"BB", "BO", "BS", "IB", "IO", "IS"}
        return (
            before[0] in ("E", "S")
            or before[0] + now[0] in pairs
            or (before[0] != "O" and before[1] != now[1])
        )

    def starts(before, now):
        pairs = {"OI", "OE", "EI", "EE", "SI", "SE"}
        return (
            now[0] in ("B", "S") or before[0] + now[0] in pairs or (now[0] != "O" and before[1] != now[1])
        )

    n_true = n_pred = n_correct = 0
    for truth, guess in zip(y_true, y_pred, strict=True):
        before_t = before_g = ("O", "")
        inside = False
        for a, b in zip([*truth, "O"], [*guess, "O"], strict=True):
            now_t, now_g = split(a), split(b)
            end_t, end_g = ends(before_t, now_t), ends(before_g, now_g)
            if inside and (end_t or end_g or now_t[1] != now_g[1]):
                n_correct += end_t and end_g and before_t[1] == before_g[1]
                inside = False
            start_t, start_g = starts(before_t, now_t), starts(before_g, now_g)
            inside = inside or (start_t and start_g and now_t[1] == now_g[1])
            n_true += start_t
            n_pred += start_g
            before_t, before_g = now_t, now_g
    return n_true, n_pred, n_correct


# --- likelihood ------------------------------------------------------------------------------


def test_token_nll_by_hand_leaves_unseen_labels_out():
    marginals = [[{"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}], [{"a": 1.0, "b": 0.0}]]
    value = token_nll([["a", "a"], ["never"]], marginals)
    assert value == pytest.approx(-(math.log(0.5) + math.log(0.25)) / 2)


def test_token_nll_of_probability_zero_is_infinite():
    assert token_nll([["a", "b"]], [[{"a": 0.0, "b": 1.0}] * 2]) == math.inf
    tiny = 1e-300
    assert token_nll([["a"]], [[{"a": tiny}]]) == pytest.approx(-math.log(tiny))


def test_token_nll_errors():
    with pytest.raises(InputError, match="training saw"):
        token_nll([["never"]], [[{"a": 1.0}]])
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match=r"not in \[0, 1\]"):
            token_nll([["a"]], [[{"a": bad}]])


def test_sequence_nll():
    assert sequence_nll([-1.0, None, -3.0]) == 2.0
    assert sequence_nll([-1.0, -math.inf]) == math.inf
    with pytest.raises(InputError, match="no sequence"):
        sequence_nll([None])
    with pytest.raises(InputError, match="not a number"):
        sequence_nll([math.nan])


# --- calibration -----------------------------------------------------------------------------


def test_calibration_by_hand():
    marginals = [[{"a": 0.9, "b": 0.1}, {"a": 0.8, "b": 0.2}, {"a": 0.4, "b": 0.6}]]
    result = calibration([["a", "b", "b"]], marginals, n_bins=4)
    low, high = result.bins
    assert (low.low, low.high, low.count) == (0.5, 0.75, 1)
    assert (low.confidence, low.accuracy) == (pytest.approx(0.6), 1.0)
    assert (high.count, high.accuracy, high.confidence) == (2, 0.5, pytest.approx(0.85))
    assert result.ece == pytest.approx((0.4 * 1 + 0.35 * 2) / 3)


def test_calibration_extremes():
    certain = [[{"a": 1.0, "b": 0.0}]]
    assert calibration([["a"]], certain).ece == 0.0
    assert calibration([["b"]], certain).ece == 1.0
    assert calibration([["never"]], certain).ece == 1.0
    assert calibration([["a"]], [[{"a": 1.0 + 1e-12}]]).ece == 0.0


def test_calibration_errors():
    with pytest.raises(InputError, match=r"marginals\[0\]\[1\]"):
        calibration([["a", "a"]], [[{"a": 1.0}, {"a": 2.0}]])
    with pytest.raises(InputError, match="no labels"):
        calibration([["a"]], [[{}]])
    with pytest.raises(InputError, match="n_bins"):
        calibration([["a"]], [[{"a": 1.0}]], n_bins=0)


@given(scored(), st.integers(1, 20))
def test_ece_equals_a_slow_computation(data, n_bins):
    y, marginals = data
    result = calibration(y, marginals, n_bins)
    tokens = [
        (max(d.values()), max(d, key=d.get) == label)
        for truth, dists in zip(y, marginals, strict=True)
        for label, d in zip(truth, dists, strict=True)
    ]
    slow = 0.0
    for b in range(n_bins):
        last = b == n_bins - 1
        members = [(c, r) for c, r in tokens if b <= c * n_bins < b + 1 or (last and c == 1)]
        if members:
            gap = sum(c for c, _ in members) - sum(r for _, r in members)
            slow += abs(gap) / len(tokens)
    assert result.ece == pytest.approx(slow, abs=1e-12)
    assert 0.0 <= result.ece <= 1.0
    assert sum(b.count for b in result.bins) == len(tokens)
    assert all(b.count > 0 for b in result.bins)


# --- risk and coverage -----------------------------------------------------------------------


def test_risk_coverage_by_hand():
    marginals = [[{"a": 0.9, "b": 0.1}, {"a": 0.4, "b": 0.6}], [{"a": 0.2, "b": 0.8}]]
    curve = risk_coverage([["a", "a"], ["b"]], marginals)
    assert curve.coverage.tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    assert curve.risk.tolist() == pytest.approx([0, 0, 1 / 3])
    assert curve.area == pytest.approx(1 / 9)


def test_equal_confidences_share_their_errors():
    marginals = [[{"a": 0.75, "b": 0.25}] * 4]
    curve = risk_coverage([["a", "b", "never", "a"]], marginals)
    assert curve.risk.tolist() == pytest.approx([0.5] * 4)
    assert curve.area == pytest.approx(0.5)


def test_risk_of_labels_that_are_not_the_most_probable():
    marginals = [[{"a": 0.7, "b": 0.3}, {"a": 0.6, "b": 0.4}]]
    curve = risk_coverage([["a", "b"]], marginals, [["b", "b"]])
    assert curve.risk.tolist() == pytest.approx([0, 0.5])  # the second token's label has more probability
    left = deferral([["b", "b"]], marginals)
    assert left.coverage.tolist() == [0.5, 1]
    assert left.doubt.tolist() == pytest.approx([0.6, 0.7])
    assert left.expected.tolist() == pytest.approx([0.6, 0.65])
    with pytest.raises(InputError, match="y_pred"):
        risk_coverage([["a", "b"]], marginals, [["b"]])


def test_risk_coverage_errors():
    with pytest.raises(InputError, match="no tokens"):
        risk_coverage([[]], [[]])
    with pytest.raises(InputError, match=r"marginals\[0\]: 0 tokens"):
        risk_coverage([["a"]], [[]])


@given(scored(), st.randoms())
def test_risk_is_the_mean_over_orders_of_equals(data, rand: random.Random):
    """At the last token of each confidence it is a plain count, whatever the order before it."""
    y, marginals = data
    curve = risk_coverage(y, marginals)
    tokens = [
        (max(dist.values()), max(dist, key=dist.get) != label)
        for truth, dists in zip(y, marginals, strict=True)
        for label, dist in zip(truth, dists, strict=True)
    ]
    rand.shuffle(tokens)
    tokens.sort(key=lambda token: -token[0])
    for k, (confidence, _) in enumerate(tokens, start=1):
        if k == len(tokens) or tokens[k][0] < confidence:
            wrong = sum(error for _, error in tokens[:k])
            assert curve.risk[k - 1] == pytest.approx(wrong / k)
    assert curve.area == pytest.approx(np.mean(curve.risk))
    assert 0 <= curve.area <= 1


# --- report ----------------------------------------------------------------------------------


def test_evaluate_by_hand():
    marginals = [[{"B": 0.75, "O": 0.25}, {"B": 0.5, "O": 0.5}], [{"B": 0.9, "O": 0.1}]]
    report = evaluate([["B", "O"], ["I"]], [["B", "B"], ["B"]], marginals, [-1.5, None])
    assert report == Report(
        token_error=pytest.approx(2 / 3),
        span_f1=pytest.approx(4 / 5),
        span_precision=pytest.approx(2 / 3),
        span_recall=1.0,
        token_nll=pytest.approx(-(math.log(0.75) + math.log(0.5)) / 2),
        sequence_nll=1.5,
        ece=pytest.approx((0.25 + 0.5 + 0.9) / 3),
        n_tokens=3,
        n_sequences=2,
        n_unseen_tokens=1,
        by_type={"": SpanCounts(2, 3, 2)},
        by_label={"B": SpanCounts(1, 3, 1), "I": SpanCounts(1, 0, 0), "O": SpanCounts(1, 0, 0)},
    )
    expected = {"precision": 1 / 3, "recall": 1.0, "f1": 0.5, "support": 1, "predicted": 3}
    assert report.as_dict()["by_label"]["B"] == pytest.approx(expected)
    assert json.loads(json.dumps(report.as_dict()))["n_unseen_tokens"] == 1
    assert next(iter(report.as_dict())) == "token_error"
    assert [line.split() for line in str(report).splitlines()][1::7] == [
        ["token", "error", "66.67%"],
        ["(2", "sequences,", "3", "tokens)"],
        ["I", "0.00%", "0.00%", "0.00%", "1"],
    ]


def test_evaluate_where_every_label_is_unseen():
    report = evaluate([["x"]], [["a"]], [[{"a": 1.0}]], [None])
    assert report.token_nll is None
    assert report.sequence_nll is None
    assert report.n_unseen_tokens == report.n_tokens == 1
    assert report.token_error == 1.0


def test_evaluate_checks_log_probs():
    with pytest.raises(InputError, match="log_probs: 0 values"):
        evaluate([["a"]], [["a"]], [[{"a": 1.0}]], [])


@given(scored(), st.randoms())
def test_order_of_sequences_does_not_matter(data, rand: random.Random):
    y, marginals = data
    y_pred = [[max(d, key=d.get) for d in dists] for dists in marginals]
    log_probs = [None if "d" in truth else -float(len(truth)) for truth in y]
    order = list(range(len(y)))
    rand.shuffle(order)
    one = evaluate(y, y_pred, marginals, log_probs).as_dict()
    other = evaluate(*([part[i] for i in order] for part in (y, y_pred, marginals, log_probs)))
    again = other.as_dict()
    for part in ("by_type", "by_label"):
        assert again.pop(part, None) == one.pop(part, None)
    assert again == pytest.approx(one, abs=1e-12)


@given(scored())
def test_scores_of_labels_are_those_of_scikit_learn(data):
    y, marginals = data
    y_pred = [[max(d, key=d.get) for d in dists] for dists in marginals]
    found = label_scores(y, y_pred)
    flat = [label for labels in y for label in labels], [label for labels in y_pred for label in labels]
    expected = precision_recall_fscore_support(*flat, labels=list(found), zero_division=0.0)
    counts = [(of.precision, of.recall, of.f1, of.n_true) for of in found.values()]
    assert np.array(counts) == pytest.approx(np.array(expected).T)
