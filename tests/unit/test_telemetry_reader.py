"""Telemetry that repeats itself is read as it stands, and what repeats is validated once."""

from __future__ import annotations

import msgpack
import pytest

from giornata.wire import codec
from giornata.wire.errors import SchemaMismatch
from giornata.wire.workers import (
    CostFit,
    ServiceName,
    ServiceState,
    TelemetryReader,
    WorkerCosts,
    WorkerState,
)
from giornata_lab.bench.systems.networks import plain
from tests.fakes.fleet import CARD

FIT = CostFit(weights=(1.0, 2.0), r2=1, residual_ms=0, samples=1, outliers=0)


def told(instance: str = "d1", *, steps: int = 0, blocks: int = 1, version: str = "0") -> bytes:
    worker = WorkerState(
        capacity_rows=8,
        capacity_tokens=1024,
        steps_total=steps,
        cost_model=WorkerCosts(compute=FIT, load=FIT),
        blocks=plain(blocks),
    )
    return codec.encode(
        ServiceState(
            service=ServiceName.DENOISER,
            instance=instance,
            host="h",
            version=version,
            ready=True,
            models=(CARD,),
            worker=worker,
        )
    )


def test_every_message_is_read_as_it_would_be_alone() -> None:
    reader = TelemetryReader()
    messages = [told(), told(steps=1), told("d2", blocks=2), told(blocks=3), told(version="1"), told("d2")]
    for message in messages:
        assert reader.read(message) == codec.decode(ServiceState, message)


def test_what_an_instance_repeats_stays_the_same_object() -> None:
    reader = TelemetryReader()
    first, second, changed = reader.read(told()), reader.read(told(steps=1)), reader.read(told(blocks=2))
    assert first.worker is not None
    assert second.worker is not None
    assert changed.worker is not None
    assert second.models[0] is first.models[0]
    assert second.worker.cost_model is first.worker.cost_model
    assert first.worker.blocks is not None
    assert second.worker.blocks is not None
    assert second.worker.blocks[0] is first.worker.blocks[0]
    assert changed.worker.cost_model is first.worker.cost_model
    assert changed.worker.blocks == plain(2)


def test_a_message_that_cannot_be_read_is_named_and_changes_nothing() -> None:
    reader = TelemetryReader()
    first = reader.read(told())
    fields = codec.unpack(told(blocks=2))
    del fields["host"]
    for message, named in ((msgpack.packb(fields), "host"), (b"\xc1", "msgpack")):
        with pytest.raises(SchemaMismatch, match=named):
            reader.read(message)
    assert reader.read(told()).models[0] is first.models[0]
