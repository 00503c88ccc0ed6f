"""Reading telemetry, of which most is what the same instance has told before."""

from __future__ import annotations

from typing import Any, Final

from giornata.wire import codec
from giornata.wire.workers import ServiceState

KEPT: Final = 8192
"""Instances of which the last message is kept; beyond it, all are forgotten and told again."""
OF_STATE: Final = ("models",)
OF_WORKER: Final = ("cost_model", "blocks")
"""What an instance repeats, and its worker."""


class TelemetryReader:
    """Decodes states; what an instance repeats is not validated again, and stays the same object."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, tuple[Any, Any]]] = {}
        """By instance and path: a part as it came last, and as it was read."""

    def read(self, data: bytes) -> ServiceState:
        """The state in a message; raises as :func:`giornata.wire.codec.decode`."""
        fields = codec.fields_of(ServiceState, data)
        worker, name = fields.get("worker"), fields.get("instance")
        of_worker: dict[str, Any] = worker if isinstance(worker, dict) else {}
        told = self._told.get(name, {}) if isinstance(name, str) else {}
        came = {
            part: whole[part]
            for whole, parts in ((fields, OF_STATE), (of_worker, OF_WORKER))
            for part in parts
            if whole.get(part) is not None
        }
        for part, value in came.items():
            if part in told and told[part][0] == value:
                (fields if part in OF_STATE else of_worker)[part] = told[part][1]
        state = codec.validated(ServiceState, fields)
        if len(self._told) >= KEPT:
            self._told.clear()
        read = {part: getattr(state if part in OF_STATE else state.worker, part) for part in came}
        self._told[state.instance] = told | {part: (came[part], read[part]) for part in came}
        return state
