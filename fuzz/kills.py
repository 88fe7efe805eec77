"""Processes that are killed while they write, and full disks: no earlier file may be lost, and a continued
fit must end like one that was never killed."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import structgp
from fuzz import checkpoints, models
from fuzz.container import Container
from fuzz.trial import Tally
from structgp.inference.checkpoint import Checkpoint

LATE = 4
"""Largest number of fits for each requested kill: some fits end before they are killed."""


def in_child(work: Callable[[], object], seconds: float | None) -> int:
    """Runs ``work`` in a forked process and kills it after some seconds; None to wait for it. Returns its
    status, which is negative for a signal. The calling process must have only one thread."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            status = 0
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saves(number: int, seed: int, folder: Path) -> Tally:
    """Kills processes while they save models: the file must always be one of the saved models, complete."""
    tally, rng, path = Tally("kills while saving"), random.Random(seed), folder / "model"
    both = [models.fitted("weights", random.Random(n)) for n in range(2)]
    known = []
    for model in both:
        model.save(path)
        known.append(Container.read(path.read_bytes()))  # not bytes, since the order of metadata may vary

    def forever() -> None:
        while True:
            for model in both:
                model.save(path)

    for _ in range(number):
        in_child(forever, rng.uniform(0.0, 0.05))
        whole = Container.read(path.read_bytes()) in known
        tally.add("whole" if whole else "failed", "" if whole else "a model that is neither of the two")
    for left in folder.glob(".structgp-*.tmp"):
        left.unlink()
    return tally


def fits(number: int, seed: int, folder: Path) -> Tally:
    """Kills fits that write checkpoints, at random times: a continued fit must end like one that was not
    killed. number : number of kills before the fit's end; kills that came too late are counted
    separately."""
    tally, rng = Tally("kills while fitting"), random.Random(seed)
    Checkpoint.__init__.__defaults__ = (0.0,)  # written after every step
    X, y = checkpoints.data()

    def fit(name: str, path: Path | None) -> structgp.StructuredGPClassifier:
        return checkpoints.model(name).fit(X, y, checkpoint=path, callback=lambda i: i.iteration >= 8)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, seconds = {}, {}
        for name in ("second order", "natural"):
            expected[name] = fit(name, None).predict_marginals(X)
            began = time.monotonic()
            in_child(lambda name=name: fit(name, folder / name), None)  # type: ignore[misc]
            seconds[name] = time.monotonic() - began
        for k in range(LATE * number):
            name, path = list(expected)[k % 2], folder / f"checkpoint-{k}"
            status = in_child(
                lambda name=name, path=path: fit(name, path),  # type: ignore[misc]
                rng.uniform(0.0, seconds[name]),
            )
            same = fit(name, path).predict_marginals(X) == expected[name]
            outcome = "the same" if status == -signal.SIGKILL else "too late"
            tally.add(outcome if same else "failed", "" if same else f"{name}: other answers after a kill")
            if tally.outcomes["the same"] + len(tally.failures) == number:
                break
    return tally


def full_disks(number: int, seed: int, folder: Path) -> Tally:
    """Limits the size of files while a model is saved: the old file must stay, with an InputError."""
    tally, rng, path = Tally("full disks"), random.Random(seed), folder / "old"
    model = models.fitted("weights", random.Random(1))
    model.save(path)
    before = path.read_bytes()

    def save(most: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            model.save(path)
        except structgp.InputError:
            os._exit(2)

    for _ in range(number):
        most = rng.randrange(len(before))
        status = in_child(lambda most=most: save(most), None)  # type: ignore[misc]
        left = list(folder.glob(".structgp-*.tmp"))
        right = status == 2 and path.read_bytes() == before and not left
        tally.add("kept" if right else "failed", "" if right else f"{most} bytes: status {status}, {left}")
    return tally


def signals(number: int, seed: int, folder: Path) -> Tally:
    """Sends SIGINT and SIGTERM at random times: the status must be right, without tracebacks or temporary
    files."""
    tally, rng = Tally("signals"), random.Random(seed)
    (folder / "t").write_text("U:%x[0,0]\nB\n")
    (folder / "train").write_text("\n".join(f"w{i % 9} l{i % 3}" + "\n" * (i % 7 == 0) for i in range(200)))
    command = [sys.executable, "-W", "ignore", "-m", "structgp", "train", "t", "train", "-o", "model"]
    for k in range(number):
        signalled = (signal.SIGINT, signal.SIGTERM)[k % 2]
        child = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 6.0))
        child.send_signal(signalled)
        said = child.communicate(timeout=120)[1].decode()
        expected = {0, 128 + signalled, -signalled}
        left = [f.name for f in folder.iterdir() if f.name.endswith((".tmp", ".lock"))]
        early = "structgp/" not in said and "/structgp" not in said  # Python was still starting
        calm = "Traceback" not in said or early
        right = calm and (child.returncode in expected or early) and not left
        tally.add(
            "ended" if right else "failed", "" if right else f"{child.returncode}: {said[-300:]} {left}"
        )
    return tally
