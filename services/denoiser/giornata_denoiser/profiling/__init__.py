"""Measuring what steps and loads cost on this machine: ``python -m giornata_denoiser.profiling --help``.

`mixtures` says what is measured, `measuring` measures it, and `fitting` makes weights of it, and a
:class:`giornata.planning.cost_model.Profile` of those.
"""
