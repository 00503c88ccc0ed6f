"""A ControlNet service with tiny nets, and the denoisers' side of the conversation."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.control.link import ControlFailed
from giornata.control.link.client import ControlLink, ControlStepHandle
from giornata.control.networks import (
    ControlConditions,
    ControlNet,
    ControlSequenceStep,
    ControlText,
    RowControlNet,
    RowStep,
    load,
    run,
)
from giornata.deadlines import Deadline
from giornata.packed.packing import make_region
from giornata.runtime import host_name
from giornata.wire import subjects
from giornata.wire.adapters import ControlKind, ControlUse, control_name
from giornata.wire.controlnets import (
    CloseControl,
    CloseControlReply,
    ControlBase,
    ControlState,
    DataPath,
    OpenControl,
    OpenControlReply,
    control_row,
)
from giornata.wire.jobs import Encoding
from giornata.wire.values import CellMap
from giornata.wire.workers import HostDevice, ServiceName, ServiceState
from giornata_controlnet.config import ControlNetConfig
from giornata_controlnet.rows import ResidentControlNets, read_cards
from giornata_controlnet.service import ControlNetService
from giornata_lab.bench.compute import tiny_flux
from tests.configs import configured
from tests.contract.messages import INSPECTION, JOB
from tests.fakes.tiny_flux_control import net
from tests.patience import HUNG_MS, HUNG_S


@dataclass
class Gate:
    """Holds the forwards of a service's nets."""

    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(10_000))
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    forwards: list[tuple[str, int]] = field(default_factory=list)
    """Names of the nets, and sequences."""
    each: threading.Semaphore | None = None
    """Has a permit for each further sample of a forward."""
    most: int = 1000
    """Sequences that fit into memory."""
    error: Exception | None = None
    """What forwards raise."""

    def hold(self) -> None:
        """No forward goes on from now on."""
        while self.permits.acquire(blocking=False):
            pass

    def held(
        self, net: ControlNet
    ) -> Callable[[Sequence[ControlSequenceStep]], Iterator[tuple[Tensor, ...]]]:
        """What computes its samples, with a permit for each forward; notes how many sequences share one."""
        of = net.run

        def run(items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
            self.forwards.append((net.card.name, len(items)))
            self.began.release()
            assert self.permits.acquire(timeout=HUNG_S)
            if self.error is not None:
                raise self.error
            if len(items) > self.most:
                raise torch.OutOfMemoryError("no room")
            if any(torch.isnan(item.latents).any() for item in items):
                raise ValueError("a latent that the net cannot take")
            for sample in of(items):
                yield sample
                if self.each is not None:
                    assert self.each.acquire(timeout=HUNG_S)

        return run


class HeldNets(ResidentControlNets):
    """Nets whose forwards a test holds."""

    def __init__(self, *args: Any, gate: Gate, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gate = gate

    def _read(self, digest: str) -> ControlNet:
        net = super()._read(digest)
        net.run = self._gate.held(net)  # type: ignore[assignment,method-assign]  # of this one alone
        return net


CPU = torch.device("cpu")
GRID = (3, 4)
TIMES = (1000.0, 750.0, 500.0, 250.0)
BASE = ControlBase(
    kind=ControlKind.FLUX,
    channels=(64,) * 5,
    singles=2,
    latent_channels=tiny_flux.LATENT,
    token_pixels=16,
    text_channels=tiny_flux.JOINT_DIM,
    pooled_channels=tiny_flux.POOLED_DIM,
)
GUIDANCE = 3.5
SLAB_BYTES = 4 << 20
NETS = ("edges", "depth", "pose")


def save_nets(folder: Path) -> None:
    """Write three ControlNets, which differ in weights and number of blocks, by their names."""
    for seed, (name, blocks) in enumerate(zip(NETS, ((2, 1), (1, 1), (2, 0)), strict=True)):
        net(*blocks, seed=seed).save_pretrained(folder / name)


@dataclass
class Row:
    """A row that a denoiser wants computed."""

    request: OpenControl
    opened: OpenControlReply
    texts: tuple[ControlText, ...]
    images: tuple[Tensor, ...]

    @property
    def key(self) -> str:
        return control_row(self.request.job.job_id, self.request.attempt, self.request.index)

    def latents(self, step: int) -> Tensor:
        """(tokens, channels)"""
        draw = torch.Generator().manual_seed(step + 17)
        return torch.randn(GRID[0] * GRID[1], tiny_flux.LATENT, generator=draw)

    def expected(
        self, nets: Mapping[str, ControlNet], step: int, live: Sequence[int] | None = None
    ) -> list[Tensor]:
        """What this process makes of a step."""
        acts = []
        for nth, use in enumerate(self.request.job.controls):
            first, end = self.request.acting[nth]
            if not use.scale or not first <= step < end:
                continue
            one = nets[use.model]
            times = torch.tensor(TIMES)
            opened = one.open(ControlConditions(self.images[nth], GRID, self.texts, times, use.mode))
            acts.append(RowControlNet(one, opened, use.scale, one.behind(BASE)))
        cells = torch.zeros(GRID, dtype=torch.bool)
        cells.view(-1)[list(live or ())] = True
        step_of = RowStep(acts, step, self.latents(step), 1, make_region(cells), whole=live is None)
        made = run([step_of])
        return [sample.flatten(0, 1) for _, _, sample in made]


class Denoiser:
    """One denoiser's questions to one instance; closes its links at the end."""

    def __init__(self, bus: Bus, blobs: BlobStore, instance: str, links: ExitStack) -> None:
        self._bus, self._blobs, self.instance, self._links = bus, blobs, instance, links
        self.name = f"denoiser-{secrets.token_hex(3)}"
        self.link: ControlLink | None = None

    async def request(
        self,
        *uses: ControlUse,
        acting: Sequence[tuple[int, int]] | None = None,
        computed: CellMap | None = None,
        paths: tuple[DataPath, ...] = (DataPath.UNIX,),
        **changed: Any,
    ) -> tuple[OpenControl, tuple[ControlText, ...], tuple[Tensor, ...]]:
        """A request with inputs of its own in the blob store, and the inputs."""
        job_id = f"job-{secrets.token_hex(4)}"
        draw = torch.Generator().manual_seed(secrets.randbits(30))
        text = {
            "prompt_embeds": torch.randn(6, tiny_flux.JOINT_DIM, generator=draw),
            "pooled_prompt_embeds": torch.randn(tiny_flux.POOLED_DIM, generator=draw),
        }
        images = tuple(torch.randn(12, tiny_flux.LATENT, generator=draw) for _ in uses)
        named = {control_name(nth): image for nth, image in enumerate(images)}
        parameters = JOB.parameters.model_copy(update={"guidance_scale": GUIDANCE})
        request = OpenControl(
            job=JOB.model_copy(update={"job_id": job_id, "controls": uses, "parameters": parameters}),
            attempt=1,
            index=0,
            inspection=INSPECTION,
            encoding=Encoding(
                text=(ref := await self._blobs.put(f"{job_id}/text", tensors.pack(text), HUNG_S)),
                text_tokens=6,
                rows=(ref,),
                controls=(await self._blobs.put(f"{job_id}/controls", tensors.pack(named), HUNG_S),),
            ),
            base=BASE,
            grid=GRID,
            times=TIMES,
            sequences=1,
            acting=tuple(acting or [(0, len(TIMES))] * len(uses)),
            computed=computed,
            denoiser=self.name,
            host=host_name(),
            paths=paths,
            remaining_ms=HUNG_MS,
        )
        told = ControlText(text["prompt_embeds"], text["pooled_prompt_embeds"], None, GUIDANCE)
        return request.model_copy(update=changed), (told,), images

    async def ask(self, request: OpenControl) -> OpenControlReply:
        subject = subjects.controlnet(self.instance, "open")
        return await self._bus.call(subject, request, OpenControlReply, Deadline.after_ms(HUNG_MS))

    async def open(self, *uses: ControlUse, **options: Any) -> Row:
        request, texts, images = await self.request(*uses, **options)
        return Row(request, await self.ask(request), texts, images)

    async def close(self, row: Row) -> bool:
        request = CloseControl(
            job_id=row.request.job.job_id, attempt=1, index=row.request.index, remaining_ms=HUNG_MS
        )
        subject = subjects.controlnet(self.instance, "close")
        return (
            await self._bus.call(subject, request, CloseControlReply, Deadline.after_ms(HUNG_MS))
        ).was_open

    def step(
        self, row: Row, step: int, shapes: Sequence[tuple[int, int]], key: str | None = None, **changed: Any
    ) -> ControlStepHandle:
        """Ask for a step; the link is opened with the first one."""
        if self.link is None or self.link.lost:
            opened = row.opened
            self.link = self._links.enter_context(
                ControlLink(opened.path, opened.address, opened.token, slab_bytes=SLAB_BYTES, device=CPU)
            )
        asked: dict[str, Any] = {
            "row": row.key if key is None else key,
            "step": step,
            "level": TIMES[step] if step < len(TIMES) else 0.0,
            "latents": row.latents(step),
            "tokens": [tokens for tokens, _ in shapes],
            "channels": [channels for _, channels in shapes],
            "dtype": torch.float32,
            "whole": True,
        }
        return self.link.ask(**asked | changed)

    def reach(self, row: Row) -> None:
        """Return when the instance has taken in all that was asked and let go of before."""
        with (
            self.step(row, 0, [(1, 1)], key="no row") as asked,
            pytest.raises(ControlFailed, match="not open here"),
        ):
            asked.sample(0, HUNG_S)


def samples(asked: ControlStepHandle, count: int) -> list[Tensor]:
    """All samples of a step, in memory of their own."""
    with asked:
        return [asked.sample(index, HUNG_S).clone() for index in range(count)]


def shapes(expected: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(each.shape[0], each.shape[1]) for each in expected]


@dataclass
class Running:
    """A service in this process."""

    instance: str
    stop: asyncio.Event
    ended: asyncio.Task[None]
    gate: Gate
    states: asyncio.Queue[ServiceState]
    may_fail: bool = False

    async def told(self, says: Any) -> ControlState:
        """The next telemetry of which `says` is true."""
        async with asyncio.timeout(HUNG_S):
            while True:
                state = await self.states.get()
                assert state.control is not None
                if says(state.control):
                    return state.control


@dataclass
class Bench:
    """The servers, and the nets in this process and on disk."""

    bus: Bus
    blobs: BlobStore
    urls: tuple[str, str]
    folders: Mapping[str, str]
    nets: Mapping[str, ControlNet]
    links: ExitStack
    gpus: tuple[HostDevice, ...] = ()
    """GPUs of the services."""

    def use(self, name: str, **changed: Any) -> ControlUse:
        return ControlUse(**{"model": name, "digest": self.nets[name].card.digest, **changed})

    def denoiser(self, running: Running) -> Denoiser:
        return Denoiser(self.bus, self.blobs, running.instance, self.links)

    @property
    def configured(self) -> str:
        return ",".join(f"{name}={folder}" for name, folder in self.folders.items())

    @asynccontextmanager
    async def service(self, *, budget_bytes: int = 1 << 30, **options: Any) -> AsyncIterator[Running]:
        """A service, which is stopped at the end."""
        instance = options.setdefault("instance", f"controlnet-{secrets.token_hex(3)}")
        given = {"device": "cpu", "telemetry_hz": 20, "nats_url": self.urls[0], "drain_s": 0, **options}
        config = configured(ControlNetConfig, controlnets=self.configured, **given)
        gate, states = Gate(), asyncio.Queue[ServiceState]()
        cards = read_cards(config.controlnets)
        with HeldNets(cards, CPU, torch.float32, budget_bytes=budget_bytes, loads=2, gate=gate) as nets:
            service = ControlNetService(config, self.bus, self.blobs, nets, self.gpus)
            subject = subjects.telemetry(ServiceName.CONTROLNET, instance)
            async with self.bus.listen(subject, ServiceState, states.put_nowait):
                stop = asyncio.Event()
                task = asyncio.create_task(service.run(stop))
                running = Running(instance, stop, task, gate, states)
                await running.told(lambda _: True)
                try:
                    yield running
                finally:
                    stop.set()
                    gate.permits.release(10_000)
                    await asyncio.wait([task])
                if not running.may_fail:
                    task.result()


def loaded(folders: Mapping[str, str]) -> dict[str, ControlNet]:
    return {name: load(Path(folder), torch.float32, CPU, name) for name, folder in folders.items()}
