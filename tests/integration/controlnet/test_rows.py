"""Rows that share forwards, and kinds of ControlNets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from giornata import tensors
from giornata.control.link import ControlFailed, LinkLost
from giornata.control.networks import (
    ControlConditions,
    ControlSequenceStep,
    ControlText,
    load,
    run,
    skip_channels,
)
from giornata.tensors import NEGATIVE
from giornata.wire.adapters import ControlKind, ControlUse, control_name
from giornata.wire.controlnets import ControlBase, DataPath, OpenControl
from giornata.wire.errors import (
    ControlNetMismatch,
    ControlNetNotFound,
    ControlNetUnavailable,
    GiornataError,
    IntermediateLost,
    InternalError,
    SchemaMismatch,
)
from giornata.wire.jobs import Encoding
from giornata.wire.workers import HostDevice
from giornata_controlnet.compute_thread import QueuedStep, step_refusal
from giornata_controlnet.rows import ResidentControlNets, open_row, read_cards
from giornata_lab.bench.compute import tiny_unet
from tests.contract.messages import INSPECTION, JOB
from tests.fakes import tiny_driven, tiny_sd3_control, tiny_unet_control
from tests.fakes.blobs import MemoryBlobs
from tests.integration.controlnet.bench import BASE, Bench, samples, shapes
from tests.patience import HUNG_MS, HUNG_S

# Rows over NATS: opened once, refused with a reason, kept while they are used, and let go of.


async def test_cards_and_the_gpu_that_was_claimed_are_told_before_any_weights_are_loaded(
    bench: Bench,
) -> None:
    bench.gpus = (HostDevice(device="cuda:3", id="GPU-3a"),)
    async with bench.service() as running, asyncio.timeout(HUNG_S):
        state = await running.states.get()
    assert state.gpus == bench.gpus
    assert [(card.name, card.digest) for card in state.controlnets] == [
        (name, net.card.digest) for name, net in bench.nets.items()
    ]
    assert state.control is not None
    assert (state.control.resident, state.control.misses) == ((), 0)


async def test_a_row_is_opened_once(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        request, *_ = await denoiser.request(bench.use("edges"))
        first, second = await asyncio.gather(denoiser.ask(request), denoiser.ask(request))
        again = await denoiser.ask(request)
        assert first == second == again
        state = await running.told(lambda told: told.rows == 1)
        assert (state.hits, state.misses) == (0, 1), "its inputs were fetched once"
        other = bench.denoiser(running)
        assert (await other.open(bench.use("edges"))).opened.token != first.token
        state = await running.told(lambda told: told.rows == 2)
        assert (state.hits, state.misses) == (1, 1)


REFUSED: list[tuple[ControlUse | str, dict[str, object], type[GiornataError], str]] = [
    (ControlUse(model="ghost", digest="e" * 64), {}, ControlNetNotFound, "edges, depth, pose"),
    ("edges", {"base": BASE.model_copy(update={"text_channels": 9})}, ControlNetMismatch, "width of text"),
    ("edges", {"grid": (4, 4)}, ControlNetMismatch, "a control image"),
    ("edges", {"acting": ()}, SchemaMismatch, "acts in some steps"),
    ("edges", {"host": "elsewhere"}, ControlNetUnavailable, "no data path in common"),
    ("edges", {"paths": (DataPath.CUDA,)}, ControlNetUnavailable, "no data path in common"),
]


async def test_a_row_that_cannot_be_computed_is_refused(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        for use, changed, kind, told in REFUSED:
            request, *_ = await denoiser.request(bench.use(use) if isinstance(use, str) else use)
            with pytest.raises(kind, match=told):
                await denoiser.ask(request.model_copy(update=changed))
        request, *_ = await denoiser.request(bench.use("edges"))
        await bench.blobs.delete(request.encoding.text)
        with pytest.raises(IntermediateLost):
            await denoiser.ask(request)
        await running.told(lambda state: state.rows == 0)


async def test_weights_of_open_rows_stay_beyond_the_budget(bench: Bench) -> None:
    async with bench.service(budget_bytes=1) as running:
        denoiser = bench.denoiser(running)
        rows = [await denoiser.open(bench.use(name)) for name in ("edges", "depth")]
        state = await running.told(lambda told: len(told.resident) == 2)
        assert state.evicted == 0
        expected = rows[0].expected(bench.nets, 0)
        found = samples(denoiser.step(rows[0], 0, shapes(expected)), len(expected))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        await denoiser.close(rows[0])
        state = await running.told(lambda told: told.evicted == 1)
        assert state.resident == (bench.nets["depth"].card.digest,)
        assert state.resident_bytes == bytes_of(bench, "depth")


def bytes_of(bench: Bench, name: str) -> int:
    """Bytes of a net's weights."""
    return sum(parameter.nbytes for parameter in bench.nets[name].net.parameters())


async def test_a_row_without_steps_is_let_go_of(bench: Bench) -> None:
    async with bench.service(control_idle_s=0.05) as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        right = shapes(row.expected(bench.nets, 0))
        await running.told(lambda told: told.misses == 1 and told.rows == 0)
        with pytest.raises(ControlFailed) as raised, denoiser.step(row, 0, right) as asked:
            asked.sample(0, HUNG_S)
        assert raised.value.code == "controlnet_row_unknown"


async def test_rows_go_with_their_denoisers_connection(bench: Bench) -> None:
    async with bench.service() as running:
        leaving, staying = bench.denoiser(running), bench.denoiser(running)
        row, other = await leaving.open(bench.use("edges")), await staying.open(bench.use("edges"))
        right = shapes(row.expected(bench.nets, 0))
        samples(leaving.step(row, 0, right), len(right))
        samples(staying.step(other, 0, right), len(right))
        assert leaving.link is not None
        leaving.link.close()
        await running.told(lambda told: told.rows == 1)
        samples(staying.step(other, 1, right), len(right))
        again = await leaving.ask(row.request)
        assert again.token != row.opened.token, "the old one opens nothing any more"


# Rows of UNets and of Stable Diffusion 3 at the service: what is opened from claim checks equals the nets
# alone.


CPU = torch.device("cpu")
GRID = (2, 3)
TIMES = (901.0, 501.0, 37.0)
TEXT_TOKENS = 5
SCALE = 0.7
UNETS = {"sd": 8, "xl": 4}
"""Latent pixels a side of a tile."""


class Asked:
    """A step as a data path hands it over; has what is read of one."""

    token, row, whole = "t", "r", True

    def __init__(self, step: int, latents: Tensor, shapes: tuple[tuple[int, int], ...]) -> None:
        self.step, self.level, self.latents, self.shapes = step, TIMES[step], latents, shapes


def unet(shape: str, folder: Path) -> tuple[ControlBase, Tensor]:
    """A ControlNet's folder is filled: the base that it fits, and a control image."""
    made = tiny_unet_control.net(shape)
    made.save_pretrained(folder)
    side = UNETS[shape]
    base = ControlBase(
        kind=ControlKind.UNET,
        channels=skip_channels(made, side),
        latent_channels=4 * side**2,
        token_pixels=4 * side,
        text_channels=tiny_unet.CROSS,
        pooled_channels=tiny_unet.POOLED if shape == "xl" else None,
    )
    return base, torch.rand(3, GRID[0] * 4 * side, GRID[1] * 4 * side)


def sd3(_: str, folder: Path) -> tuple[ControlBase, Tensor]:
    config = tiny_driven.transformer("sd3").config
    made = tiny_sd3_control.net(config)
    made.save_pretrained(folder)
    base = ControlBase(
        kind=ControlKind.SD3,
        channels=(made.inner_dim,) * config.num_layers,
        latent_channels=tiny_driven.LATENT,
        token_pixels=16,
        text_channels=tiny_driven.TEXT,
        pooled_channels=tiny_driven.POOLED,
    )
    return base, torch.randn(GRID[0] * GRID[1], tiny_driven.LATENT)


def encoded(base: ControlBase, *, sized: bool) -> dict[str, Tensor]:
    """The prompt's tensors and the negative prompt's, by name."""
    found = {}
    for prefix in ("", NEGATIVE):
        found[f"{prefix}prompt_embeds"] = torch.randn(TEXT_TOKENS, base.text_channels)
        if base.pooled_channels is not None:
            found[f"{prefix}pooled_prompt_embeds"] = torch.randn(base.pooled_channels)
        if sized:
            found[f"{prefix}add_time_ids"] = (torch.rand(6) * 100).round()
    return found


@pytest.mark.parametrize(("shape", "made"), [("xl", unet), ("sd3", sd3)])
async def test_a_guided_row_equals_its_net_alone(tmp_path: Path, shape: str, made: Any) -> None:
    torch.manual_seed(3)
    base, hint = made(shape, tmp_path / "edges")
    text = encoded(base, sized=shape == "xl")
    net = load(tmp_path / "edges", torch.float32, CPU, "edges")
    blobs = MemoryBlobs()
    ref = await blobs.put("text", tensors.pack(text), HUNG_S)
    control = await blobs.put("control", tensors.pack({control_name(0): hint}), HUNG_S)
    use = ControlUse(model="edges", digest=net.card.digest, scale=SCALE)
    request = OpenControl(
        job=JOB.model_copy(update={"controls": (use,)}),
        attempt=1,
        index=0,
        inspection=INSPECTION,
        encoding=Encoding(text=ref, text_tokens=TEXT_TOKENS, rows=(ref,), controls=(control,)),
        base=base,
        grid=GRID,
        times=TIMES,
        sequences=2,
        acting=((0, 2),),
        denoiser="d",
        host="h",
        paths=(DataPath.UNIX,),
        remaining_ms=HUNG_MS,
    )
    with ResidentControlNets(
        read_cards(str(tmp_path / "edges")), CPU, torch.float32, budget_bytes=1 << 30, loads=1
    ) as nets:
        row = await open_row(request, nets, blobs)
        latents = torch.randn(GRID[0] * GRID[1], base.latent_channels)
        asked: Any = Asked(1, latents, row.shapes(1, whole=True))
        assert step_refusal(row, asked) is None
        assert row.work(1) > 0
        answers = {
            nth: sample.flatten(0, 1)
            for _, nth, sample in run([QueuedStep(asked, row).of(CPU, torch.float32)])
        }
        assert row.acting(2) == [], "outside of its interval nothing is computed"
        row.pins.close()
    told = tuple(
        ControlText(
            text[f"{prefix}prompt_embeds"],
            text.get(f"{prefix}pooled_prompt_embeds"),
            text.get(f"{prefix}add_time_ids"),
        )
        for prefix in ("", NEGATIVE)
    )
    opened = net.open(ControlConditions(hint, GRID, told, torch.tensor(TIMES)))
    expected = list(net.run([ControlSequenceStep(opened, 1, latents, sequence) for sequence in range(2)]))
    for block, sample in enumerate(net.behind(base)):
        nth = row.sums(1).behind[block]
        assert (nth is None) == (sample is None)
        if nth is not None and sample is not None:
            wanted = torch.cat(list(expected[sample])) * SCALE
            torch.testing.assert_close(answers[nth], wanted, atol=1e-5, rtol=0)
    positive, negative = expected[-1]
    assert (positive - negative).abs().max() > 1e-4, "each sequence has its text"


# What denoisers notice when a service stops, or loses its device, in the middle of a step.


async def test_a_service_that_stops_finishes_its_rows_and_takes_no_more(bench: Bench) -> None:
    async with bench.service(drain_s=600) as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        expected = row.expected(bench.nets, 2)
        right = shapes(expected)
        samples(denoiser.step(row, 0, right), len(right))
        running.stop.set()
        async with asyncio.timeout(HUNG_S):
            while not (await running.states.get()).draining:
                pass
        with pytest.raises(ControlNetUnavailable, match="is stopping"):
            await denoiser.open(bench.use("edges"))
        assert await denoiser.ask(row.request) == row.opened, "what is open stays open"
        found = samples(denoiser.step(row, 2, right), len(right))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert await denoiser.close(row)
        await asyncio.wait_for(running.ended, HUNG_S)


async def test_rows_that_do_not_end_in_time_lose_their_link(bench: Bench) -> None:
    async with bench.service(drain_s=0) as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        right = shapes(row.expected(bench.nets, 0))
        running.gate.hold()
        asked = denoiser.step(row, 0, right)
        assert running.gate.began.acquire(timeout=HUNG_S)
        waits = denoiser.step(row, 1, right)
        running.stop.set()

        def lose() -> None:  # the service waits for the running forward, and the loop for the service
            with pytest.raises(LinkLost):
                waits.sample(0, HUNG_S)
            running.gate.permits.release(100)

        await asyncio.to_thread(lose)
        asked.release()
        async with asyncio.timeout(HUNG_S):
            await asyncio.wait([running.ended])


async def test_a_lost_device_ends_the_service(bench: Bench) -> None:
    async with bench.service() as running:
        running.may_fail = True
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        running.gate.error = torch.AcceleratorError("the device is gone", 1)
        asked = denoiser.step(row, 0, shapes(row.expected(bench.nets, 0)))
        with pytest.raises(LinkLost):
            await asyncio.to_thread(asked.sample, 0, HUNG_S)
        with pytest.raises(ExceptionGroup) as raised:
            await running.ended
    assert raised.group_contains(InternalError, match="lost their device")


async def test_where_memory_runs_out_fewer_steps_share_a_forward(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        rows = [await denoiser.open(bench.use("edges")) for _ in range(5)]
        expected = [row.expected(bench.nets, 0) for row in rows]
        right = shapes(expected[0])
        running.gate.most = 2
        running.gate.hold()
        blocking = denoiser.step(rows[0], 1, right)
        assert running.gate.began.acquire(timeout=HUNG_S)
        asked = [denoiser.step(row, 0, right) for row in rows[1:]]
        denoiser.reach(rows[0])
        running.gate.permits.release(100)
        samples(blocking, len(right))
        for one, other in zip(asked, expected[1:], strict=True):
            torch.testing.assert_close(samples(one, len(right)), other, atol=1e-6, rtol=0)
        running.gate.most = 0
        with (
            capture_logs(),  # to render the traceback takes seconds
            pytest.raises(ControlFailed) as raised,
            denoiser.step(rows[0], 0, right) as alone,
        ):
            alone.sample(0, HUNG_S)
        assert raised.value.code == "controlnet_out_of_memory"
    assert [count for _, count in running.gate.forwards] == [1, 4, 2, 2, 1]
