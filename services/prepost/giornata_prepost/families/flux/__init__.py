"""Flux and Flux Fill checkpoints."""
