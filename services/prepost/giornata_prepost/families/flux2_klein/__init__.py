"""Flux.2 Klein checkpoints."""
