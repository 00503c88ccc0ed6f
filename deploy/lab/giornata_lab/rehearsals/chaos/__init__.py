"""Chaos: faults of every service and server under load, and whether every accepted edit ends exactly once.

Read in this order: `faults` (which come, when, and what they do), `load` (small edits, and clients that ask again),
`look` (what streams, records, blobs and processes are like), `audit` (what must not be), `__main__`.
"""
