"""Tiny Flux transformers with random weights, and random rows for them, as the benches have them."""

from __future__ import annotations

from giornata_lab.bench.compute.tiny_flux import (
    JOINT_DIM,
    LATENT,
    MASK,
    MIXING,
    POOLED_DIM,
    SCHEDULER,
    Spec,
    family,
    inputs,
    row,
    transformer,
)

__all__ = [
    "JOINT_DIM",
    "LATENT",
    "MASK",
    "MIXING",
    "POOLED_DIM",
    "SCHEDULER",
    "Spec",
    "family",
    "inputs",
    "row",
    "transformer",
]
