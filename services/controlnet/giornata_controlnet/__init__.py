"""The ControlNet service: computes what ControlNets add to the blocks of denoisers' networks.

`__main__` → `service` → `rows` (what is open, and whose weights are loaded) and `compute_thread` (which gathers steps
that share a forward, and computes them).
"""
