"""What a large fleet costs the router and the gateways: processor time of a telemetry message and of a job's walk.

Router and gateway are the real processes, and so is NATS; workers and prepost are simulated in a process of their own.
The processor time is what the router's process has used, divided by the messages that it has heard, or by the jobs that
it has carried. ``python -m tests.lab.bench.router_scale --help``.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import uvloop

from giornata.bus import bus as buses
from giornata.deadlines import Deadline
from giornata.wire import subjects
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.jobs import Job, Priority
from giornata.wire.messages import DoneEvent, EventKind, JobAck, SubmitRequest
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import resolve
from giornata.wire.subjects import EVENTS
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed
from giornata_tools.launcher.plan import socket_folder
from tests.fakes.fleet import CARD, REF
from tests.lab.bench.fleet import GATEWAY, ROUTER, System

FLEETS: Final = (100, 1000)
SETTLE_S: Final = 3.0
TAKING: Final = 8
AIM_MS: Final = {"telemetry": 0.125, "walk": 4.0}


async def telemetry_row(system: System, workers: int, options: SimpleNamespace) -> dict[str, Any]:
    """What telemetry of so many busy workers costs router and gateway."""
    with system.crowd(idle=workers, hz=options.hz, templates=options.templates):
        await system.knows(workers)
        await asyncio.sleep(SETTLE_S)
        used = await system.over(options.seconds)
        router, gateway = used[ROUTER], used[GATEWAY]
    return {
        "what": f"telemetry of {workers} workers",
        "messages/s": round(router.told / router.at_s, 1),
        "router heard/s": round(router.heard / router.at_s, 1),
        "router ms each": round(router.cpu_s / router.heard * 1e3, 4),
        "aim ms": AIM_MS["telemetry"],
        "router core": round(router.cpu_s / router.at_s, 3),
        "gateway heard/s": round(gateway.heard / gateway.at_s, 1),
        "gateway core": round(gateway.cpu_s / gateway.at_s, 3),
    }


async def walk_row(system: System, options: SimpleNamespace) -> dict[str, Any]:
    """What a job costs the router, beyond the telemetry of the few workers that take it."""
    with system.crowd(taking=TAKING):
        await system.knows(TAKING)
        await asyncio.sleep(SETTLE_S)
        quiet = (await system.over(options.seconds / 2))[ROUTER]
        async with buses.connect(system.nats_url, "submitter") as bus:
            kept = (await bus.jetstream.stream_info(EVENTS)).state.last_seq
            before = await system.read(ROUTER)
            await _carried(bus, options)
            used = await system.read(ROUTER) - before
            kept = (await bus.jetstream.stream_info(EVENTS)).state.last_seq - kept
    share = used.at_s / quiet.at_s
    return {
        "what": f"{options.jobs} jobs of {options.steps} steps",
        "router hears a job": round((used.heard - share * quiet.heard) / options.jobs, 1),
        "router ms a job": round((used.cpu_s - share * quiet.cpu_s) / options.jobs * 1e3, 3),
        "aim ms": AIM_MS["walk"],
        "jobs/s": round(options.jobs / used.at_s, 1),
        "events kept a job": round(kept / options.jobs, 1),
    }


async def _carried(bus: buses.Bus, options: SimpleNamespace) -> None:
    """Have jobs carried out, so many at a time."""
    slots, left, done = asyncio.Semaphore(options.in_flight), options.jobs, asyncio.Event()

    def ended(_: DoneEvent) -> None:
        nonlocal left
        left -= 1
        slots.release()
        if not left:
            done.set()

    async with bus.listen(subjects.events_of_gateway(GATEWAY, EventKind.DONE), DoneEvent, ended):
        for number in range(options.jobs):
            await slots.acquire()
            while True:
                try:
                    request = SubmitRequest(job=_job(number, options.steps), remaining_ms=60_000)
                    await bus.call(subjects.SUBMIT, request, JobAck, Deadline.after_ms(5000))
                    break
                except ServiceUnavailable:
                    await asyncio.sleep(0.1)
        await done.wait()


def _job(number: int, steps: int) -> Job:
    return Job(
        job_id=f"job_scale-{number}",
        tenant="default",
        gateway=GATEWAY,
        priority=Priority.INTERACTIVE,
        model=CARD.name,
        model_digest=CARD.digest,
        parameters=resolve(EditParameters(prompt="a red star", num_inference_steps=steps), CARD, seed=number),
        image=REF,
        budget_ms=60_000,
        result_ttl_s=60,
    )


async def measure(options: SimpleNamespace) -> None:
    """Print both tables and write ``out/bench/router_scale*.json``."""
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()))
        system = System(stack, Path(name))
        fleets = [await telemetry_row(system, workers, options) for workers in options.fleets]
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()))
        walk = await walk_row(System(stack, Path(name)), options)
    workload = vars(options) | {"taking": TAKING}
    write("router_scale", fleets, workload=workload)
    write("router_scale_walk", [walk], workload=workload)


def main() -> None:
    """Measure what the flags say."""
    flags = [
        option("--fleets", type=Several(int), default=FLEETS, help="numbers of workers"),
        option("--hz", type=float, default=1.0, help="messages a second of each; services tell 4"),
        option("--templates", type=int, default=256, help="recordings that each worker has"),
        option("--seconds", type=float, default=10.0, help="of each measurement"),
        option("--jobs", type=int, default=300),
        option("--in-flight", type=int, default=16, help="jobs at a time"),
        option("--steps", type=int, default=28, help="of each job"),
    ]
    uvloop.run(measure(parsed(__doc__, flags)))


if __name__ == "__main__":
    main()
