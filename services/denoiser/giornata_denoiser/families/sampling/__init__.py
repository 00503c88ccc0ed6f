"""Samplers as tables: what diffusers' schedulers compute, as one small matrix a step. Pure."""
