"""Hostile bytes for all that reads a stranger's: ``make fuzz`` looks for new ones, ``make test`` sends the known."""
