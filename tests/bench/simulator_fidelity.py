"""Does the simulator tell what happens? Live runs at shares of saturation, and the same requests on a virtual clock.

Before and after every live run, what steps, stages and messages take is measured on runs of their own, since the
machine is not equally fast at all times (`calibration.py`). Requests with another seed arrive by chance, live and
simulated: masks, step counts and times are the same, and nothing that the live run measured is told to the simulator.
Writes ``out/bench/simulator_fidelity.json`` and a chart of both distributions at every rate.
"""

from __future__ import annotations
