"""Confusion matrices learned beside the potentials."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.generate import generate

from structgp import Annotations
from structgp.answers.confusions import RIGHT, STRENGTH, WRONG, Confusions, evidence_of, rows_of
from structgp.data.annotations import Given
from structgp.inference.votes import first_guess

CLASSES = ["A", "B"]


def read(said: list[dict[str, list[str | None]]], sequential: bool = False) -> Given:
    names = sorted({name for of in said for name in of})
    return Given.read(said, names, CLASSES, sequential)


def test_rows_begin_at_the_prior_and_end_at_the_counts() -> None:
    nothing = Confusions(torch.zeros((1, 1, 2, 2), dtype=torch.float64))
    share = RIGHT / (RIGHT + WRONG)
    expected = torch.tensor([[share, 1 - share], [1 - share, share]], dtype=torch.float64)
    torch.testing.assert_close(nothing.mean[0, 0], expected)
    torch.testing.assert_close(nothing.concentration.sum(-1), torch.full((1, 1, 2), 2 * STRENGTH).double())
    many = Confusions(1e6 * torch.tensor([[[[0.9, 0.1], [0.4, 0.6]]]], dtype=torch.float64))
    torch.testing.assert_close(many.mean, many.counts / 1e6, atol=1e-4, rtol=0)


def test_a_rare_label_borrows_from_the_others() -> None:
    """Nothing is known of the second row but what the annotator does on the whole."""
    poor, good = (
        Confusions(torch.tensor([[[row, [0.0, 0.0]]]], dtype=torch.float64))
        for row in ([10.0, 90.0], [90.0, 10.0])
    )
    assert float(poor.mean[0, 0, 1, 1]) < 0.2 < 0.8 < float(good.mean[0, 0, 1, 1])


def test_evidence_adds_up_what_annotators_said() -> None:
    given = read([{"x": ["A", None], "y": ["B", "B"]}, {}, {"y": ["A"]}])
    counts = torch.tensor([[[[9.0, 1.0], [2.0, 8.0]]], [[[5.0, 5.0], [1.0, 9.0]]]], dtype=torch.float64)
    known = Confusions(counts)
    log = known.mean.log().numpy()[:, 0]
    found = evidence_of(given, [2, 0, 1], known)
    np.testing.assert_allclose(found[0][0], log[0, :, 0] + log[1, :, 1])
    np.testing.assert_allclose(found[0][1], log[1, :, 1])
    assert found[1].shape == (0, 2)
    np.testing.assert_allclose(found[2][0], log[1, :, 0])


def test_adding_is_the_transpose_of_looking_up() -> None:
    given = read([{"x": ["A", "B", "B"], "y": ["B", "A", None]}], sequential=True)
    truth = torch.rand((5, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Confusions.unknown(given)
    assert found.counts.shape == (2, 3, 2, 2)
    found.add(rows_of(given), truth)
    expected = np.zeros((2, 3, 2, 2))
    for e in range(5):
        expected[given.annotator[e], given.before[e], :, given.label[e]] += truth[e].numpy()
    np.testing.assert_allclose(found.counts.numpy(), expected)


def test_a_context_is_centred_at_what_the_annotator_does_on_the_whole() -> None:
    counts = torch.zeros((1, 3, 2, 2), dtype=torch.float64)
    counts[0, 0] = torch.tensor([[70.0, 30.0], [20.0, 80.0]])
    plain = Confusions(counts.sum(1, keepdim=True)).mean[0, 0]
    torch.testing.assert_close(Confusions(counts).mean[0, 1], plain)


def test_the_log_prior_is_a_dirichlet_density() -> None:
    found = Confusions(torch.tensor([[[[3.0, 1.0], [0.0, 5.0]]]], dtype=torch.float64))
    rows = torch.distributions.Dirichlet(found.prior + 1).log_prob(found.mean)
    assert found.log_prior == pytest.approx(float(rows.sum()))


def test_a_first_guess_knows_good_from_random() -> None:
    rng = np.random.default_rng(0)
    truth = [rng.choice(CLASSES, size=5).tolist() for _ in range(60)]

    def say(y: list[str], right: float) -> list[str | None]:
        return [v if rng.random() < right else CLASSES[1 - CLASSES.index(v)] for v in y]

    skills = {"good": 0.95, "fair": 0.8, "random": 0.5}
    given = read([{name: say(y, skill) for name, skill in skills.items()} for y in truth])
    known, _ = first_guess(given, [5] * 60, None)
    right = dict(
        zip(given.names, known.mean[:, 0].diagonal(dim1=-1, dim2=-2).mean(-1).tolist(), strict=True)
    )
    for name, skill in skills.items():
        assert right[name] == pytest.approx(skill, abs=0.08)


def test_annotations_of_generated_data_have_the_form_of_labels() -> None:
    data = generate(3, n_labels=2, n_values=3, n_templates=1, mean_length=3, seed=0)
    assert Annotations.of({"one": data.y}).given == [{"one": y} for y in data.y]
