"""Benchmarks: speed beside its baselines, and what serving adds."""
