"""Functions for worker processes to import."""

from __future__ import annotations

import os
import time
from pathlib import Path


def half(number: int) -> dict[str, object]:
    if number == 3:
        raise ValueError("three")
    return {"half": number / 2, "threads": os.environ["OMP_NUM_THREADS"]}


def sleep(file: str) -> dict[str, object]:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
    return {}
