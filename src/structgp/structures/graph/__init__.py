"""Structures beyond the chain: variables, factors over any tuples of them, and the programs that sum over
their labellings."""
