"""``python -m giornata_prepost`` as a process: ready, at work, drained. What a service says that cannot start is in
`tests/integration/test_runtime.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.deadlines import Deadline
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.wire import subjects
from giornata.wire.jobs import Job
from giornata.wire.messages import MaskReply, MaskRequest
from giornata.wire.workers import ServiceName, ServiceState
from tests.fakes.tiny_segmenters import clipseg
from tests.forked_programs import program
from tests.integration.prepost.asking import INSTANCES, SCENE, a_job, inspected, png
from tests.patience import HUNG_MS, HUNG_S
from tests.present import present

STARTED_S = 2 * HUNG_S
"""It imports torch and loads a model, maybe on a busy machine."""


async def masked(caller: bus.Bus, job: Job) -> MaskReply:
    request = MaskRequest(
        image=present(job.image),
        prompt="a hat",
        threshold=0.01,
        folder=f"{job.job_id}/",
        ttl_s=HUNG_S,
        remaining_ms=HUNG_MS,
    )
    subject = subjects.prepost("mask", job.model)
    return await caller.call(subject, request, MaskReply, Deadline.after_ms(HUNG_MS))


def mapped(process: psutil.Process) -> list[str]:
    return [region.path for region in process.memory_maps()]


async def test_the_process(
    tmp_path: Path,
    tiny_checkpoint: Callable[[Family], Path],
    nats_url: str,
    redis_url: str,
) -> None:
    """Ready, one inspection, no torch in its image processes, a clean drain, nothing left behind."""
    folder, instance = tmp_path / f"tiny-{secrets.token_hex(3)}", f"prepost-{secrets.token_hex(3)}"
    shutil.copytree(tiny_checkpoint(Family.FLUX_FILL), folder)
    card = read_model_card(folder)
    INSTANCES[card.name] = instance
    heard: asyncio.Queue[ServiceState] = asyncio.Queue()
    segmenter = clipseg(tmp_path / "segmenter")
    named = ("--instance", instance, "--model", str(folder), "--mask-model", str(segmenter))
    flags = (*named, "--device", "cpu")
    async with (
        bus.connect(nats_url, "test") as caller,
        RedisBlobs.open(redis_url) as blobs,
        caller.listen(
            subjects.telemetry(ServiceName.PREPOST, instance), ServiceState, heard.put_nowait
        ) as listening,
    ):
        env = {"GIORNATA_NATS_URL": nats_url, "GIORNATA_BLOBS_URL": redis_url}
        async with program("giornata_prepost", *flags, env=env, log=tmp_path / "log") as process:
            async with asyncio.timeout(STARTED_S):
                state = await heard.get()
                assert state.ready
                assert state.host == socket.gethostname()
                assert [model.digest for model in state.models] == [card.digest]
                assert present(state.masks).name == "segmenter"
                job = await a_job(blobs, card, png(SCENE), None)
                await inspected(caller, job)
                assert (await masked(caller, job)).regions
                family = psutil.Process(process.pid).children(recursive=True)
                assert len(family) >= 3
                loaded = [path for child in family for path in mapped(child)]
                assert any("PIL" in path for path in loaded)
                assert not [path for path in loaded if "torch" in path]
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        await listening.caught_up()
    states = [heard.get_nowait() for _ in range(heard.qsize())]
    assert states[-1].draining
    assert not states[-1].ready
    assert not psutil.wait_procs(family, timeout=HUNG_S)[1]
