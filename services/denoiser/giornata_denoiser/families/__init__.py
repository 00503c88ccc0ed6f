"""Model families: what differs between them, over unmodified diffusers modules.

A family is a small object that satisfies :class:`giornata_denoiser.families.protocol.Family`.
"""
