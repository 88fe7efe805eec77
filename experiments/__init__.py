"""Experiments on the paper's data, run from a checkout."""
