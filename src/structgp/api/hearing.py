"""Where the reports of a fit go: the logger 'structgp', and standard error if nothing listens to it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("structgp")


@contextmanager
def heard() -> Iterator[None]:
    """Makes the logger write to standard error, unless something listens to it already."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        yield
        return
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
