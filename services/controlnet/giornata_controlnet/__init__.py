"""The ControlNet service: computes the residuals that denoisers of its host add to their blocks."""
