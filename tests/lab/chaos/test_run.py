"""The short form of ``make chaos``: one of each of the faults that matter most, under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos.__main__ import run
from giornata_lab.rehearsals.chaos.faults import Kind, Server

EDITS = 48
FAULTS = 9


@pytest.mark.long
@pytest.mark.timeout(900)  # on a quiet machine a minute and a half
async def test_every_accepted_edit_ends_once_and_nothing_leaks_whatever_dies(
    tiny_model: Path, tmp_path: Path
) -> None:
    report = await run(EDITS, FAULTS, 7, tiny_model, tmp_path / "logs", print)
    report.show()
    assert report.violations == []
    inflicted = {(one.fault.kind, one.fault.target) for one in report.seen.faults}
    assert len(report.seen.faults) == FAULTS
    assert {
        (Kind.KILL, Server.NATS),
        (Kind.KILL, Server.VALKEY),
        (Kind.FREEZE, ServiceName.DENOISER),
        (Kind.FREEZE, ServiceName.ROUTER),
    } <= inflicted
    assert sum(one.in_progress for one in report.seen.faults) >= FAULTS, "they came under load"
    assert report.counts["accepted"] == report.counts["edits"] >= EDITS
