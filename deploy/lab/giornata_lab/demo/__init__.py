"""``giornata demo``: edits through the whole system, compared with diffusers, and without and with its adapters."""
