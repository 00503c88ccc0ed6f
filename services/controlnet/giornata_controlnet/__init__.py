"""The ControlNet service, which computes the residuals that denoisers of its host add to their blocks.

Today it is discovered, watched and drained like every other service, and refuses the work itself.
"""
