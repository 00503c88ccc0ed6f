"""The simulator of ``giornata simulate``: the live system's own scheduling code on a virtual clock. Pure.

Read in this order: `machines` (what a worker is), `jobs` (what clients ask for), `residency` (what hosts and devices
keep), `worker`, `simulator` (one run around :mod:`giornata.scheduling`), `results`, `bound`, `scenario`.
"""
