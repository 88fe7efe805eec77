"""Attacks on structgp itself: damaged inputs, models and checkpoints, kills, full disks, extremes."""
