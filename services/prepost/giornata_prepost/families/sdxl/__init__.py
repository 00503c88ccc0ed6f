"""Stable Diffusion XL checkpoints."""
