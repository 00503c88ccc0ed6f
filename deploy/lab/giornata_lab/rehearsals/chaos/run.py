"""A whole run: a stack of two of everything that matters, load, faults, and a look at what is left."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import giornata.client
from giornata.wire.messages import DoneEvent
from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos import look, plan
from giornata_lab.rehearsals.chaos.audit import AuditedSystem
from giornata_lab.rehearsals.chaos.doors import RestClient
from giornata_lab.rehearsals.chaos.edits import VARIANTS, ChaosEdit, Door, Outcome, edits, pixels, variants
from giornata_lab.rehearsals.chaos.faults import Chaos, Clocks, Faults
from giornata_lab.rehearsals.chaos.load import BUDGET_S, Load
from giornata_lab.rehearsals.chaos.relay import RelayNetwork, relayed
from giornata_lab.rehearsals.chaos.report import Report
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, socket_folder
from giornata_tools.launcher.stack import Stack, running

READY_S: Final = 240.0
RESULT_TTL_S: Final = 300
GONE_S: Final = 10.0
"""How long processes of an ended stack may take to be gone."""
REPLICAS: Final = {
    **ONE_EACH,
    **dict.fromkeys((ServiceName.GATEWAY, ServiceName.ROUTER, ServiceName.DENOISER, ServiceName.PREPOST), 2),
}
ENV: Final = {
    "GIORNATA_JOB_BUDGET_S": f"{BUDGET_S:g}",
    "GIORNATA_RESULT_TTL_S": str(RESULT_TTL_S),
    "GIORNATA_RECORD_LINGER_S": "86400",
    "GIORNATA_MAX_FAILURES": "10",
}
"""Short budgets, so that what a fault makes wait does not wait for long; and many attempts, since workers fall often.
Records outlive the run, which looks at all of them."""


@dataclass(frozen=True)
class RehearsalSize:
    """Size of a run."""

    edits: int
    faults: int
    seed: int
    nats_servers: int = 1


async def run(size: RehearsalSize, model: Path, logs: Path, say: Callable[[str], None]) -> Report:
    """Start, disturb, wait for quiet, stop, judge.

    Args:
        size: of the run.
        model: folder of the checkpoint, best a tiny one.
        logs: folder of one log file per process.
        say: told what happens.

    Raises:
        LaunchError: the stack did not start.
    """
    with tempfile.TemporaryDirectory(prefix="gio-chaos-", dir=socket_folder()) as folder:
        restarts: list[str] = []

        def restarted(sentence: str) -> None:
            restarts.append(sentence.split(maxsplit=1)[0])
            say(sentence)

        network, clocks, addresses = RelayNetwork(), Clocks(Path(folder) / "clocks"), list[str]()
        async with relayed(lambda: addresses, size.nats_servers, network) as relays:
            planned = _plan(Path(folder), logs, model, size.nats_servers, relays, clocks)
            async with running(planned, restarted) as stack:
                addresses += stack.nats_url.split(",")
                await stack.bring_up()
                stack.keep_up = True
                say(f"{size.edits} edits and {size.faults} faults, seed {size.seed}.")
                seen, seconds = await _disturbed(stack, size, network, clocks)
        seen = replace(
            seen,
            restarts=restarts,
            logs=_read(logs),
            left=await look.left(folder, GONE_S),
            obituaries=stack.obituaries,
        )
    return Report.of(size.seed, seconds, seen)


async def _disturbed(
    stack: Stack, size: RehearsalSize, network: RelayNetwork, clocks: Clocks
) -> tuple[AuditedSystem, float]:
    """Return what is left behind by the edits while the stack still stands, quiet again; and the seconds they took."""
    done: defaultdict[str, list[DoneEvent]] = defaultdict(list)

    def hear(event: DoneEvent) -> None:
        done[event.job_id].append(event)

    async with (
        look.watching(stack.nats_url, stack.nats_password_file, hear) as records,
        RestClient.opened(lambda: stack.urls) as rest,
        giornata.client.connect(stack.nats_url) as nats,
    ):
        load = Load(variants(), rest, nats, records)
        chaos = Chaos(stack, Faults(stack, records.jetstream, network, clocks), load.pace)
        quiet = await _quietly(load, size.seed)
        began_s = time.monotonic()
        rounds = plan.draw(size.seed, edits=size.edits, faults=size.faults)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.carry_out(edits(size.seed, size.edits)))
            tasks.create_task(chaos.carry_out(rounds, size.edits))
        seconds = time.monotonic() - began_s
        seen = await _looked(stack, chaos, records, [*quiet, *load.outcomes])
    return replace(seen, done=done), seconds


def _plan(state: Path, logs: Path, model: Path, nats_servers: int, relays: str, clocks: Clocks) -> StackPlan:
    return StackPlan(
        state=state,
        logs=logs,
        models=(StackModel(str(model), "tiny"),),
        ready_s=READY_S,
        replicas=REPLICAS,
        nats_servers=nats_servers,
        env={**ENV, "GIORNATA_NATS_URL": relays},
        env_of={service: clocks.env(service) for service in ServiceName},
    )


def _read(logs: Path) -> dict[str, str]:
    return {path.stem: path.read_text(errors="replace") for path in logs.glob("*.log")}


async def _quietly(load: Load, seed: int) -> list[Outcome]:
    """Every variant once before anything happens: what its pictures are to look like, and everything warm."""
    outcomes = []
    for i in range(VARIANTS):
        outcome = await load.carry(
            ChaosEdit(number=-1 - i, key=f"quiet-{seed}-{i}", door=Door.REST, variant=i)
        )
        load.refer(outcome, [pixels(picture) for picture in outcome.pictures])
        outcomes.append(outcome)
    return outcomes


async def _looked(
    stack: Stack, chaos: Chaos, records: look.Records, outcomes: list[Outcome]
) -> AuditedSystem:
    """All that can be seen of a stack that still stands, once it is quiet."""
    streams = await look.quiet_streams(records.jetstream)
    finally_ = {
        outcome.edit.job_id: await records.of(outcome.edit.job_id) for outcome in outcomes if outcome.accepted
    }
    chaos.measure()
    return AuditedSystem(
        outcomes=outcomes,
        finally_=finally_,
        done={},
        faults=chaos.inflicted,
        streams=streams,
        blobs=await look.blobs(stack.blobs_url),
        usage=chaos.usage,
        ttl_s=RESULT_TTL_S,
        budget_s=BUDGET_S,
        broken=chaos.broken,
    )
