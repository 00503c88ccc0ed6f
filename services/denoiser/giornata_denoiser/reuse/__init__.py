"""Reuse of what a template run computed: compute sets, entries, what a sequence takes from them in one step."""
