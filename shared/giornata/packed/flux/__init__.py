"""Flux transformers of diffusers over packed sequences: their forward, modulation and joined projections."""
