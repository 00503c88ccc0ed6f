"""Checkpoints with random weights, of every family that is served: for tests and for exercising the system."""
