"""Pools of processes on the CPU."""
