"""Transformers of diffusers, driven: their own blocks run unmodified over packed sequences.

Decision record 0011 tells why. A family is one file: its hooks, and what happens before and behind the blocks.
"""
