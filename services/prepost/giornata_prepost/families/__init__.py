"""Autoencoder and text encoders of a checkpoint, over its own diffusers pipeline: one folder a model family.

:mod:`giornata_prepost.families.protocol` is what the service asks of a family; :mod:`giornata_prepost.checkpoint` opens
one.
"""
