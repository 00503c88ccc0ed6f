"""``giornata mask``."""
