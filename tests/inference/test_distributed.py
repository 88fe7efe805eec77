"""Fits by several processes: shares, sums, and the same answer as one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from structgp import InputError, StructuredGPClassifier, load
from structgp.cli import main as cli
from structgp.data import shards
from structgp.data.examples import read_examples
from structgp.inference.distributed import ALONE, Processes, joined
from structgp.inference.loop import make_batches
from structgp.plan.options import Options
from structgp.plan.resolve import check_together, resolve

TRAINING = """\
import json, sys, time
import torch
torch.set_num_threads(1)
from structgp import StructuredGPClassifier
from benchmarks.generate import generate
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.distributed import joined

Checkpoint.__init__.__defaults__ = (0.0,)  # after every step
made = generate({n}, n_labels=4, mean_length=8, n_templates=4, n_values=20, seed=0)
with joined() as together:
    model = StructuredGPClassifier()
    steps = []

    def told(info):
        steps.append(info.elbo)
        if together.is_first:
            print("step", info.iteration, flush=True)
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)

    model.fit(made.X, made.y, callback=told, checkpoint=sys.argv[1], together=together)
    m = model.model_.posterior.node.m
    assert torch.allclose(m, together.sum(m)[0] / together.size, rtol=1e-12, atol=0)
    if len(sys.argv) > 3:  # the command line, in processes that have been joined
        from structgp.cli import main
        for words in json.loads(sys.argv[3]):
            main(words, standalone_mode=False)
    if together.is_first:
        print(json.dumps([model.training_log_["elbo"], model.training_log_["fresh_elbo"]]))
"""


def pieces(n):
    lengths = np.random.default_rng(n).integers(1, 12, n)
    rows = [np.ones((length, 2)) for length in lengths]
    return rows, [np.zeros(length, dtype=np.int64) for length in lengths]


@given(st.integers(4, 30), st.integers(1, 4), st.integers(5, 200))
def test_shares_hold_every_sequence_once_and_under_its_number(n, size, batch_tokens):
    rows, labels = pieces(n)

    def numbers(together):
        batches = make_batches(rows, labels, np.zeros(2), batch_tokens, together=together)
        found, before = {}, 0
        for batch in batches:
            here = torch.arange(before, before + len(batch))
            before += len(batch)
            number = here if batch.number is None else batch.number
            found |= dict(zip(batch.index.tolist(), number.tolist(), strict=True))
        return found

    whole = numbers(ALONE)
    assert sorted(whole.values()) == list(range(n))
    dealt = [numbers(Processes(rank, size)) for rank in range(size)]
    assert sum(map(len, dealt)) == n
    assert {i: k for share in dealt for i, k in share.items()} == whole
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_more_processes_than_sequences_are_refused():
    rows, labels = pieces(4)
    with pytest.raises(InputError, match="5 processes for 4 sequences"):
        make_batches(rows, labels, np.zeros(2), 100, together=Processes(0, 5))


def test_what_is_for_one_process_is_refused():
    made = generate(6, n_labels=2, mean_length=4, n_templates=2, n_values=4, seed=0)
    examples = read_examples(made.X, made.y)
    check_together(Processes(0, 2), resolve(Options(), examples))
    inducing = resolve(Options(posterior="inducing"), examples)
    check_together(ALONE, inducing)
    for plan in (resolve(Options(inference="adam"), examples), inducing):
        with pytest.raises(InputError, match="is for one process"):
            check_together(Processes(0, 2), plan)


def test_alone_sums_and_gathers_are_what_was_given(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as together:
        assert together == ALONE
        assert together.gather("x") == ["x"]
        assert together.any(True)
        assert not together.any(False)
        assert together.sum(torch.ones(2))[0].tolist() == [1, 1]


def test_a_world_without_an_address_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InputError, match="torchrun"), joined():
        pass


def start(n_processes, *words, restarts=0):
    """Under torchrun, or plainly for one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1"]
    command += [f"--nproc_per_node={n_processes}", f"--max-restarts={restarts}"]
    command = command if n_processes > 1 else [sys.executable]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    return subprocess.Popen(
        [*command, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(n_processes, *words):
    process = start(n_processes, *words)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


LATE = """\
import os, signal, time
import torch
from structgp.inference.distributed import joined

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if again and os.environ["RANK"] == "1":
    time.sleep(1.5)  # the other process looks for this one where the dead one was
with joined() as together:
    print(together.sum(torch.ones(1))[0].item(), flush=True)
    if not again:
        time.sleep(0.2)  # what was printed comes out
        if together.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        together.wait()
"""


@pytest.mark.slow
def test_processes_that_are_started_again_do_not_look_for_dead_ones(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    process = start(2, tmp_path / "late.py", restarts=1)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.count("2.0") == 4


@pytest.mark.slow
def test_two_processes_fit_and_tag_as_one_does(tmp_path):
    """In one start of them: most of the time is that of imports."""
    (tmp_path / "training.py").write_text(TRAINING.format(n=40))
    made = generate(30, n_labels=3, mean_length=6, n_templates=2, n_values=8, seed=1)
    text = "\n\n".join(
        "\n".join(" ".join([*token, label]) for token, label in zip(x, y, strict=True))
        for x, y in zip(made.X, made.y, strict=True)
    )
    (tmp_path / "train.txt").write_text(text + "\n")
    (tmp_path / "template").write_text("U0:%x[0,0]\nU1:%x[0,1]\nB\n")
    tag = ["tag", "-m", tmp_path / "model", "-v1", tmp_path / "train.txt", "-o"]
    for words in (
        ["train", tmp_path / "template", tmp_path / "train.txt", "-o", tmp_path / "model"],
        [*tag, tmp_path / "1.txt"],
    ):
        found = CliRunner().invoke(cli, [str(word) for word in words])
        assert found.exit_code == 0, found.output
    before = sorted(tmp_path.iterdir())
    on_shards = ["train", "--shards", tmp_path / "shards", tmp_path / "template", tmp_path / "train.txt"]
    commands = [[*tag, tmp_path / "2.txt"], [*on_shards, "-o", tmp_path / "sharded"]]
    told = json.dumps([[str(word) for word in words] for words in commands])
    out = run(2, tmp_path / "training.py", tmp_path / "checkpoint", 0, told)
    assert (tmp_path / "1.txt").read_text() == (tmp_path / "2.txt").read_text()
    left = [tmp_path / name for name in ("2.txt", "shards", "sharded")]
    assert sorted(tmp_path.iterdir()) == sorted([*before, *left])
    expected, sharded = (load(tmp_path / name).predict_marginals(made.X) for name in ("model", "sharded"))
    away = [
        abs(p[v] - q[v])
        for x, z in zip(expected, sharded, strict=True)
        for p, q in zip(x, z, strict=True)
        for v in p
    ]
    assert np.mean(away) < 0.05
    made = generate(40, n_labels=4, mean_length=8, n_templates=4, n_values=20, seed=0)
    log = StructuredGPClassifier().fit(made.X, made.y).training_log_
    two = json.loads(out.splitlines()[-1])
    # Sums are rounded in another order, and a search for the means ends within its tolerance.
    np.testing.assert_allclose(two, [log["elbo"], log["fresh_elbo"]], rtol=1e-5)


@pytest.mark.slow
def test_a_killed_worker_loses_no_more_than_what_came_after_the_last_checkpoint(tmp_path):
    """And the run goes on with as many processes as one likes."""
    script, kept = tmp_path / "training.py", tmp_path / "kept"
    script.write_text(TRAINING.format(n=200))
    process = start(2, script, kept, 2)
    while not kept.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    process.communicate(timeout=100)
    assert process.returncode != 0
    assert kept.exists()
    again = run(3, script, kept)
    assert not again.startswith("step 0")
    whole = eval(run(1, script, tmp_path / "other").splitlines()[-1])
    np.testing.assert_allclose(eval(again.splitlines()[-1]), whole, rtol=1e-4)


ON_SHARDS = """\
import json, sys, time
import torch
torch.set_num_threads(1)
from structgp import StructuredGPClassifier
from structgp.data import shards
from structgp.inference import Minibatch
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.distributed import joined

Checkpoint.__init__.__defaults__ = (0.0,)  # after every round
fast = Minibatch(batch_tokens=100, n_draws=16, steps=6, learning_rounds=1)
with joined() as together:

    def told(info):
        if together.is_first:
            print("step", info.iteration, flush=True)
        time.sleep(float(sys.argv[3]))

    model = StructuredGPClassifier(inference=fast)
    model.fit(shards.read(sys.argv[1]), callback=told, checkpoint=sys.argv[2], together=together)
    if together.is_first:
        model.save(sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", [1, 3])
def test_a_killed_worker_on_shards_costs_no_more_than_a_round(tmp_path, then):
    """And the run goes on with as many processes as one likes, to the NLL of an undisturbed one."""
    made = generate(300, n_labels=4, mean_length=8, n_templates=4, n_values=20, seed=0)
    pairs = list(zip(made.X, made.y, strict=True))
    shards.write(pairs[:200], tmp_path / "shards", shard_tokens=500)
    script, kept = tmp_path / "training.py", tmp_path / "kept"
    script.write_text(ON_SHARDS)
    process = start(2, script, tmp_path / "shards", kept, 0.3, tmp_path / "never")
    while not kept.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    time.sleep(2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    reached = int(out.split()[-1])
    again = run(then, script, tmp_path / "shards", kept, 0, tmp_path / "again")
    assert int(again.split()[1]) in (reached, reached + 1)
    run(1, script, tmp_path / "shards", tmp_path / "other", 0, tmp_path / "whole")
    X, y = (list(part) for part in zip(*pairs[200:], strict=True))
    nll = [load(tmp_path / name).evaluate(X, y).token_nll for name in ("again", "whole")]
    assert nll[0] == pytest.approx(nll[1], rel=0.005)
