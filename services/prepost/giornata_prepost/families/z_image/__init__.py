"""Z-Image checkpoints."""
