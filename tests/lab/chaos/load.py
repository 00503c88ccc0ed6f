"""Clients that edit all the time, while services beneath them are replaced, and what has become of their edits."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import giornata.client
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from tests.lab.chaos.balancer import Balancer

PAUSE_S = 0.5
"""Pause of each client between two edits: it leaves the processors time to start the successors."""
STEPS = 4
LONG_STEPS = 60
"""Steps of a long asynchronous job: enough that some run while their denoiser leaves, on any machine."""


class Load:
    """Clients that edit until they are told to stop, and what they have seen."""

    def __init__(self, balancer: Balancer, client: giornata.client.Client) -> None:
        self._balancer = balancer
        self._client = client
        self._seeds = itertools.count()
        self._stop = asyncio.Event()
        self.edits: list[str] = []
        """Job ids of the edits that a client waited for."""
        self.asked: list[str] = []
        """Likewise of those over NATS."""
        self.long = False
        """Whether asynchronous jobs are to last for seconds; they keep a processor busy."""
        self.followed: list[str] = []
        """Job ids of asynchronous jobs."""

    async def run(self, edit: Callable[[], Awaitable[None]]) -> None:
        while not self._stop.is_set():
            await edit()
            await asyncio.sleep(PAUSE_S)

    def stop(self) -> None:
        self._stop.set()

    async def edit(self) -> None:
        """An edit whose client waits for the answer."""
        form = partial(
            edit_form, file(scene()), file(box()), seed=next(self._seeds), num_inference_steps=STEPS
        )
        async with self._balancer.request("POST", "/v1/images/edits", form) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        assert len(body["data"]) == 1
        self.edits.append(body["giornata"]["job_id"])

    async def ask(self) -> None:
        """An edit over NATS."""
        seed = next(self._seeds)
        edit = await self._client.edit(
            image=file(scene()), mask=file(box()), prompt="a hat", seed=seed, num_inference_steps=STEPS
        )
        result = await edit
        assert len(result.pictures) == 1
        self.asked.append(result.job_id)

    async def follow(self) -> None:
        """An asynchronous job, followed from gateway to gateway: no step is told twice, or after a later one.

        Steps are told live alone, to whoever follows at that moment.
        """
        steps, size = (LONG_STEPS, (512, 512)) if self.long else (STEPS, (128, 96))
        picture, mask, seed = file(scene(*size)), file(box(*size)), next(self._seeds)
        form = partial(edit_form, picture, mask, seed=seed, num_inference_steps=steps, reuse="off")
        async with self._balancer.request("POST", "/v1/jobs", form) as answer:
            job = await answer.json()
            assert answer.status == 202, job
        told: list[dict[str, Any]] = []
        last = "0"
        while not told or told[-1]["type"] == "image_edit.progress":
            headers = {"Last-Event-ID": last}
            async with self._balancer.request(
                "GET", f"/v1/jobs/{job['id']}/events", headers=headers
            ) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"id: "):
                        last = line[4:].decode().strip()
                    elif line.startswith(b"data: "):
                        told.append(json.loads(line[6:]))
        assert told[-1]["type"] == "image_edit.completed", told[-1]
        seen = [event["step"] for event in told if event.get("step")]
        assert seen == sorted(set(seen))
        self.followed.append(job["id"])
