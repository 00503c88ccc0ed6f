"""``python -m giornata_lab.rehearsals.chaos``: a stack, load, faults, and a look at what is left.

Of everything that matters there are two. It ends with 1 and a list of what broke where anything did.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

import giornata.client
from giornata.families import Family
from giornata.wire.messages import DoneEvent
from giornata.wire.workers import ServiceName
from giornata_lab.loadgen.outcomes import DistributionSummary, spread
from giornata_lab.rehearsals.chaos import faults, look
from giornata_lab.rehearsals.chaos.audit import AuditedSystem, violations
from giornata_lab.rehearsals.chaos.faults import ALL, TARGETS, Chaos, Kind
from giornata_lab.rehearsals.chaos.load import (
    BUDGET_S,
    VARIANTS,
    ChaosEdit,
    Door,
    Load,
    Outcome,
    RestClient,
    edits,
    pixels,
    variants,
)
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import StackModel, choose
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, socket_folder
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import Stack, running
from giornata_tools.terminal import show, table

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
class Report:
    """What one run has shown."""

    seed: int
    seconds: float
    """From the first edit to the last one's end."""
    seen: AuditedSystem
    violations: Sequence[str]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many edits and jobs there were, and what the run took."""
        outcomes = self.seen.outcomes
        ended = [record for record in self.seen.finally_.values() if record is not None]
        return {
            "edits": len(outcomes),
            **{f"by {door}": sum(o.edit.door is door for o in outcomes) for door in Door},
            "accepted": sum(outcome.accepted for outcome in outcomes),
            **Counter(
                f"{record.state}: {record.code}" if record.code else record.state.value for record in ended
            ),
            "pictures": sum(len(outcome.pictures) for outcome in outcomes),
            "submissions beyond the first": sum(outcome.tries - 1 for outcome in outcomes),
            "requests made again": sum(outcome.again.total() for outcome in outcomes),
            "attempts lost with their worker": sum(len(record.causes) for record in ended),
            "faults": len(self.seen.faults),
        }

    def spreads(self) -> dict[str, DistributionSummary | None]:
        """Seconds of an edit, and until the stack was whole, by kind of fault."""
        found: dict[str, list[float]] = {"an edit": [outcome.latency_s for outcome in self.seen.outcomes]}
        for one in self.seen.faults:
            if one.recovery_s is not None:
                found.setdefault(f"whole again after {one.fault.kind}", []).append(one.recovery_s)
        return {name: spread(seconds) for name, seconds in found.items()}

    def write(self, path: Path) -> None:
        """As JSON: everything that a look into a failure needs."""
        seen = self.seen
        content: dict[str, Any] = {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "counts": self.counts,
            "violations": list(self.violations),
            "spreads_s": {name: one and asdict(one) for name, one in self.spreads().items()},
            "faults": [fault.summary() for fault in seen.faults],
            "streams": asdict(seen.streams),
            "usage": [[asdict(one) for one in samples] for samples in seen.usage.values()],
            "edits": [outcome.summary() for outcome in seen.outcomes],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print the tables and what broke."""
        counts = table("count", "n", numbers=("n",), title=f"chaos, seed {self.seed}, {self.seconds:.0f} s")
        for name, value in self.counts.items():
            counts.add_row(name, str(value))
        times = table("seconds", "p50", "p95", "most", numbers=("p50", "p95", "most"))
        for name, one in self.spreads().items():
            if one is not None:
                times.add_row(name, *(f"{value:.1f}" for value in (one.p50, one.p95, one.most)))
        inflicted = table("target", *Kind, numbers=tuple(Kind))
        came = Counter((fault.fault.target, fault.fault.kind) for fault in self.seen.faults)
        for target in TARGETS:
            inflicted.add_row(target, *(str(came[target, kind]) for kind in Kind))
        for each in (counts, times, inflicted):
            show(each, "")
        print(*self.violations or ["Every accepted edit ended exactly once; nothing leaked."], sep="\n")


async def run(
    edits: int, faults: int, seed: int, model: Path, logs: Path, say: Callable[[str], None]
) -> Report:
    """Start, disturb, wait for quiet, stop, judge.

    Args:
        edits: how many are sent.
        faults: how many are inflicted.
        seed: draws both.
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

        planned = StackPlan(
            state=Path(folder),
            logs=logs,
            models=(StackModel(str(model), "tiny"),),
            ready_s=READY_S,
            replicas=REPLICAS,
            env=ENV,
        )
        async with running(planned, restarted) as stack:
            await stack.bring_up()
            stack.keep_up = True
            say(f"{edits} edits and {faults} faults, seed {seed}.")
            seen, seconds = await _disturbed(stack, edits, faults, seed)
        seen = replace(
            seen,
            restarts=restarts,
            logs=_read(logs),
            left=await look.left(folder, GONE_S),
            obituaries=stack.obituaries,
        )
    return Report(seed, seconds, seen, violations(seen))


def _read(logs: Path) -> dict[str, str]:
    return {path.stem: path.read_text(errors="replace") for path in logs.glob("*.log")}


async def _disturbed(stack: Stack, n_edits: int, n_faults: int, seed: int) -> tuple[AuditedSystem, float]:
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
        chaos = Chaos(stack, load.pace)
        quiet = await _quietly(load, seed)
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.carry_out(edits(seed, n_edits)))
            tasks.create_task(chaos.carry_out(faults.draw(seed, edits=n_edits, faults=n_faults), n_edits))
        seconds = time.monotonic() - began_s
        outcomes = [*quiet, *load.outcomes]
        streams = await look.quiet_streams(records.jetstream)
        accepted = [outcome.edit.job_id for outcome in outcomes if outcome.accepted]
        finally_ = {job_id: await records.of(job_id) for job_id in accepted}
        chaos.measure()
        kept = await look.blobs(stack.blobs_url)
    seen = AuditedSystem(
        outcomes=outcomes,
        finally_=finally_,
        done=done,
        faults=chaos.inflicted,
        streams=streams,
        blobs=kept,
        usage=chaos.usage,
        ttl_s=RESULT_TTL_S,
        budget_s=BUDGET_S,
        broken=chaos.broken,
    )
    return seen, seconds


async def _quietly(load: Load, seed: int) -> list[Outcome]:
    """Every variant once before anything happens: what its pictures are to look like, and everything warm."""
    outcomes = []
    for i in range(VARIANTS):
        outcome = await load.carry(ChaosEdit(-1 - i, f"quiet-{seed}-{i}", Door.REST, i))
        load.refer(outcome, [pixels(picture) for picture in outcome.pictures])
        outcomes.append(outcome)
    return outcomes


OUT: Final = Path("out") / "chaos.json"
LOGS: Final = OUT.parent / "chaos-logs"
say = partial(print, flush=True)


@click.command("chaos", context_settings={"show_default": True})
@click.option("--edits", type=int, default=500, help="How many are sent.")
@click.option(
    "--faults",
    type=int,
    default=ALL,
    help=f"How many are inflicted; from {ALL} on every kind comes to every service and server.",
)
@click.option("--seed", type=int, help="Draws the same edits and faults again; any by default.")
@click.pass_context
def main(ctx: click.Context, edits: int, faults: int, seed: int | None) -> None:
    """Faults under load; ends with 1 and a list of what broke where anything did."""

    chosen = secrets.randbelow(10_000) if seed is None else seed
    try:
        model = asyncio.run(choose({}, Family.FLUX_FILL, MODELS, say))
        report = asyncio.run(run(edits, faults, chosen, Path(model.source), LOGS, say))
    except LaunchError as error:
        print(error, file=sys.stderr)
        ctx.exit(1)
    report.write(OUT)
    report.show()
    say(f"Written to {OUT}; logs are in {LOGS}.")
    ctx.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
