"""The ControlNet service: computes what ControlNets add to the blocks of denoisers' networks.

`__main__` → `service` → `rows` (what is open), `nets` (whose weights are loaded) and `computing` (the thread that
computes steps). `opening` makes an open row of a request, `steps` checks a step and gathers those that share a forward.
"""
