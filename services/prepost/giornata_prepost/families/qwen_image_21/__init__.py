"""Qwen-Image 2.1 checkpoints."""
