"""How fast, how large: structgp and named peers, side by side. See ``python -m benchmarks --help``."""
