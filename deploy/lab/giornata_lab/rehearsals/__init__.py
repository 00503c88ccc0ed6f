"""Rehearsals of what is rare: faults under load, and a campaign on a GPU."""
