"""The denoiser: step-level continuous batching and mask-aware inference over unmodified diffusers checkpoints.

Floors, each importing only those above it in this list:

* :mod:`giornata_denoiser.rows` - rows and recordings, as values
* :mod:`giornata_denoiser.families` - text, schedule and network of a model family
* :mod:`giornata_denoiser.parallel` - processes that compute one batch, each with a device
* :mod:`giornata_denoiser.checkpoint` - which family a folder holds
* :mod:`giornata_denoiser.engine` - one step for all running rows, and what is loaded ahead for it; their threads
* :mod:`giornata_denoiser.templates` - which recording an edit takes from, when and where recordings are kept
* :mod:`giornata_denoiser.attempts` - the router's attempts, from acceptance to report
* :mod:`giornata_denoiser.service` - subscriptions and telemetry
* :mod:`giornata_denoiser.profiling` - what steps and loads cost on this machine
"""
