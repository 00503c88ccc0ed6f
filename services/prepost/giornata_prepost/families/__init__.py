"""Autoencoder and text encoders of a checkpoint, over its own diffusers pipeline: one folder a model family."""
