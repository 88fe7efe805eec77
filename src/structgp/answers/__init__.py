"""Turns a posterior into answers, each of them an average over joint draws of (f, g), exact per draw."""
