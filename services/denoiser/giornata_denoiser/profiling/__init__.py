"""Measuring what steps and loads cost on this machine: ``python -m giornata_denoiser.profiling --help``.

:mod:`mixtures` says what is measured, :mod:`measuring` measures it, and :mod:`making` makes weights of it, and a
:class:`giornata.planning.costing.Profile` of those.
"""
