"""Commands that run or measure the system on this machine: ``up``, ``demo``, ``quality`` and ``profile``."""
