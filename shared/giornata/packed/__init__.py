"""Packed sequences: many pictures in one forward, without padding. Needs torch."""
