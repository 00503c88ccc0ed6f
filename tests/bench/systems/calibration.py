"""What the live system's steps, stages and messages take on this machine, measured for the simulator.

One denoiser at a time, while the others are frozen: then no two of them share cores, whose sharing is for the simulator
to foretell. Step samples, while edits come one by one and all at once, are fitted as `giornata profile` fits its own.
"""

from __future__ import annotations
