"""``giornata demo``: four edits through the whole system, measured and compared with diffusers."""
