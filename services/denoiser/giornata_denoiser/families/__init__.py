"""Model families: what differs between them, over unmodified diffusers modules.

A family is a file or folder here, whose text, schedule and network satisfy
:mod:`giornata_denoiser.families.network`, and one
line of the table in :mod:`giornata_denoiser.checkpoint`.
"""
