"""Checkpoints: which family a folder holds, and how it is loaded."""
