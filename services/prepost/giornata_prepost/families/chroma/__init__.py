"""Chroma checkpoints."""
