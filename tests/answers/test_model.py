"""The model file: what comes back, what is refused, and what a failed save leaves behind."""

from __future__ import annotations

import ast
import copy
import errno
import importlib
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import scipy.sparse
import torch
from benchmarks.generate import generate
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel

import structgp
from structgp import InputError, ModelFileError, Prior, SecondOrder, StructuredGPClassifier
from structgp.answers import model_file
from structgp.answers.ask import Model, Question
from structgp.data import atomic
from structgp.gp import FullTable, Inducing, Mixture, Posterior, Table, Weights, contrasts
from structgp.gp.kernels import RelevanceKernel
from structgp.inference import Natural
from structgp.structures import Chain, Piecewise


@pytest.fixture(scope="module")
def data():
    return generate(16, n_labels=3, n_values=12, n_templates=3, mean_length=4, seed=1)


@pytest.fixture(scope="module")
def fitted(data):
    return fit(data.X, data.y)


@pytest.fixture(scope="module")
def content(fitted, tmp_path_factory):
    """The bytes of a good file."""
    path = tmp_path_factory.mktemp("model") / "model"
    fitted.save(path)
    return path.read_bytes()


def fit(X, y, **parameters):
    defaults = {"n_draws": 8, "posterior": structgp.Inducing(n_inducing=8)}
    model = StructuredGPClassifier(**(defaults | parameters))
    return model.fit(X, y, callback=lambda info: info.iteration == 4)


def dense(X):
    return [np.array([[int(v[1:]) / 12 for v in token] for token in x]) for x in X]


def mixed(X):
    return [[{"a": a, "größe": int(b[1:]) / 12, "c": [c, "語"]} for a, b, c in x] for x in X]


def header_size(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def refused(path, *parts) -> ModelFileError:
    """The one line said of a file, by both doors."""
    with pytest.raises(ModelFileError) as caught:
        structgp.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert caught.value.problem
    assert caught.value.remedy
    for part in parts:
        assert part in text
    with pytest.raises(ModelFileError) as again:
        model_file.load(path)
    assert str(again.value) == text
    return caught.value


# -- there and back --------------------------------------------------------------------------------


FORMS = {
    "columns": (list, {}),
    "product": (list, {"kernel": "template-product"}),
    "bag": (list, {"features": "bag"}),
    "mixed": (mixed, {}),
    "mixed, chosen": (mixed, {"kernel": {"categorical": "template-product", "sparse": "rbf"}}),
    "dense": (dense, {}),
    "dense linear": (dense, {"kernel": "linear"}),
    "user's kernel": (
        dense,
        {"kernel": ScaleKernel(MaternKernel(nu=1.5, active_dims=[0, 2])) + RBFKernel(ard_num_dims=3)},
    ),
    "sparse": (lambda X: [scipy.sparse.csr_matrix(rows) for rows in dense(X)], {"kernel": "rbf"}),
    "no pairs": (list, {"prior": Prior(transition_sd=0)}),
    "scales": (list, {"inference": SecondOrder(learn_scales=True)}),
    "mean": (list, {"n_draws": 0}),
    "adam": (list, {"inference": "adam"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_round_trip_to_the_last_bit(name, data, tmp_path):
    change, parameters = FORMS[name]
    X = change(data.X)
    estimator = fit(X[:12], data.y[:12], **parameters)
    # A word never seen, a longer sequence, none at all.
    new = change([[("v1", "v11", "v0"), ("v10", "v1", "v11")], data.X[0] + data.X[1]])
    asked = X[12:] + new
    y = [["L0"] * len(x) if not scipy.sparse.issparse(x) else ["L0"] * x.shape[0] for x in asked]
    path = tmp_path / "a model.sgp"
    estimator.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a model.sgp"]
    for loaded in (structgp.load(path), structgp.load(str(path))):
        assert loaded.predict_marginals(asked) == estimator.predict_marginals(asked)
        assert loaded.predict(asked) == estimator.predict(asked)
        assert loaded.sequence_log_probs(asked, y) == estimator.sequence_log_probs(asked, y)
        loaded.decode = estimator.decode = "sequence"
        assert loaded.predict(asked) == estimator.predict(asked)
        estimator.decode = "accuracy"
    again = tmp_path / "again"
    structgp.load(path).save(again)
    assert structgp.load(again).predict_marginals(asked) == estimator.predict_marginals(asked)


POSTERIORS = {
    "full": (Inducing, {}, {"sd": 0.7}),
    "diagonal, full table": (Inducing, {"covariance": "diagonal"}, {"table": FullTable, "sd": 0.7}),
    "low-rank, contrasts, silent": (
        Inducing,
        {"covariance": "low-rank", "rank": 2, "basis": contrasts(torch.tensor([3.0, 2.0, 1.0]))},
        {"sd": 0.0},
    ),
    "mixture, silent full table": (Mixture, {"n_components": 2}, {"table": FullTable, "sd": 0.0}),
    "diagonal mixture, contrasts": (
        Mixture,
        {"n_components": 3, "covariance": "diagonal", "basis": contrasts(torch.ones(3))},
        {"sd": 0.7},
    ),
    "weights, contrasts": (Weights, {"basis": contrasts(torch.ones(3))}, {"sd": 0.7}),
    "weights": (Weights, {}, {"sd": 0.0}),
}
"""Family and arguments of the nodes' block, arguments of the table."""


def with_posterior(fitted, family=Inducing, options=None, table=None, **fields) -> Model:
    """The fitted model with another posterior in it, nothing of which is at its start."""
    old = fitted.model_
    node = old.posterior.node
    place = (node.kernel,) if family is Weights else (node.kernel, node.inducing)
    arguments = dict(table or {})
    make = arguments.pop("table", Table)
    blocks = {"node": family(*place, (3,), **(options or {})), "next": make((3, 3), **arguments)}
    q = away_from_the_start(Posterior(blocks))
    return Model(old.encoder, old.labels, q, n_draws=8, **fields)


def away_from_the_start(q: Posterior) -> Posterior:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in q.named_parameters():
            if ".kernel." not in name and parameter.isfinite().all():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += 0.5 * noise
    for block in q.blocks:
        block.round_factor()
    return q.requires_grad_(False)


def assert_same_state(one: Posterior, other: Posterior) -> None:
    """To the last bit, in the same families."""
    state, loaded = one.state_dict(), other.state_dict()
    assert list(state) == list(loaded)
    for name, value in state.items():
        assert value.dtype == loaded[name].dtype, name
        assert torch.equal(value, loaded[name]), name
    assert [type(b) for b in one.blocks] == [type(b) for b in other.blocks]
    assert [b.options() for b in one.blocks] == [b.options() for b in other.blocks]
    assert [b.has_own_functions for b in one.blocks] == [b.has_own_functions for b in other.blocks]


@pytest.mark.parametrize("name", POSTERIORS)
def test_every_posterior_comes_back_to_the_last_bit(name, fitted, data, tmp_path):
    before = with_posterior(fitted, *POSTERIORS[name])
    path = tmp_path / "model"
    model_file.save(before, path)
    after = model_file.load(path)
    assert_same_state(before.posterior, after.posterior)
    for n_draws in (8, 0):
        for one, other in zip(
            before.ask(data.X, Question(n_draws)).marginals(),
            after.ask(data.X, Question(n_draws)).marginals(),
            strict=True,
        ):
            assert np.array_equal(one, other)
    y = [["L0"] * len(x) for x in data.X]
    assert before.ask(data.X).log_probs(y) == after.ask(data.X).log_probs(y)


def test_transitions_with_features_come_back(fitted, tmp_path):
    """The block of every template, with the kernel of its own features."""
    old = fitted.model_
    kernel, spec = RelevanceKernel([4, 2], rare=True).double(), structgp.chain(features=["0", "1"])
    blocks = {"node": old.posterior.node, "next": Weights(kernel, (3, 3))}
    model = Model(old.encoder, old.labels, away_from_the_start(copy.deepcopy(Posterior(blocks))), spec)
    model_file.save(model, tmp_path / "model")
    after = model_file.load(tmp_path / "model").posterior
    assert list(after) == ["node", "next"]
    assert after["next"].labels == (3, 3)
    assert_same_state(model.posterior, after)


def test_diagonal_covariances_take_less_space(fitted, tmp_path):
    sizes = []
    for covariance in ("full", "diagonal"):
        model = with_posterior(fitted, options={"covariance": covariance})
        model_file.save(model, tmp_path / covariance)
        with safetensors.safe_open(tmp_path / covariance, framework="np") as file:
            sizes.append(file.get_tensor("node.factor").shape)
    M = fitted.model_.posterior.node.n_values
    assert sizes == [(3, M * (M + 1) // 2), (3, M)]


# -- what answers ----------------------------------------------------------------------------------


class Backwards(Chain):
    """Reads sequences from their end."""

    def marginals(self, f, g, mask):
        return super().marginals(f, g.mT, mask)


def test_a_predictor_answers_and_is_not_kept(fitted, data, tmp_path):
    """A file holds its name, and no code: it has to be passed again, and nothing else in its place."""
    plain, own = with_posterior(fitted), with_posterior(fitted, predictor=Backwards())
    assert isinstance(plain.structure, Chain)
    assert isinstance(own.structure, Backwards)
    p, q = (model.ask(data.X).marginals() for model in (plain, own))
    assert any(not np.allclose(one, other) for one, other in zip(p, q, strict=True))
    path = tmp_path / "model"
    model_file.save(own, path)
    refused(path, "Backwards, which a file does not hold", "load(path, structure=Backwards())")
    with pytest.raises(ModelFileError, match=r"answers by .*Backwards, .* was given .*Piecewise; pass it"):
        model_file.load(path, Piecewise())
    loaded = model_file.load(path, Backwards())
    assert isinstance(loaded.structure, Backwards)
    assert all(np.array_equal(*two) for two in zip(q, loaded.ask(data.X).marginals(), strict=True))
    model_file.save(plain, path)
    with pytest.raises(ModelFileError, match="answers by the chain; leave structure out"):
        model_file.load(path, Backwards())


MINE = """
from structgp.structures import Structure


class Mine(Structure):
    # Every token by itself: a softmax.
    def log_prob(self, f, g, y, mask):
        chosen = f.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
        return (chosen * mask).sum(-1) + 0 * g.sum((-1, -2))[:, None]

    def marginals(self, f, g, mask):
        return f.softmax(-1) * mask[..., None]


def function(f, g, y):
    return f.log_softmax(-1)[:, range(len(y)), y].sum(-1) + 0 * g.sum((-1, -2))
"""

ASK = """
import json, sys, warnings
import torch
import structgp
sys.path.insert(0, ".")
import mine
torch.set_num_threads(1)
X = json.load(open("x.json"))
given = {"class": {"structure": mine.Mine()}, "function": {"structure": mine.function}}
for name in ("features", "class", "function", "chain"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = structgp.load(name, **given.get(name, {}))
    warned = [str(w.message) for w in caught if issubclass(w.category, structgp.StructgpWarning)]
    y = [["L0"] * len(x) for x in X]
    answers = model.predict_marginals(X), model.sequence_log_probs(X, y), model.predict(X), warned
    print(json.dumps(answers))
"""


def test_every_kind_of_structure_answers_alike_in_a_new_process(data, tmp_path, monkeypatch):
    """A declared one with features on transitions, a class of the user's own, and a plain function that
    answers itself or through the chain: to the last bit."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "x.json").write_text(json.dumps(data.X))
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine")
    quick = {"n_draws": 8, "inference": Natural(max_steps=2)}
    made = {
        "features": StructuredGPClassifier(structure=structgp.chain(features=["0", "2"]), n_draws=8),
        "class": StructuredGPClassifier(structure=mine.Mine(), **quick),
        "function": StructuredGPClassifier(structure=mine.function, **quick),
        "chain": StructuredGPClassifier(
            structure=structgp.Custom(mine.function, predict_with="chain"), **quick
        ),
    }
    expected = []
    for name, model in made.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", structgp.StructgpWarning)
            model.fit(data.X, data.y)
        model.save(tmp_path / name)
        y = [["L0"] * len(x) for x in data.X]
        expected.append(
            [model.predict_marginals(data.X), model.sequence_log_probs(data.X, y), model.predict(data.X)]
        )
    assert made["features"].model_.split.next is not None
    with pytest.raises(ModelFileError, match=r"mine.Mine, .*; pass it: load\(path, structure=Mine\(\)\)$"):
        structgp.load(tmp_path / "class")
    said = (
        r"mine.function, which a file .*; pass it: load\(path, structure=function\), or structure='chain'"
    )
    for other in (None, mine.Mine(), mine.Mine):
        with pytest.raises((ModelFileError, InputError), match=said if other is None else "Mine"):
            structgp.load(tmp_path / "function", structure=other)
    with pytest.warns(structgp.StructgpWarning, match="the chain answers"):
        by_chain = structgp.load(tmp_path / "function", structure="chain")
    assert isinstance(by_chain.model_.structure, Chain)
    source = Path(structgp.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # repr of a float reads back as the same float.
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answers[:3] for answers in found] == expected
    assert [len(answers[3]) for answers in found] == [0, 0, 0, 1]
    assert "fitted with a likelihood that a file does not hold; the chain answers" in found[3][3][0]


def test_what_else_comes_back(fitted, data, tmp_path):
    fitted.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert loaded.get_params() == fitted.get_params()
    assert loaded.classes_.tolist() == fitted.classes_.tolist()
    assert loaded.training_log_["elbo"] == fitted.training_log_["elbo"]
    assert loaded.training_log_["version"] == structgp.__version__
    assert loaded.training_log_["n_sequences"] == len(data.X)
    assert loaded.training_log_["n_tokens"] == sum(map(len, data.X))
    # It can be fitted again.
    again = loaded.fit(data.X, data.y).predict_marginals(data.X)
    assert again == fitted.predict_marginals(data.X)


def test_extra_is_kept(fitted, tmp_path):
    fitted.model_.extra["note"] = {"für": ["später", 1, None]}
    try:
        fitted.save(tmp_path / "model")
    finally:
        del fitted.model_.extra["note"]
    assert structgp.load(tmp_path / "model").model_.extra["note"] == {"für": ["später", 1, None]}


def test_the_file_is_plain_safetensors_and_json(content, tmp_path):
    path = tmp_path / "model"
    path.write_bytes(content)
    with safetensors.safe_open(path, framework="np") as file:
        header = json.loads(file.metadata()["structgp"])
        node = {f"node.{name}" for name in ("inducing", "m", "factor", "basis")}
        assert node | {"next.m", "next.factor"} <= set(file.keys())
    assert header["format"] == model_file.FORMAT
    assert header["labels"] == ["L0", "L1", "L2"]


# -- no code in it ---------------------------------------------------------------------------------


def test_the_package_never_unpickles():
    """No module imports a library that builds objects from bytes, or calls one that does."""
    root = Path(importlib.util.find_spec("structgp").origin).parent
    banned = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
    banned_calls = {"torch.load", "torch.save", "joblib.load", "eval", "exec", "__import__"}
    # The conformance suite may: it reads back only what it has pickled itself.
    files = [file for file in sorted(root.rglob("*.py")) if "testing" not in file.parts]
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not {a.name.split(".")[0] for a in node.names} & banned, file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, file
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in banned_calls, file
                if called in {"np.load", "numpy.load"}:
                    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    assert given.get("allow_pickle", "False") == "False", file


def test_loading_calls_no_unpickler(content, tmp_path, monkeypatch):
    path = tmp_path / "model"
    path.write_bytes(content)

    def never(*_, **__):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    structgp.load(path)


# -- files that are no good ------------------------------------------------------------------------


def test_every_kind_of_truncation(content, tmp_path):
    path = tmp_path / "model"
    header, size = header_size(content), len(content)
    lengths = [0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1]
    lengths += [(header + size) // 2, size - 8, size - 1]
    assert len(set(lengths)) == len(lengths)
    for length in lengths:
        path.write_bytes(content[:length])
        refused(path)


def test_more_than_was_written(content, tmp_path):
    path = tmp_path / "model"
    path.write_bytes(content + b"\0")
    refused(path)


def test_a_changed_byte_in_the_tensors(content, tmp_path):
    path = tmp_path / "model"
    start = header_size(content)
    for place in np.linspace(start, len(content) - 1, 60).astype(int).tolist():
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        refused(path, "altered since it was written", "copy or train it again")


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80])
def test_a_changed_byte_in_the_metadata(content, tmp_path, flip):
    path = tmp_path / "model"
    header = header_size(content)
    # The first eight are the header's length; the rest is JSON, with blanks at its end.
    places = {*range(8), *np.linspace(8, header - 1, 150).astype(int).tolist()}
    for place in sorted(places):
        changed = bytearray(content)
        changed[place] ^= flip
        path.write_bytes(changed)
        refused(path)


def test_a_plausible_change_in_the_metadata(content, tmp_path):
    path = tmp_path / "model"
    for before, after in (
        (b'[\\"L0\\",\\"L1\\"', b'[\\"L1\\",\\"L0\\"'),
        (b'\\"seed\\":', b'\\"sEed\\":'),
        (b'\\"v10\\"', b'\\"v19\\"'),
    ):
        before, after = before.replace(b",", b", "), after.replace(b",", b", ")
        assert content.count(before) > 0, before
        path.write_bytes(content.replace(before, after, 1))
        refused(path, "altered since it was written")


def test_files_of_others(tmp_path):
    path = tmp_path / "file"
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    refused(path, "a safetensors file of another program", "pass a file that structgp wrote")
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    refused(path, "a safetensors file of another program")
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path, {"structgp": "{}"})
    refused(path, "altered")
    path.write_text("U00:%x[0,0]\nB\n" * 100)
    refused(path, "not a structgp model")
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    refused(path, "not a structgp model")
    path.write_bytes(pickle.dumps({"model": 1}))
    refused(path, "not a structgp model")
    torch.save({"m": torch.zeros(2)}, path)
    refused(path, "not a structgp model")


def test_what_is_no_file(tmp_path):
    refused(tmp_path)
    refused(tmp_path / "nothing", "no such file", "check the path")
    refused(tmp_path / "no" / "folder", "no such file")
    (tmp_path / "file").write_text("text")
    refused(tmp_path / "file" / "model")


def rewritten(content: bytes, path: Path, **changes) -> None:
    """A good file with other entries in its header, digest included: what a later version writes."""
    path.write_bytes(content)
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["structgp"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = json.dumps(header | changes)
    metadata = {"structgp": text, "digest": model_file._digest(text, tensors)}
    path.write_bytes(safetensors.torch.save(tensors, metadata))


def test_a_later_format_names_the_versions(content, tmp_path):
    path = tmp_path / "model"
    rewritten(content, path)
    structgp.load(path)
    rewritten(content, path, format=model_file.FORMAT + 1, version="9.8.7", kernel="of a later kind")
    refused(
        path,
        f"format {model_file.FORMAT + 1}",
        "structgp 9.8.7",
        f"this is {structgp.__version__}",
        f"up to format {model_file.FORMAT}",
        "update structgp",
    )


def test_an_earlier_format_asks_for_another_fit(content, tmp_path):
    path = tmp_path / "model"
    rewritten(content, path, format=1, posterior=None, predict_with=None)
    refused(path, "format 1", "written by an earlier development version", "train it again")


def blocks_of(content: bytes) -> list[dict]:
    """What the header says of each block of the posterior."""
    header = json.loads(content[8 : header_size(content)])
    return json.loads(header["__metadata__"]["structgp"])["posterior"]


def test_a_family_this_version_does_not_know(content, tmp_path):
    path = tmp_path / "model"
    node, table = blocks_of(content)
    rewritten(content, path, posterior=[node | {"family": "spline"}, table], version="9.8.7")
    refused(path, "a posterior of family 'spline'", "update structgp", "9.8.7")


def test_a_file_cannot_name_a_class_to_build(content, tmp_path):
    path = tmp_path / "model"
    evil = {"class": "os.system", "arguments": {}, "positional": []}
    node, table = blocks_of(content)
    rewritten(content, path, posterior=[node | {"kernel": evil}, table])
    with pytest.raises(InputError, match=r"unknown kernel 'os\.system'"):
        structgp.load(path)


# -- saves that fail -------------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullFile:
    """A file on a disk without space."""

    def __init__(self, *arguments, **keywords):
        self.file = open(*arguments, **keywords)  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, _):
        full()


@pytest.mark.parametrize("where", ["write", "flush", "rename"])
def test_a_full_disk_leaves_the_old_file(where, fitted, content, tmp_path, monkeypatch):
    path = tmp_path / "model"
    path.write_bytes(content)
    if where == "write":
        monkeypatch.setattr(atomic, "open", FullFile, raising=False)
    else:
        monkeypatch.setattr(os, "fsync" if where == "flush" else "replace", full)
    with pytest.raises(InputError) as caught:
        fitted.save(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: cannot be written (No space left on device); ")
    assert "free some space" in text
    assert "\n" not in text
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_places_that_cannot_be_written(fitted, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "model", tmp_path / "no" / "model", tmp_path):
        with pytest.raises(InputError) as caught:
            fitted.save(path)
        assert str(caught.value).startswith(f"{path}: cannot be written (")
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


class Custom(Kernel):
    """A user's own."""

    def forward(self, x1, x2, diag=False, **_):
        value = torch.exp(-torch.cdist(x1, x2))
        return value.diagonal(dim1=-1, dim2=-2) if diag else value


def test_a_kernel_that_cannot_be_described_is_refused_at_save(data, content, tmp_path):
    path = tmp_path / "model"
    path.write_bytes(content)
    X = dense(data.X)
    estimator = fit(X, data.y, kernel=ScaleKernel(Custom()))
    estimator.predict(X)
    with pytest.raises(InputError, match=r"^kernel: a Custom .* cannot be saved; build it"):
        estimator.save(path)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
