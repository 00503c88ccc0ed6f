"""From a request to an open row: fetch its claim checks, load its ControlNets, compute what all steps share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from giornata import tensors
from giornata.blobs import BlobStore, intermediate
from giornata.control.expansion import Behind, sequences
from giornata.control.inputs import images, images_of, texts
from giornata.control.mismatch import ControlMismatch
from giornata.control.protocol import ControlConditions, ControlNet, ControlText
from giornata.control.running import RowControlNet
from giornata.packed.region import Region, region_of
from giornata.planning.controls import control_work
from giornata.wire.adapters import ControlUse, ControlWork
from giornata.wire.controlnets import OpenControl, control_row
from giornata.wire.errors import (
    ControlNetMismatch,
    ControlNetNotFound,
    ControlNetUnavailable,
    SchemaMismatch,
)
from giornata.wire.values import Intermediate
from giornata_controlnet.nets import ResidentControlNets
from giornata_controlnet.open_row import ActiveControlNet, OpenRow


async def open_row(request: OpenControl, nets: ResidentControlNets, blobs: BlobStore) -> OpenRow:
    """The row of `request`, whose ControlNets stay loaded until its pins are closed.

    Raises:
        ControlNetNotFound: a ControlNet is not configured here.
        ControlNetMismatch: one does not fit the model, or what it is to see.
        ControlNetUnavailable: one cannot be loaded, or there is no memory for the row.
        IntermediateLost: a claim check is no longer in the blob store.
        SchemaMismatch: the inputs are not those of such a row.
    """
    _check(request, nets)
    acting = _acting(request)
    with ExitStack() as pins:
        nets.count(frozenset(use.digest for use, _ in acting.values()))
        for use, _ in acting.values():
            pins.enter_context(nets.pinned(use.digest))
        encoding = request.encoding
        text = await intermediate(blobs, encoding.text, Intermediate.ENCODING)
        seen = await intermediate(blobs, images_of(encoding, request.index), Intermediate.ENCODING)
        loaded = {use.digest: await nets.loaded(use.digest) for use, _ in acting.values()}
        work = partial(_made, request, nets, loaded, text=text, seen=seen)
        try:
            row = await asyncio.to_thread(work)
        except ControlMismatch as error:
            raise ControlNetMismatch(str(error), field="controlnets") from error
        except torch.OutOfMemoryError as error:
            raise ControlNetUnavailable("This instance has no memory for another row.") from error
        row.pins.push(pins.pop_all())
        return row


def _check(request: OpenControl, nets: ResidentControlNets) -> None:
    """Raise where a ControlNet is unknown, or where the request's parts do not belong together."""
    uses = request.job.controls
    if missing := [use.model for use in uses if not nets.has(use.digest)]:
        known = ", ".join(card.name for card in nets.cards)
        raise ControlNetNotFound(
            "This instance has no such ControlNet.", field="controlnets", received=missing[0], accepted=known
        )
    if not uses or len(request.acting) != len(uses):
        raise SchemaMismatch(
            "Each ControlNet of a row acts in some steps.",
            field="acting",
            received=len(request.acting),
            accepted=str(len(uses)),
        )
    cells = request.computed
    if cells is not None and (cells.height, cells.width) != request.grid:
        raise SchemaMismatch(
            "The tokens that are asked for are not those of the picture.",
            field="computed",
            received=f"{cells.height}x{cells.width}",
            accepted="x".join(map(str, request.grid)),
        )


def _acting(request: OpenControl) -> Mapping[int, tuple[ControlUse, tuple[int, int]]]:
    """The ControlNets that act in any step, by their place in the job, and their steps."""
    steps = len(request.times)
    return {
        nth: (use, (max(first, 0), min(end, steps)))
        for nth, (use, (first, end)) in enumerate(zip(request.job.controls, request.acting, strict=True))
        if use.scale and max(first, 0) < min(end, steps)
    }


@torch.inference_mode()
def _made(
    request: OpenControl,
    nets: ResidentControlNets,
    loaded: Mapping[str, ControlNet],
    *,
    text: bytes,
    seen: bytes,
) -> OpenRow:
    """The row, with empty pins; to be called in a worker thread."""
    told = texts(tensors.unpack(text), request.sequences, request.job.parameters.guidance_scale)
    told = tuple(_cast(each, nets.dtype) for each in told)
    shown = images(tensors.unpack(seen), len(request.job.controls))
    times = torch.tensor(request.times, dtype=torch.float32)
    count, region = sequences(request.base.kind, len(told)), _region(request, nets.device)
    steps_of = _acting(request)
    acting: list[ActiveControlNet] = []
    behind: list[Behind] = []
    for nth, use in enumerate(request.job.controls):
        steps = steps_of.get(nth)
        if steps is None:
            behind.append((None,) * len(request.base.channels))
            continue
        net, (first, end) = loaded[use.digest], steps[1]
        added: Behind = net.behind(request.base)
        behind.append(added)
        opened = net.open(ControlConditions(shown[nth].to(nets.dtype), request.grid, told, times, use.mode))
        work = _work(net.work(request.base), told, request.grid)
        acting.append(ActiveControlNet(RowControlNet(net, opened, use.scale, added), first, end, work))
    return OpenRow(
        control_row(request.job.job_id, request.attempt, request.index),
        request.denoiser,
        acting,
        tuple(behind),
        request.base,
        request.grid,
        request.times,
        count,
        region,
        ExitStack(),
    )


def _work(work: ControlWork, told: Sequence[ControlText], grid: tuple[int, int]) -> float:
    """Multiplications of a ControlNet in one step of a row with these texts."""
    return sum(
        control_work(work, text=len(text.embeds), image=grid[0] * grid[1], sequences=len(told))
        for text in told
    )


def _region(request: OpenControl, device: torch.device) -> Region | None:
    """None where all tokens are asked for."""
    region = None if request.computed is None else region_of(request.computed)
    return None if region is None else region.on(device)


def _cast(text: ControlText, dtype: torch.dtype) -> ControlText:
    pooled, time_ids = (None if each is None else each.to(dtype) for each in (text.pooled, text.time_ids))
    return ControlText(text.embeds.to(dtype), pooled, time_ids, text.guidance_scale)
