"""The spaCy component: entities with probabilities, on disk and back, in several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from structgp import InputError, Prior, StructuredGPClassifier
from structgp.data.documents import Document, token_features

spacy = pytest.importorskip("spacy")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["Ann left Rome", "Bob saw Rome", "Ann saw Bob", "Rome left"]
SPANS = [
    [(0, 3, "PER"), (9, 13, "LOC")],
    [(0, 3, "PER"), (8, 12, "LOC")],
    [(0, 3, "PER"), (8, 11, "PER")],
    [(0, 4, "LOC")],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [Document.from_text(t, s) for t, s in zip(TEXTS * 3, SPANS * 3, strict=True)]
    tagger = StructuredGPClassifier(prior=Prior(data_weight=1.0))
    tagger.fit([token_features(d.words) for d in documents], [d.labels for d in documents])
    path = tmp_path_factory.mktemp("spacy") / "model"
    tagger.save(path)
    return path


@pytest.fixture
def nlp(model: Path) -> object:
    import structgp.api.spacy_component  # registers the factory

    assert structgp.api.spacy_component.Tagger
    found = spacy.blank("en")
    found.add_pipe("structgp", config={"model": str(model)})
    return found


def told(doc):
    return [(e.text, e.label_, e._.probability, e._.uncertainty, e._.model_uncertainty) for e in doc.ents]


def test_entities_with_probability_and_uncertainty(nlp, model: Path) -> None:
    doc = nlp("Ann saw\n Rome")
    assert [(e.text, e.label_) for e in doc.ents] == [("Ann", "PER"), ("Rome", "LOC")]
    tagger = __import__("structgp").load(model)
    x = token_features(["Ann", "saw", "Rome"])
    for entity, place in zip(doc.ents, (0, 2), strict=True):
        assert entity._.probability == pytest.approx(
            tagger.span_probability(x, place, place + 1, entity.label_)
        )
        expected = tagger.span_uncertainty(x, place, place + 1, entity.label_)
        assert entity._.uncertainty == pytest.approx(expected.total)
        assert entity._.model_uncertainty == pytest.approx(expected.model)
    shares = [token._.label_probability for token in doc]
    assert shares[2] is None  # white space
    assert all(0 < p <= 1 for p in shares if p is not None)
    assert nlp.get_pipe("structgp").labels == ("LOC", "PER")
    assert not nlp("").ents


def test_a_pipeline_comes_back_from_disk(nlp, tmp_path: Path) -> None:
    nlp.to_disk(tmp_path / "nlp")
    again = spacy.load(tmp_path / "nlp")
    assert [told(again(text)) for text in TEXTS] == [told(nlp(text)) for text in TEXTS]


def test_two_processes_answer_as_one(nlp) -> None:
    texts = TEXTS * 5
    one, two = ([told(doc) for doc in nlp.pipe(texts, batch_size=4, n_process=n)] for n in (1, 2))
    assert one == two


def test_a_threshold_and_our_own_tokens(model: Path) -> None:
    found = spacy.blank("en")
    found.add_pipe("structgp", config={"model": str(model), "tokens": "structgp", "threshold": 0.99999})
    assert not found("Ann saw Rome").ents
    ours = spacy.blank("en")
    ours.add_pipe("structgp", config={"model": str(model), "tokens": "structgp"})
    assert [e.text for e in ours("Ann saw Rome").ents] == ["Ann", "Rome"]


def test_what_cannot_be(model: Path, tmp_path: Path) -> None:
    empty = spacy.blank("en")
    empty.add_pipe("structgp")
    with pytest.raises(InputError, match="structgp: has no model; give its path"):
        empty("Ann")
    with pytest.raises(InputError, match="tokens: 'ours' is not known"):
        spacy.blank("en").add_pipe("structgp", config={"model": str(model), "tokens": "ours"})
    tagger = __import__("structgp").load(model)
    tagger.save(tmp_path / "columns", {"format": "jsonl"})
    with pytest.raises(InputError, match="was trained on jsonl, not on documents"):
        spacy.blank("en").add_pipe("structgp", config={"model": str(tmp_path / "columns")})
