"""Flux.2 checkpoints: dev and Klein."""
