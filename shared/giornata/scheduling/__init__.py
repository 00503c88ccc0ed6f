"""Scheduling: which rows run where, and in which order. Pure.

`scheduler.py` is what a scheduler is asked and answers. The router and the simulator apply the same decisions; the
denoiser has its batch from here. `now` is an argument everywhere, in seconds of any monotonic clock.
"""
