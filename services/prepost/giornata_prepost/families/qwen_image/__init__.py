"""Qwen-Image checkpoints."""
