"""Masks from words: the models that find what words name, and the question that asks them."""
