"""Flux checkpoints: Flux text-to-image models as inpainting, and Flux Fill."""
