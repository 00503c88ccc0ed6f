"""Rows under LoRAs that a denoiser gets from the store, also while they run, and under ControlNets that it has."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from giornata import lora_files, tensors
from giornata.bus.bus import Endpoint, UnansweredError
from giornata.control.networks import ControlNet
from giornata.wire import subjects
from giornata.wire.adapters import ControlUse, LoraUse, control_name
from giornata.wire.errors import LoraNotFound
from giornata.wire.jobs import JobState, RowRecord
from giornata.wire.loras import FileChunk, ReadFile
from giornata.wire.messages import RunRequest
from giornata.wire.workers import AdapterCounters, AdapterLoad, StepSample, Tier
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.controls import sessions
from giornata_denoiser.controls.residuals import ControlNetTarget, control_target, open_controls
from tests.fakes.tiny_flux_control import beside
from tests.integration.denoiser.bench import STEPS, WAIT_S, Bench, Worker, taken
from tests.patience import HUNG_S
from tests.present import present

# The denoiser's rows under LoRAs that the LoRA store has: fetched, waited for, applied, refused.


LAYERS = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.norm1.linear",
    "single_transformer_blocks.0.proj_out",
)
RANK = 3


class Store:
    """Answers for one canonical file, once it may."""

    def __init__(self, network: nn.Module) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        for path in LAYERS:
            out_features, in_features = weight_of(network, path).shape
            self.tensors[f"{path}.down"] = 0.2 * torch.randn(RANK, in_features, generator=draw)
            self.tensors[f"{path}.up"] = 0.2 * torch.randn(out_features, RANK, generator=draw)
        self.file = save(self.tensors)
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    @property
    def use(self) -> LoraUse:
        digest = hashlib.sha256(self.file).hexdigest()
        return LoraUse(
            lora_id="lora_x",
            sha256=digest,
            size_bytes=len(self.file),
            rank=RANK,
            modules=len(LAYERS),
            weights=sum(tensor.numel() for tensor in self.tensors.values()),
            scale=0.5,
        )

    async def read(self, request: ReadFile) -> FileChunk:
        self.asked.set()
        await self.may_answer.wait()
        if request.sha256 != self.use.sha256:
            raise LoraNotFound(received=request.sha256)
        return FileChunk(data=self.file[request.offset :][: request.size_bytes])


@asynccontextmanager
async def stored(bench: Bench) -> AsyncIterator[Store]:
    store = Store(transformer(bench))
    async with bench.bus.answer(Endpoint(subjects.lora("read"), ReadFile, store.read)):
        yield store


def transformer(bench: Bench) -> nn.Module:
    network: nn.Module = bench.checkpoint.family.network.transformer  # type: ignore[attr-defined]  # of the tiny checkpoint
    return network


def weight_of(network: nn.Module, path: str) -> Tensor:
    return cast("nn.Linear", network.get_submodule(path)).weight


@contextmanager
def fused(network: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> Iterator[None]:
    """The network with the LoRA's products in its weights, in place."""
    weights = {path: weight_of(network, path) for path in LAYERS}
    originals = {path: weight.detach().clone() for path, weight in weights.items()}
    with torch.no_grad():
        for path, weight in weights.items():
            weight.add_(scale * tensors[f"{path}.up"] @ tensors[f"{path}.down"])
    try:
        yield
    finally:
        with torch.no_grad():
            for path, weight in weights.items():
                weight.copy_(originals[path])


def under(request: RunRequest, *loras: LoraUse) -> RunRequest:
    return request.model_copy(update={"job": request.job.model_copy(update={"loras": loras})})


async def test_a_picture_under_a_lora_equals_one_of_fused_weights(bench: Bench) -> None:
    async with stored(bench) as store, bench.worker() as worker:
        plain = await bench.computed(worker, await bench.job(worker))
        found = await bench.computed(worker, under(await bench.job(worker), store.use))
        with fused(transformer(bench), store.tensors, scale=0.5):
            wanted = await bench.computed(worker, await bench.job(worker))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert (found - plain).abs().max() > 1e-2
        async with asyncio.timeout(WAIT_S):
            resident: dict[Tier, tuple[str, ...]] = {}
            while Tier.DEVICE not in resident:  # what is heard of while it is loaded is in memory alone
                told = (await bench.states.get()).worker
                resident = (told and told.adapters_resident) or {}
        assert resident[Tier.DEVICE] == (store.use.sha256,)


async def test_telemetry_tells_how_long_a_lora_took_and_what_its_steps_computed(bench: Bench) -> None:
    async with stored(bench) as store, bench.worker() as worker:
        await bench.computed(worker, under(await bench.job(worker), store.use))
        hops, steps = list[AdapterLoad](), list[StepSample]()
        async with asyncio.timeout(WAIT_S):
            while len(hops) < 2 or not steps:
                if (told := (await bench.states.get()).worker) is not None:
                    hops += told.adapter_loads
                    steps += told.samples
    sizes = [(hop.source, hop.size_bytes) for hop in hops]
    assert sizes == [(None, store.use.size_bytes), (Tier.MEMORY, store.use.size_bytes)]
    assert {sample.segments for sample in steps} == {1}
    for sample in steps:
        share = sample.low_rank / (store.use.weights * (sample.image_tokens + sample.text_tokens))
        assert 0.5 < share < 1.5, "a token meets each weight of the factors about once"


async def test_a_lora_that_the_store_does_not_have_fails_its_job_alone(bench: Bench) -> None:
    async with stored(bench) as store, bench.worker() as worker:
        gone = under(await bench.job(worker), store.use.model_copy(update={"sha256": "0" * 64}))
        await bench.run(worker, gone)
        await bench.report()
        (row,) = (await bench.records.get(gone.job.job_id)).rows
        assert present(row.error).code == "lora_not_found"
        await bench.computed(worker, await bench.job(worker))


async def test_a_worker_stops_while_a_lora_is_being_fetched(bench: Bench) -> None:
    async with stored(bench) as store:
        store.may_answer.clear()
        async with bench.worker(drain_s=0.1) as worker:
            await bench.run(worker, under(await bench.job(worker), store.use))
            await asyncio.wait_for(store.asked.wait(), WAIT_S)
            worker.stop.set()
            await asyncio.wait_for(asyncio.wait([present(worker.ended)]), WAIT_S)
        event = await bench.report()
        assert event.handed_back
        store.may_answer.set()


async def test_a_load_goes_on_at_another_instance_where_the_store_was_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_files, "PIECE_BYTES", 512)
    monkeypatch.setattr(lora_files, "ANSWER_MS", 300)
    store, asked, killed = Store(transformer(bench)), [], asyncio.Event()

    async def until_killed(request: ReadFile) -> FileChunk:
        if request.offset:
            killed.set()
            raise UnansweredError
        return await store.read(request)

    async def afterwards(request: ReadFile) -> FileChunk:
        asked.append(request.offset)
        return await store.read(request)

    async with bench.worker() as worker:
        request = under(await bench.job(worker), store.use)
        async with bench.bus.answer(Endpoint(subjects.lora("read"), ReadFile, until_killed)):
            await bench.run(worker, request)
            await asyncio.wait_for(killed.wait(), WAIT_S)
        await bench.computed(worker, await bench.job(worker))  # while no instance is there
        async with bench.bus.answer(Endpoint(subjects.lora("read"), ReadFile, afterwards)):
            assert (await bench.report()).job_id == request.job.job_id
        assert len(await bench.latents(request)) == 1
    assert asked[0] == 512, "from where it was"


# Rows that begin before their LoRAs are loaded: they join late, tell so, and migrate.


BOUND = 2


def bounded(store: Store) -> LoraUse:
    return store.use.model_copy(update={"joins_within": BOUND / STEPS})


async def begun(bench: Bench, worker: Worker, store: Store) -> RunRequest:
    """A job whose row has come to its bound and waits for its LoRA."""
    store.may_answer.clear()
    request = under(await bench.job(worker), bounded(store))
    await bench.run(worker, request)
    while (at := await bench.step()).job_id != request.job.job_id or at.step < BOUND:
        pass
    return request


async def row_of(bench: Bench, request: RunRequest) -> RowRecord:
    (row,) = (await bench.records.get(request.job.job_id)).rows
    return row


async def told(bench: Bench) -> AdapterCounters:
    """What a worker tells after now."""
    while not bench.states.empty():
        bench.states.get_nowait()
    await asyncio.wait_for(bench.states.get(), WAIT_S)
    state = await asyncio.wait_for(bench.states.get(), WAIT_S)
    return present(present(state.worker).adapters)


async def test_a_bounded_row_makes_its_first_steps_and_tells_when_its_lora_joined(bench: Bench) -> None:
    async with stored(bench) as store, bench.worker() as worker:
        request = await begun(bench, worker, store)
        await bench.computed(worker, await bench.job(worker))  # others pass it at its bound
        store.may_answer.set()
        assert (await bench.report()).job_id == request.job.job_id
        assert (await row_of(bench, request)).loras_from == BOUND
        assert (await told(bench)).late == 1
        here = under(await bench.job(worker), bounded(store))
        exact = await bench.computed(worker, here)
        assert (await row_of(bench, here)).loras_from == 0, "what is loaded acts from the first step on"
        assert (await told(bench)).late == 1
        (late,) = await bench.latents(request)
        assert (late - exact).abs().max() > 1e-3


async def test_a_row_that_waits_at_its_bound_goes_on_elsewhere(bench: Bench) -> None:
    async with stored(bench) as store:
        async with bench.worker() as worker:
            stayed = await begun(bench, worker, store)
            store.may_answer.set()
            await bench.report()
        async with bench.worker(drain_s=0.1) as worker:
            request = await begun(bench, worker, store)
            worker.stop.set()
            assert (await bench.report()).handed_back
        row = await row_of(bench, request)
        assert row.resume is not None
        assert (row.resume.step, row.resume.loras_from) == (BOUND, BOUND)
        store.may_answer.set()
        async with bench.worker() as worker:
            record = await bench.records.change(request.job.job_id, lambda r: taken(r, 2, worker.instance))
            await bench.run(worker, request.model_copy(update={"attempt": 2, "rows": record.rows}))
            await bench.report()
        assert (await row_of(bench, request)).loras_from == BOUND
        torch.testing.assert_close(await bench.latents(request), await bench.latents(stayed))


# Rows under ControlNets that a denoiser has loaded, asked for over NATS.


CPU = torch.device("cpu")


def fitting(checkpoint: Checkpoint, **options: Any) -> Any:
    """A random ControlNet for the checkpoint."""
    config = checkpoint.family.network.transformer.config  # type: ignore[attr-defined]  # of the tiny checkpoint
    return beside(config, **options)


def of(checkpoint: Checkpoint) -> ControlNetTarget | None:
    return control_target(checkpoint.family.network, checkpoint.card.pixel_multiple)


def loaded(bench: Bench, folder: Path) -> ControlNet:
    if not (folder / "edges").exists():
        fitting(bench.checkpoint).save_pretrained(folder / "edges")
    nets = open_controls(f"edges={folder / 'edges'}", of(bench.checkpoint), dtype=torch.float32, device=CPU)
    bench.checkpoint = replace(bench.checkpoint, controlnets=nets)
    (found,) = nets.values()
    return found


async def controlled(bench: Bench, request: RunRequest, *uses: ControlUse) -> RunRequest:
    """`request` with ControlNets, and a control image for each."""
    draw = torch.Generator().manual_seed(5)
    images = {control_name(nth): torch.randn(12, 64, generator=draw) for nth in range(len(uses))}
    ref = await bench.blobs.put(f"{request.job.job_id}/controls", tensors.pack(images), HUNG_S)
    return request.model_copy(
        update={
            "job": request.job.model_copy(update={"controls": uses}),
            "encoding": request.encoding.model_copy(update={"controls": (ref,)}),
        }
    )


async def test_a_picture_follows_its_control_image(bench: Bench, tmp_path: Path) -> None:
    made = loaded(bench, tmp_path)
    use = ControlUse(model="edges", digest=made.card.digest, scale=0.8)
    async with bench.worker() as worker:
        plain = await bench.computed(worker, await bench.job(worker))
        pictures = [
            await bench.computed(worker, await controlled(bench, await bench.job(worker), one))
            for one in (use, use, use.model_copy(update={"scale": 0.0}))
        ]
        async with asyncio.timeout(WAIT_S):
            while not (state := await bench.states.get()).controlnets:
                pass
    assert (pictures[0] - plain).abs().max() > 1e-2
    torch.testing.assert_close(pictures[0], pictures[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(pictures[2], plain, atol=1e-5, rtol=0)
    assert [(card.name, card.digest) for card in state.controlnets] == [("edges", made.card.digest)]
    (told,) = state.controlnets
    assert told.work == made.card.work
    assert told.work is not None


async def test_a_picture_is_never_made_without_a_controlnet_that_is_not_here(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "TOLD_S", 0.0)
    async with bench.worker() as worker:
        request = await controlled(bench, await bench.job(worker), ControlUse(model="edges", digest="e" * 64))
        await bench.run(worker, request)
        told = await bench.report()
        record = await bench.records.get(request.job.job_id)
    assert record.state is JobState.RUNNING, "the router ends it"
    (row,) = record.rows
    error = row.error or told.error  # type: ignore[attr-defined]  # either tells
    assert error is not None
    assert error.code == "controlnet_not_found"
