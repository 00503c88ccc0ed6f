"""Flux.2 checkpoints, Klein apart."""
