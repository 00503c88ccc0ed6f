"""Rows: what is being denoised, as values."""
