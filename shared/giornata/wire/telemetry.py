"""Reading telemetry, of which most is what the same instance has told before."""

from __future__ import annotations

from typing import Any, Final

from giornata.wire import codec
from giornata.wire.workers import ServiceState

KEPT: Final = 8192
"""Instances of which the last message is kept; beyond it, all are forgotten and told again."""


class TelemetryReader:
    """Decodes states; models and costs that an instance repeats are not validated again, and stay the same objects."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Any, Any, ServiceState]] = {}
        """Models and costs as they came, and the state, of each instance."""

    def read(self, data: bytes) -> ServiceState:
        """The state in a message; raises as :func:`giornata.wire.codec.decode`."""
        fields = codec.fields_of(ServiceState, data)
        worker = fields.get("worker")
        of_worker: dict[str, Any] = worker if isinstance(worker, dict) else {}
        models, costs = fields.get("models"), of_worker.get("costs")
        name = fields.get("instance")
        before = self._told.get(name) if isinstance(name, str) else None
        if before is not None:
            told_models, told_costs, told = before
            if models is not None and models == told_models:
                fields["models"] = told.models
            if costs is not None and costs == told_costs and told.worker is not None:
                of_worker["costs"] = told.worker.costs
        state = codec.validated(ServiceState, fields)
        if len(self._told) >= KEPT:
            self._told.clear()
        self._told[state.instance] = models, costs, state
        return state
