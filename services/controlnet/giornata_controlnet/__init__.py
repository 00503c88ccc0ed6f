"""The ControlNet service: computes the residuals that denoisers of its host add to their blocks.

Today it is discovered, watched and drained like every other service, and refuses the work itself; the refusal
travels to the caller as :class:`giornata.wire.errors.NotSupported`.
"""
