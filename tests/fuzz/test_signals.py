"""Signals, outputs that would destroy inputs, and two writers of one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fuzz import kills
from structgp import InputError
from structgp.cli import fitting, main
from structgp.cli.group import Group
from structgp.cli.one_writer import one_writer
from structgp.data.atomic import atomic_write


@pytest.fixture(autouse=True)
def not_in_the_background():
    """A shell makes the commands that it starts in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run_and_signal(number: int, path: Path) -> Result:
    """A command that is signalled while it writes a file."""

    @click.group(cls=Group)
    def group() -> None:
        pass

    @group.command()
    def write() -> None:
        with atomic_write(path, "wb") as file:
            file.write(b"half")
            os.kill(os.getpid(), number)
            time.sleep(5)

    return CliRunner().invoke(group, ["write"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_with_its_status_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    result = run_and_signal(number, path)
    assert result.exit_code == 128 + number
    assert "Traceback" not in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "set back"


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    """Between the first checks and the work."""
    (tmp_path / "t").write_text("U:%x[0,0]\n")
    (tmp_path / "train").write_text("a A\nb B\n")
    begin = "import sys, signal, os, threading\n"
    begin += "threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    begin += "sys.argv = ['structgp', 'train', 't', 'train', '-o', 'm']\n"
    begin += "from structgp.cli import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", begin], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in done.stderr


def test_an_interrupted_training_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("a A\nb B\n")
    monkeypatch.setattr(fitting, "_train", lambda **_: "interrupted")
    arguments = ["train", str(tmp_path / "f"), str(tmp_path / "f"), "-o", str(tmp_path / "m")]
    assert CliRunner().invoke(main, arguments).exit_code == 130
    monkeypatch.setattr(fitting, "_train", lambda **_: "converged")
    assert CliRunner().invoke(main, arguments).exit_code == 0


def test_an_output_that_is_an_input(tmp_path: Path) -> None:
    path, link = tmp_path / "f", tmp_path / "link"
    path.write_text("a A\nb B\n")
    link.symlink_to(path)
    for output in (path, link):
        result = CliRunner().invoke(main, ["train", str(path), str(path), "-o", str(output)])
        assert result.exit_code == 2
        assert "would be overwritten, and is to be read" in result.output
    result = CliRunner().invoke(main, ["train", str(path), str(path), "-o", ""])
    assert result.exit_code == 2
    assert "--output: no name" in result.output
    assert path.read_text() == "a A\nb B\n"


def test_outputs_that_are_inputs_of_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data", "m", "t", "d.jsonl"):
        Path(name).write_text(name)
    for command in (
        "next data -o data",
        "next -m m data -o m",
        "report m data -o data",
        "report m data -o m",
        "calibrate m data -o data",
        "convert d.jsonl d.jsonl",
        "label data --template t --export data",
        "label data --template t --model data",
        "tag -m m data -o m",
        "train t data -o m --vectors m",
    ):
        result = CliRunner().invoke(main, command.split())
        assert result.exit_code == 2, command
        assert "would be overwritten, and is to be read" in result.output, command
    for command in ("tag -m m data -o", "next data -o", "report m data -o", "calibrate m data -o"):
        result = CliRunner().invoke(main, [*command.split(), ""])
        assert "--output: no name" in result.output, command
    assert all(Path(name).read_text() == name for name in ("data", "m", "t", "d.jsonl"))


def test_two_trainings_with_one_output(tmp_path: Path) -> None:
    output = str(tmp_path / "m")
    other = one_writer(output)
    with one_writer(output), pytest.raises(InputError, match="another training is writing it"):
        other.__enter__()
    with one_writer(output):
        pass
    assert not list(tmp_path.iterdir()), "the lock is gone"


@pytest.mark.slow
@pytest.mark.parametrize("campaign", [kills.saves, kills.full_disks])
def test_kills_and_full_disks(campaign: object, tmp_path: Path) -> None:
    tally = campaign(8, 3, tmp_path)  # type: ignore[operator]
    assert not tally.failures
