"""The profiler on a real NATS server, with a real LoRA store; pictures are painted by script."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from structlog.testing import capture_logs

from giornata.bus.bus import Endpoint
from giornata.deadlines import Deadline
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, InternalError, LoraNotFound, QueueFull, RowPoisoned
from giornata.wire.jobs import Priority
from giornata.wire.loras import LoraRecord, RemoveLora
from giornata.wire.messages import EditReply, Picture, ProbeMessage
from giornata.wire.requests import OutputFormat
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import FleetSummary
from giornata_tools.cli.app import cli
from giornata_tools.lora_profiler.probes import scenes
from giornata_tools.lora_profiler.profiler import (
    LoraProfile,
    ProbeSetting,
    ProfilerLogin,
    connected,
    profiling,
)
from tests.fakes.fleet import CARD
from tests.integration.lora_bench import Store, canonical, lora, open_bench
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_MS, HUNG_S

STEPS = 20


@dataclass
class Painter:
    """Stands for gateway, router and workers: LoRAs of `limits` change nothing up to a share of the steps."""

    bench: Store
    limits: dict[str, float] = field(default_factory=dict)
    failures: dict[str, list[GiornataError]] = field(default_factory=dict)
    """What is raised for a LoRA instead of an answer, one after the other."""
    asked: list[ProbeMessage] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def paint(self, message: ProbeMessage) -> EditReply:
        self.asked.append(message)
        (asked,), share = message.parameters.loras, message.parameters.lora_join
        self.entered.set()
        await self.may_answer.wait()
        if self.failures.get(asked.id):
            raise self.failures[asked.id].pop(0)
        assert isinstance(message.image, bytes)
        with Image.open(io.BytesIO(message.image)) as opened:
            pixels = np.asarray(opened.convert("RGB")).copy()
        if share is not None and share > self.limits[asked.id]:
            pixels = 255 - pixels
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        step = 0 if share is None else int(share * STEPS + 1e-9)
        return EditReply(
            job_id="job_1",
            width=pixels.shape[1],
            height=pixels.shape[0],
            output_format=OutputFormat.PNG,
            pictures=(Picture(index=0, seed=0, data=file.getvalue(), loras_from=step),),
        )

    async def upload(self, seed: int, limit: float) -> LoraRecord:
        """A ready LoRA that may join up to a share of the steps."""
        record = await self.bench.settled(
            await self.bench.send(lora(seed), f"tenant-{secrets.token_hex(4)}", f"lora {seed}")
        )
        self.limits[record.lora_id] = limit
        return record

    async def kept(self, record: LoraRecord, share: float) -> None:
        """Return once the record has this share."""
        deadline = Deadline.after_ms(HUNG_MS)
        now = await self.bench.records.until(
            record.tenant, record.lora_id, lambda now: now.joins_within is not None, deadline
        )
        assert now.joins_within == share


@pytest.fixture
async def painter(nats_url: str, tmp_path: Path) -> AsyncIterator[Painter]:
    """Its model is not served yet."""
    async with open_bench(nats_url, tmp_path) as bench, bench.instance():
        bench.answer = lambda request: canonical(request).model_copy(update={"model_digest": CARD.digest})
        painter = Painter(bench)
        painter.may_answer.set()
        endpoint = Endpoint(subjects.EDIT_PROBE, ProbeMessage, painter.paint, limit_bytes=8 << 20)
        async with bench.bus.serve("gateway", endpoint, instance="painter"):
            yield painter


@asynccontextmanager
async def serving(painter: Painter) -> AsyncIterator[None]:
    """The model is served while inside: a router tells so as often as routers do."""
    card = CARD.model_copy(update={"name": painter.bench.model, "default_steps": STEPS, "native_size": 128})
    summary = FleetSummary(router="r", ready={}, models=(card,))

    async def tell() -> None:
        while True:
            await painter.bench.bus.publish(subjects.SUMMARY, summary)
            await asyncio.sleep(0.1)  # the rate of the summary

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class Told:
    """What became of LoRAs, in order."""

    outcomes: asyncio.Queue[tuple[str, LoraProfile | GiornataError]] = field(default_factory=asyncio.Queue)

    def ended(self, record: LoraRecord, outcome: LoraProfile | GiornataError) -> None:
        self.outcomes.put_nowait((record.lora_id, outcome))

    async def next(self) -> tuple[str, LoraProfile | GiornataError]:
        return await asyncio.wait_for(self.outcomes.get(), HUNG_S)


@asynccontextmanager
async def watching(painter: Painter, retry_s: float = HUNG_S) -> AsyncIterator[Told]:
    told = Told()
    async with connected(ProfilerLogin(painter.bench.nats_url), ProbeSetting(), scenes()[:1]) as session:
        session.retry_s = retry_s
        task = asyncio.create_task(session.watch(lambda _: _unheard, told.ended))
        try:
            yield told
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _unheard(_edits: int, _tried: object) -> None:
    pass


async def test_what_is_there_and_what_comes_is_profiled_once_its_model_is_served(painter: Painter) -> None:
    first = await painter.upload(40, limit=0.15)
    async with watching(painter) as told:
        second = await painter.upload(41, limit=0.0)
        assert painter.asked == [], "nothing is asked of a model that is not served"
        async with serving(painter):
            await painter.kept(first, 0.15)
            await painter.kept(second, 0.0)
            third = await painter.upload(42, limit=1.0)
            await painter.kept(third, 0.5)
        assert [(await told.next())[0] for _ in range(3)] == [one.lora_id for one in (first, second, third)]
        assert told.outcomes.empty(), "each once"
    probes = [message.parameters.lora_join for message in painter.asked if _is_of(message, first)]
    assert probes == [None, 0.05, 0.1, 0.15, 0.2], "from the first step on, up to the first that is not alike"
    assert {message.priority for message in painter.asked} == {Priority.BATCH}
    assert {message.tenant for message in painter.asked if _is_of(message, first)} == {first.tenant}


def _is_of(message: ProbeMessage, record: LoraRecord) -> bool:
    return message.parameters.loras[0].id == record.lora_id


async def test_a_lora_that_is_removed_meanwhile_stays_removed(painter: Painter) -> None:
    gone = await painter.upload(45, limit=0.1)
    painter.may_answer.clear()
    async with serving(painter), watching(painter) as told:
        await asyncio.wait_for(painter.entered.wait(), HUNG_S)
        request = RemoveLora(lora_id=gone.lora_id, tenant=gone.tenant, remaining_ms=HUNG_MS)
        await painter.bench.bus.call(subjects.lora("remove"), request, LoraRecord, Deadline.after_ms(HUNG_MS))
        painter.may_answer.set()
        lora_id, outcome = await told.next()
        assert (lora_id, type(outcome)) == (gone.lora_id, LoraNotFound)
        after = await painter.upload(46, limit=0.05)
        await painter.kept(after, 0.05)
    with pytest.raises(LoraNotFound):
        await painter.bench.records.get(gone.tenant, gone.lora_id)


async def test_what_passes_is_tried_again(painter: Painter) -> None:
    record = await painter.upload(47, limit=0.05)
    painter.failures[record.lora_id] = [QueueFull("No place for batch edits.") for _ in range(2)]
    async with serving(painter), watching(painter) as told:
        await painter.kept(record, 0.05)
        assert isinstance((await told.next())[1], LoraProfile), "a full queue ends no profile"
    unanswered = await painter.upload(48, limit=0.05)
    painter.failures[unanswered.lora_id] = [InternalError("A worker fell over.")]
    async with serving(painter), watching(painter, retry_s=0.01) as told:
        assert isinstance((await told.next())[1], GiornataError)
        await painter.kept(unanswered, 0.05)


@dataclass(frozen=True)
class Launched:
    """As much of a stack as the profiler beside it sees."""

    nats_url: str
    blobs_url: str = ""

    def nats_password_file(self, _user: NatsRole) -> None:
        """Its server asks for none."""


async def test_beside_a_stack_it_says_what_became_of_each_and_ends_with_it(painter: Painter) -> None:
    poisoned, sound = await painter.upload(50, limit=0.1), await painter.upload(51, limit=0.1)
    painter.failures[poisoned.lora_id] = [RowPoisoned("It brings workers down.")]
    said: asyncio.Queue[str] = asyncio.Queue()
    stack = Launched(painter.bench.nats_url)
    async with serving(painter), asyncio.timeout(HUNG_S):
        task = asyncio.create_task(profiling(stack, said.put_nowait))  # type: ignore[arg-type]  # as much as it sees
        told = sorted([await said.get(), await said.get()])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert told == [
        "The LoRA lora 50 could not be profiled: It brings workers down.",
        "The LoRA lora 51 may join after 10% of the steps.",
    ]
    await painter.kept(sound, 0.1)


async def test_beside_a_stack_that_lets_it_in_nowhere_it_says_so_and_stays(
    guarded_nats: tuple[NatsServer, Path],
) -> None:
    server, _ = guarded_nats
    said: asyncio.Queue[str] = asyncio.Queue()
    with capture_logs():
        task = asyncio.create_task(profiling(Launched(server.url), said.put_nowait))  # type: ignore[arg-type]  # as above
        async with asyncio.timeout(HUNG_S):
            assert "LoRAs are profiled no more" in await said.get()
        assert not task.done(), "the stack goes on"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def _in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set signal handlers."""
    monkeypatch.setattr("giornata_tools.terminal.run", lambda main: asyncio.run(main()))


async def run(painter: Painter, *words: str) -> Result:
    command = ["lora", "profile", *words, "--nats", painter.bench.nats_url]
    return await asyncio.to_thread(CliRunner().invoke, cli, command)


@pytest.mark.usefixtures("_in_a_thread")
async def test_the_command_profiles_what_is_due_or_named(painter: Painter, tmp_path: Path) -> None:
    record = await painter.upload(49, limit=0.1)
    Image.new("RGB", (64, 48), "teal").save(tmp_path / "one.png")
    mask = Image.new("L", (64, 48), 0)
    mask.paste(255, (8, 8, 40, 40))
    mask.save(tmp_path / "one-mask.png")
    (tmp_path / "one.txt").write_text("a hat")
    async with serving(painter):
        due = await run(painter, record.lora_id, "--json", "--probes", str(tmp_path))
        assert due.exit_code == 0, due.output
        told = json.loads(due.stdout)
        assert (told["id"], told["joins_within"], told["steps"]) == (record.lora_id, 0.1, STEPS)
        assert [one["share"] for one in told["tried"]] == [0.05, 0.1, 0.15]
        assert painter.asked[0].parameters.prompt == "a hat"
        again = await run(painter, record.lora_id, "--at-most", "0.06")
        assert "may join after 1 of 20 steps" in again.stdout
        unknown = await run(painter, f"lora_{'0' * 32}")
        assert (unknown.exit_code, "[lora_not_found]" in unknown.stderr) == (1, True)
    await painter.kept(record, 0.05)
    wrong = await run(painter, record.lora_id, "--watch")
    assert (wrong.exit_code, "--watch" in wrong.stderr) == (2, True)
    no_probes = await run(painter, "--probes", str(tmp_path / "none"))
    assert no_probes.exit_code == 2
