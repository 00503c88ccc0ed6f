"""``giornata edit``: one edit, its progress and its pictures."""
