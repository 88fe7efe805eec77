"""Segments (semi-Markov): a linear chain that also scores every span of its labelling as a whole."""
