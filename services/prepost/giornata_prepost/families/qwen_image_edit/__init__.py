"""Qwen-Image-Edit checkpoints."""
