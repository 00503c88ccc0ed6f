"""What a denoiser hears instead of a sample."""

from __future__ import annotations


class LinkLost(ConnectionError):
    """The data path to the instance is closed or broken: the rows have to be opened elsewhere."""


class LinkLate(TimeoutError):
    """What was waited for has not come in time; the link is up."""


class ControlFailed(Exception):
    """The instance refused a step, or failed in it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """Stable."""
        self.message = message
