"""The error of ControlNets that do not fit."""

from __future__ import annotations


class ControlMismatch(ValueError):
    """A ControlNet cannot act on a row: says why."""
