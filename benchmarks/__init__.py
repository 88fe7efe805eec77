"""How fast, how large: structgp and named peers, side by side. See ``python -m benchmarks --help``."""

import structgp  # noqa: F401  before torch, whose threads it tells to sleep while they wait
