"""``giornata bench``: measure servers from outside."""
