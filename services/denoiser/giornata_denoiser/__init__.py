"""The denoiser: step-level continuous batching and mask-aware inference over unmodified diffusers checkpoints.

Floors, each importing only those above it in this list:

* :mod:`giornata_denoiser.rows` - rows and templates, as values
* :mod:`giornata_denoiser.families` - what a checkpoint does with them
* :mod:`giornata_denoiser.blocks` - what enters a block beside its tokens
* :mod:`giornata_denoiser.engine` - one step for all running rows; the thread that owns it
* :mod:`giornata_denoiser.templates` - which template an edit takes from, when it is recorded, where it is kept
* :mod:`giornata_denoiser.attempts` - the router's attempts, from acceptance to report
* :mod:`giornata_denoiser.service` - subscriptions and telemetry
* :mod:`giornata_denoiser.profiling` - what steps and loads cost on this machine
"""
