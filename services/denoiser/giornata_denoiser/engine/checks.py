"""Whether what steps have made is finite: read one step late on a GPU, so that it never waits for the host.

The engine gives a GPU its next step and then reads what the one before has come to. A row that leaves the engine, is
shown, or teaches others is read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from giornata.scheduling.batch import RowKey
from giornata_denoiser.rows.row import Row


class FiniteCheck:
    """Whether each of some latents, (tokens, channels) each, is finite. A CPU knows at once."""

    late = False
    """Whether :meth:`read` may have to wait for the device."""

    def __init__(self, latents: Sequence[Tensor]) -> None:
        # A sum in float64 is finite if all terms of a smaller dtype are; it takes one kernel a latent.
        self._finite = torch.stack([latent.sum(dtype=torch.float64) for latent in latents]).isfinite()

    def read(self) -> list[bool]:
        """The answer for each latent; waits until all are known."""
        finite: list[bool] = self._finite.tolist()
        return finite


class LateFiniteCheck(FiniteCheck):
    """The verdict of a CUDA device: copied to pinned memory, and read once an event has passed."""

    late = True

    def __init__(self, latents: Sequence[Tensor]) -> None:
        super().__init__(latents)
        self._host = torch.empty(len(latents), dtype=torch.bool, pin_memory=True)
        self._host.copy_(self._finite, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's is not typed
        self._event.record()

    def read(self) -> list[bool]:
        """The answer for each latent; waits for this step, and not for the next one."""
        self._event.synchronize()
        finite: list[bool] = self._host.tolist()
        return finite


Judge = Callable[[Sequence[Tensor]], FiniteCheck]
"""Makes the verdict on a step's latents."""


def judge_for(device: torch.device) -> Judge:
    """How verdicts on `device` are made."""
    return LateFiniteCheck if device.type == "cuda" else FiniteCheck


class _UnreadFiniteCheck(NamedTuple):
    before: Row
    """The row as it was before the step."""
    verdict: FiniteCheck
    place: int
    """The row's index in the step."""


class PendingFiniteChecks:
    """The verdicts that are not read yet, by row."""

    def __init__(self) -> None:
        self._unread: dict[RowKey, _UnreadFiniteCheck] = {}

    def postpone(self, rows: Sequence[Row], verdict: FiniteCheck) -> None:
        """The step of `rows`, as they were before it, is judged by `verdict`, which is read later."""
        for place, row in enumerate(rows):
            self._unread[row.key] = _UnreadFiniteCheck(row, verdict, place)

    def poisoned(self, rows: Sequence[Row]) -> dict[RowKey, Row]:
        """Read the open verdicts of `rows`. Returns the rows that are not finite, as they were before the step."""
        found = [(row, self._unread.pop(row.key, None)) for row in rows]
        return {
            row.key: unread.before
            for row, unread in found
            if unread is not None
            and unread.before.conditioning is row.conditioning  # else another row of its name
            and not unread.verdict.read()[unread.place]
        }

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for key in self._unread.keys() - keys:
            del self._unread[key]
