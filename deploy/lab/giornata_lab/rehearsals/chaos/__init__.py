"""Chaos: faults of every service and server under load, and whether every accepted edit ends exactly once.

Read in this order: `plan` (which faults, when), `edits` (small ones, and what is true of their pictures), `doors`
(clients that ask again), `load`, `relay` (a network that can be slow, deaf or mute), `faults`, `look` (what streams,
records, blobs and processes are like), `audit` (what must not be), `run`, `report`.
"""
