"""Processes that are killed while they write, and full disks: nothing that was there is lost, and a
fit that goes on ends where one that was never cut off does."""

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
"""Fits per kill that is asked for, at most: some end before they are killed."""


def in_child(work: Callable[[], object], seconds: float | None) -> int:
    """Runs ``work`` in a forked process and kills it after some seconds; None to wait for it. Returns its
    status: negative for a signal. The process must have no threads but its own."""
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
    """Kills aimed at the save of a model: the file is always one that was saved, whole."""
    tally, rng, path = Tally("kills while saving"), random.Random(seed), folder / "model"
    both = [models.fitted("weights", random.Random(n)) for n in range(2)]
    known = []
    for model in both:
        model.save(path)
        known.append(Container.read(path.read_bytes()))  # metadata has no order

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
    """Kills of a fit that writes checkpoints, at any time of it: one that goes on ends as one that was not
    killed. number : of kills that came before the fit's end; those that came later are counted apart."""
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
    """Files that may not grow: the old one stays, and one line says why."""
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
    """SIGINT and SIGTERM at any time: the right status, no traceback, no temporary files."""
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
        early = "structgp/" not in said and "/structgp" not in said  # Python itself was still starting
        calm = "Traceback" not in said or early
        right = calm and (child.returncode in expected or early) and not left
        tally.add(
            "ended" if right else "failed", "" if right else f"{child.returncode}: {said[-300:]} {left}"
        )
    return tally
