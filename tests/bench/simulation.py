"""Simulated clusters: every policy on the same jobs, and how far each is from what no schedule could beat.

FlashPS's setting (EuroSys '26, section 6.5): 8 workers with the published step times of an H800 and Flux,
production's masks and step counts, every template in memory. Jobs arrive by chance, 0.25 to 0.5 a second a worker,
or in bursts, as in a real trace. The baselines bind a job to a worker at its arrival, as in the paper; ours keeps it
in the router's line until a worker has a place. Then templates with Zipf popularity of which few fit into memory,
with and without affinity, jobs of several pictures with those kept together and spread, and the rule by which a
policy is asked about few of many workers.
"""

from __future__ import annotations
