"""Edits that begin where an earlier one with a similar prompt was (approximate caching: Nirvana, NSDI '24). Pure."""
