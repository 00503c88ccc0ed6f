"""Rows over NATS: opened once, refused with a reason, kept while they are used, and let go of."""

from __future__ import annotations

import asyncio

import pytest
import torch

from giornata.control.link.losses import ControlFailed
from giornata.wire.adapters import ControlUse
from giornata.wire.controlnets import DataPath
from giornata.wire.devices import HostDevice
from giornata.wire.errors import (
    ControlNetMismatch,
    ControlNetNotFound,
    ControlNetUnavailable,
    GiornataError,
    IntermediateLost,
    Overloaded,
    SchemaMismatch,
)
from tests.integration.controlnet.bench import BASE, Bench, samples, shapes
from tests.patience import HUNG_S


async def test_telemetry_tells_the_gpu_that_was_claimed(bench: Bench) -> None:
    bench.gpus = (HostDevice(device="cuda:3", id="GPU-3a"),)
    async with bench.service() as running, asyncio.timeout(HUNG_S):
        assert (await running.states.get()).gpus == bench.gpus


async def test_cards_are_told_before_any_weights_are_loaded(bench: Bench) -> None:
    async with bench.service() as running:
        async with asyncio.timeout(HUNG_S):
            state = await running.states.get()
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


@pytest.mark.parametrize(
    ("uses", "changed", "kind", "told"),
    [
        ((ControlUse(model="ghost", digest="e" * 64),), {}, ControlNetNotFound, "edges, depth, pose"),
        (
            ("edges",),
            {"base": BASE.model_copy(update={"text_channels": 9})},
            ControlNetMismatch,
            "width of text",
        ),
        (("edges",), {"grid": (4, 4)}, ControlNetMismatch, "a control image"),
        (("edges",), {"acting": ()}, SchemaMismatch, "acts in some steps"),
        (("edges",), {"host": "elsewhere"}, ControlNetUnavailable, "no data path in common"),
        (("edges",), {"paths": (DataPath.CUDA,)}, ControlNetUnavailable, "no data path in common"),
    ],
)
async def test_a_row_that_cannot_be_computed_is_refused(
    bench: Bench,
    uses: tuple[ControlUse | str, ...],
    changed: dict[str, object],
    kind: type[GiornataError],
    told: str,
) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        named = [bench.use(use) if isinstance(use, str) else use for use in uses]
        request, *_ = await denoiser.request(*named)
        with pytest.raises(kind, match=told):
            await denoiser.ask(request.model_copy(update=changed))
        await running.told(lambda state: state.rows == 0)


async def test_lost_inputs_are_named(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        request, *_ = await denoiser.request(bench.use("edges"))
        await bench.blobs.delete(request.encoding.text)
        with pytest.raises(IntermediateLost):
            await denoiser.ask(request)


async def test_as_many_rows_are_open_as_may_be(bench: Bench) -> None:
    async with bench.service(control_rows=1) as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        with pytest.raises(Overloaded, match=r"Received: 1\. Accepted: 1\."):
            await denoiser.open(bench.use("edges"))
        assert await denoiser.ask(row.request) == row.opened, "a row that is open already is no further one"
        assert await denoiser.close(row)
        await denoiser.open(bench.use("edges"))


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


async def test_weights_that_no_row_uses_go_by_popularity(bench: Bench) -> None:
    async with bench.service(budget_bytes=bytes_of(bench, "edges") + bytes_of(bench, "pose")) as running:
        denoiser = bench.denoiser(running)
        for name in ("edges", "edges", "edges", "depth", "pose"):
            await denoiser.close(await denoiser.open(bench.use(name)))
        state = await running.told(lambda told: told.evicted == 1 and told.rows == 0)
        assert set(state.resident) == {bench.nets[name].card.digest for name in ("edges", "pose")}
        assert (state.hits, state.misses) == (2, 3)


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
