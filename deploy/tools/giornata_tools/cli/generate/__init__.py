"""``giornata generate``: pictures from text."""
