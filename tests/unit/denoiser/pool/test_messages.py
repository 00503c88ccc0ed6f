"""What leader and ranks send each other is msgpack of known classes, and its tensors lie in shared memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, fields, replace

import msgpack
import pytest
import torch
from torch import Tensor

from giornata.frames import MalformedFrame, framed
from giornata.wire.models import TaylorSeerSchedule
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.pool.messages import connect, pack, unpack
from giornata_denoiser.pool.shared_memory import Arena, TensorPlaces, mapped_tensor
from giornata_denoiser.rows.row import Prompt, RecordingSpec, Row
from giornata_denoiser.rows.step_cache import TaylorRule
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, where
from tests.unit.denoiser.engine.test_masked import OF


def travelled(thing: object, kept: object = None) -> object:
    """`thing` as a rank reads it; `kept` is known there as number 7."""
    places = TensorPlaces()
    data = pack(thing, places, lambda part: 7 if part is kept else None)
    descriptor = present(places.written())
    memory = mapped_tensor(descriptor, places.size_bytes)
    os.close(descriptor)
    return unpack(data, lambda place: places.tensor(place, memory), {7: kept})


def alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if type(one) is tuple and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if type(one) is type(other) and hasattr(one, "__dataclass_fields__"):
        names = [each.name for each in fields(one) if each.init]  # type: ignore[arg-type]  # of a dataclass
        return all(alike(getattr(one, name), getattr(other, name)) for name in names)
    return type(one) is type(other) and one == other


UNET = Prompt({"prompt_embeds": torch.randn(3, 4), "add_time_ids": torch.arange(6.0)}, 0, kept_channels=8)
DRIVEN = Prompt({"prompt_embeds": torch.randn(3, 4).bfloat16(), "none": torch.empty(0, 4)}, 3, (2, 3), 1.5)


def row() -> Row:
    made = tiny_flux.row(OF, Spec(grid=GRID, steps=4))
    return changed(
        made,
        region=where(),
        records=RecordingSpec(frozenset({CacheForm.KV}), 0, name="first"),
        step_cache=TaylorRule(TaylorSeerSchedule(3, 2), 1),
        prompts=(*made.inputs.prompts, UNET, DRIVEN),
    )


def test_a_row_is_the_same_in_a_rank() -> None:
    before = row()
    after = travelled(before)
    assert alike(before, after)
    assert isinstance(after, Row)
    assert (after.wishes.due_s, after.wishes.priority, after.records) == (
        before.wishes.due_s,
        before.wishes.priority,
        before.records,
    )
    assert not alike(before, replace(before, latent=before.latent + 1)), "or nothing was compared"


def test_what_rows_share_is_named_and_not_copied() -> None:
    template = CachedTemplate("t", GRID, ())
    after = travelled(changed(row(), template=template), template)
    assert isinstance(after, Row)
    assert after.reuse.template is template


def test_tensors_that_lie_in_shared_memory_stay_there() -> None:
    arena = Arena()
    memory = arena.allocated(1 << 10)
    known, other = memory[64:128].view(torch.float32), torch.arange(3)
    places = TensorPlaces(arena)
    pack((known, other, known), places)
    assert (places.place(known).slab, places.place(known).offset) == (arena.number_of(memory), 64)
    assert places.place(other).slab == 0
    assert places.size_bytes == 64, "the other one alone"


@dataclass
class Stranger:
    name: str


def test_classes_that_nobody_named_are_neither_sent_nor_made() -> None:
    with pytest.raises(TypeError, match="Stranger"):
        pack(Stranger("x"))
    with pytest.raises(KeyError, match="Stranger"):
        unpack(msgpack.packb({"": "Stranger", "name": "x"}))
    with pytest.raises(KeyError, match="system"):
        unpack(msgpack.packb({"": "system", "name": "x"}))


def test_frames_arrive_whole_with_their_files_in_order() -> None:
    one, other = map(connect, socket.socketpair())
    first, second = (os.memfd_create(name) for name in "ab")
    for data, files in ((b"x" * 100_000, ()), (b"with", (first,)), (b"again", (second,))):
        one.send(framed(data), files)
    assert other.receive() == b"x" * 100_000
    found, ended = other.receive_ready()
    assert (found, ended) == ((b"with", b"again"), False)
    for sent in (first, second):
        came = other.take_file()
        assert os.fstat(came).st_ino == os.fstat(sent).st_ino
        os.close(came)
        os.close(sent)
    with pytest.raises(MalformedFrame, match="without its file"):
        other.take_file()
    one.close()
    assert other.receive_ready() == ((), True)
    other.close()
