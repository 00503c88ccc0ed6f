"""Recordings in memory, pinned, and on disk; what they are called, and when a run is worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from giornata.scheduling.placement import TemplateRunPolicy
from giornata.wire.jobs import picture_id
from giornata.wire.models import BlockSpec, Sampler
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.workers import LoadSample, Tier
from giornata_denoiser.choices import BITS, EXACT, CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.sampling import DiscreteTime, FlowMatching, shifted_by_size
from giornata_denoiser.rows.template import FILE_BYTES, CachedBlock, CachedTemplate, Entry, store
from giornata_denoiser.templates import store as template_store
from giornata_denoiser.templates.runs import (
    ANYWHERE,
    LEVELS,
    LEVELS_TOGETHER,
    SAME,
    TemplateRunSpec,
    levels_of,
    takes_from_recordings,
    wanted_recording,
)
from giornata_denoiser.templates.store import PINNED, TemplateStore
from tests.configs import configured
from tests.contract.messages import CARD, INSPECTION
from tests.present import present
from tests.unit.denoiser.templates.desk import same, template

# The store of recordings: two tiers, each within its budget.


def test_a_store_goes_from_memory_to_disk_to_nothing(tmp_path: Path) -> None:
    one = template("one")
    template_store.write_recording(one, tmp_path / "x")
    room = (tmp_path / "x").stat().st_size * 3 + 100  # names are of different lengths
    tiers = TemplateStore(one.size_bytes * 2, tmp_path, disk_bytes=room)
    (tmp_path / "x").unlink()
    for name in ("one", "two", "three", "four"):
        tiers.put(template(name))
    here = [tiers.size_of(name) is not None for name in ("one", "two", "three", "four")]
    assert here == [False, True, True, True]
    assert tiers.counted().memory_bytes == one.size_bytes * 2
    assert tiers.find("one") is None
    found = present(tiers.find("two"))
    assert same(found, template("two"))
    assert tiers.find("four") is not None
    assert dict(tiers.counters) == {"misses": 1, "hits_disk": 1, "hits_memory": 1}
    assert (tiers.counted().evicted_memory, tiers.counted().evicted_disk) == (3, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_restart_keeps_what_is_on_disk(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    found = present(TemplateStore(10**6, tmp_path, 10**6).find("one"))
    assert same(found, template("one"))
    assert TemplateStore(10**6, tmp_path, 0).size_of("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_template_is_a_miss_and_removed(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    assert tiers.find("one") is None
    assert list(tmp_path.iterdir()) == []
    template_store.write_recording(template("other"), path)
    assert TemplateStore(10**6, tmp_path, 10**6).find("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_into_memory_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6, host=PINNED)

    def no_memory(self: CachedTemplate) -> CachedTemplate:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(CachedTemplate, "pinned", no_memory)
    assert tiers.find("one") is None
    tiers.prefetch("one")
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(CachedTemplate, "pinned", lambda self: self)
    assert tiers.find("one") is not None


def test_a_removed_template_is_in_no_tier(tmp_path: Path) -> None:
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    tiers.put(template("one"))
    assert tiers.remove("one")
    assert not tiers.remove("one")
    assert tiers.find("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_template_is_whole_for_whoever_has_it_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    """Rows that run hold mapped tensors: neither a removal nor another file of the same name may change them."""
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    held = present(tiers.find("one"))
    tiers.put(template("one", seed=1))
    tiers.put(template("two"))
    assert same(held, template("one"))
    tiers.remove_all("one")
    assert list(tmp_path.glob("one*")) == []
    assert same(held, template("one"))
    assert tiers.find("one") is None
    assert tiers.find("two") is not None


def test_a_file_is_checked_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TemplateStore(0, tmp_path, 10**6)
    tiers.put(template("one"))
    checks: list[bool] = []
    read = template_store.read_recording

    def watched(path: Path, recording_id: str, *, checked: bool = False) -> CachedTemplate:
        checks.append(checked)
        return read(path, recording_id, checked=checked)

    monkeypatch.setattr(template_store, "read_recording", watched)
    for _ in range(2):
        found = present(tiers.find("one"))
        assert same(found, template("one"))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert tiers.find("one") is None
    assert checks == [False, True, False]
    assert list(tmp_path.iterdir()) == []


def test_what_was_prefetched_is_in_memory_for_its_edit(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    told: list[LoadSample] = []
    tiers = TemplateStore(10**6, tmp_path, 10**6, told=told.append)
    assert tiers.size_of("none") is None
    assert (tiers.size_of("one") or 0) > template("one").size_bytes  # its file
    for name in ("one", "one", "none"):
        tiers.prefetch(name)
    assert tiers.size_of("one") == template("one").size_bytes
    assert tiers.find("one") is not None
    assert [(read.tier, read.size_bytes) for read in told] == [(Tier.DISK, template("one").size_bytes)]
    counted = tiers.counted()
    assert (counted.prefetched, counted.hits_memory, counted.hits_disk, counted.misses) == (1, 0, 1, 0)
    assert tiers.find("one") is not None
    assert tiers.counted().hits_memory == 1, "its second edit found it in memory"
    assert counted.memory_bytes == template("one").size_bytes
    assert counted.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) > 0


# Files of recordings: whole or not there, and nothing wrong is ever read.


@pytest.mark.parametrize("bits", BITS)
def test_a_file_gives_back_the_template(tmp_path: Path, bits: int) -> None:
    made = template("t", bits)
    template_store.write_recording(made, tmp_path / "f")
    assert (tmp_path / "f").stat().st_size >= made.size_bytes
    assert same(template_store.read_recording(tmp_path / "f", "t"), made)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_no_changed_byte_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    template_store.write_recording(template("t", tokens=2), path)
    whole = path.read_bytes()
    for index in range(0, len(whole), 11):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 4]) + whole[index + 1 :])
        with pytest.raises(template_store.TemplateFileInvalid):
            template_store.read_recording(path, "t")
    for length in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(template_store.TemplateFileInvalid):
            template_store.read_recording(path, "t")
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(template_store.TemplateFileInvalid):
        template_store.read_recording(path, "t")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(template_store, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        template_store.write_recording(template("one"), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


# Templates in pinned memory, of which torch gives blocks of powers of two: they take little more than their
# bytes.


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pinned blocks that are made, in bytes as torch makes them."""
    made: list[int] = []

    def rounded(size_bytes: int) -> None:
        made.append(1 << (size_bytes - 1).bit_length())

    def empty(*shape: int, _of: Any = torch.empty, pin_memory: bool = False, **how: Any) -> Tensor:
        found: Tensor = _of(*shape, **how)
        if pin_memory:
            rounded(found.nbytes)
        return found

    def pin_memory(self: Tensor) -> Tensor:
        rounded(self.nbytes)
        return self.clone()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return made


@pytest.mark.parametrize(("bits", "tokens"), [*zip(BITS, (1, 33, 70), strict=True)])
def test_an_entry_in_pinned_memory_is_the_same_and_takes_a_tenth_more_at_most(
    blocks: list[int], bits: int, tokens: int
) -> None:
    def kept(seed: int) -> CachedBlock:
        made = torch.Generator().manual_seed(seed)
        return CachedBlock(*(store(torch.randn(tokens, 1024, generator=made), bits) for _ in range(2)))

    recording = CachedTemplate("t", (1, 1), (Entry(0.5, tuple(map(kept, range(24)))),))
    pinned = recording.pinned()
    before, after = ([*each.entries[0].blocks] for each in (recording, pinned))
    for one, other in zip(before, after, strict=True):
        for part, twin in zip(one.parts, other.parts, strict=True):
            for tensor, copy in zip(part.tensors, twin.tensors, strict=True):
                assert torch.equal(tensor, copy)
                assert copy.data_ptr() % 16 == 0
                assert copy.is_contiguous()
    assert pinned.size_bytes == recording.size_bytes
    assert sum(blocks) <= 1.1 * recording.size_bytes


# What a template is called, and when a run is worth it.


SPEC = BlockSpec(
    heads=4,
    parts=dict.fromkeys(("key", "value", "hidden"), 192),
    linear=12.0 * 192**2,
    outside=2.0 * 192**2,
    pair=2.0 * 192,
)
CHECKPOINT: Any = SimpleNamespace(
    card=CARD,
    family=SimpleNamespace(
        schedule=FlowMatching(
            FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config, shifted_by_size
        ),
        specs=(SPEC,) * 6,
        depth=6,
        dtype=torch.bfloat16,
        network=SimpleNamespace(companions=lambda *_: 0, blends=True),
    ),
)

TOKENS = ((2 << 20) - 2 * 4 * 192 - FILE_BYTES) // 96
LARGE = INSPECTION.model_copy(update={"tokens": TOKENS})
"""Keys and values of a block and level are 4 MiB in 4 bits."""


def config(**options: Any) -> DenoiserConfig:
    return configured(DenoiserConfig, model="tiny", **options)


def of(tenant: str = "alice", parameters: EditParameters | None = None, **options: Any) -> TemplateRunSpec:
    return wanted_recording(config(**options), CHECKPOINT, tenant, INSPECTION, parameters)


def test_a_registration_and_an_edit_of_it_want_the_same() -> None:
    edit = EditParameters(prompt="x", reuse=Reuse.AUTO, num_inference_steps=3, strength=0.5)
    assert of().recording_id == of(parameters=edit).recording_id
    assert of(parameters=edit).tolerance == ANYWHERE


def test_what_a_recording_follows_from_is_in_its_name() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=3, strength=1.0)
    names = {
        of().recording_id,
        of("bob").recording_id,
        of(template_bits=8).recording_id,
        of(template_form="hidden").recording_id,
        of(template_levels=3).recording_id,
        of(parameters=strict).recording_id,
    }
    assert len(names) == 5, "three levels over all of the noise are those of three steps"
    assert of(parameters=strict).tolerance == SAME


def test_networks_whose_blocks_are_taken_together_record_more_levels() -> None:
    of_unet: Any = SimpleNamespace(specs=(SPEC.model_copy(update={"together": True}),))
    default, few = config(), config(template_levels=3)
    assert [levels_of(default, CHECKPOINT.family), levels_of(default, of_unet)] == [LEVELS, LEVELS_TOGETHER]
    assert [levels_of(few, CHECKPOINT.family), levels_of(few, of_unet)] == [3, 3]


def test_all_recordings_of_a_picture_begin_alike_and_those_of_others_do_not() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=3, strength=1.0)
    mine = picture_id("alice", INSPECTION.template_key)
    assert of().recording_id.startswith(mine)
    assert of(parameters=strict).recording_id.startswith(mine)
    assert not of("bob").recording_id.startswith(mine)


def test_a_budget_of_bytes_drops_noise_levels_and_then_blocks() -> None:
    kept = {
        budget: wanted_recording(
            config(template_levels=7, template_memory_mb=budget), CHECKPOINT, "alice", LARGE
        )
        for budget in (7 * 6 * 4, 7 * 6 * 4 - 1, 4 * 6 * 4, 4 * 3 * 4, 1)
    }
    assert [(found.track.steps, found.first_block) for found in kept.values()] == [
        (7, 0),
        (6, 0),
        (4, 0),
        (4, 3),
        (4, 6),
    ]
    assert len({found.recording_id for found in kept.values()}) == 5


def test_a_template_is_no_larger_than_the_largest_tier() -> None:
    def kept(parameters: EditParameters | None = None, **options: Any) -> tuple[int, int]:
        found = wanted_recording(config(template_levels=7, **options), CHECKPOINT, "alice", LARGE, parameters)
        return found.track.steps, found.first_block

    whole = 7 * 6 * 4
    assert kept(template_memory_mb=whole) == (7, 0)
    assert kept(template_memory_mb=4 * 6 * 4) == (4, 0)
    assert kept(template_memory_mb=4 * 6 * 4, cache_disk_mb=whole) == (4, 0), "there is no folder"
    assert kept(template_memory_mb=1, template_folder=Path("x"), cache_disk_mb=whole) == (7, 0)
    assert kept(template_memory_mb=0) == (4, 6)


def test_an_edit_that_is_strict_keeps_its_levels_and_drops_blocks() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=12, strength=1.0)
    found = wanted_recording(config(template_memory_mb=12 * 2 * 4), CHECKPOINT, "alice", LARGE, strict)
    assert (found.track.steps, found.first_block) == (12, 4)
    short = strict.model_copy(update={"strength": 0.5})
    found = wanted_recording(config(template_memory_mb=12 * 2 * 4), CHECKPOINT, "alice", LARGE, short)
    assert (found.track.steps, found.first_block) == (6, 2)


def test_one_recording_serves_every_sampler_and_a_strict_edit_has_its_own_samplers_levels() -> None:
    schedule = DiscreteTime({"_class_name": "LCMScheduler", "beta_schedule": "scaled_linear"})
    family = SimpleNamespace(**{**vars(CHECKPOINT.family), "schedule": schedule})
    timed: Any = SimpleNamespace(card=CARD, family=family)

    def found(**fields: Any) -> TemplateRunSpec:
        asked = EditParameters(prompt="x", num_inference_steps=8, strength=1.0, **fields)
        return wanted_recording(config(template_levels=7), timed, "alice", INSPECTION, asked)

    reused = [found(sampler=sampler) for sampler in (None, Sampler.HEUN, Sampler.EULER_ANCESTRAL)]
    assert len({each.recording_id for each in reused}) == 1
    assert (reused[0].track.steps, any(reused[0].track.draws)) == (7, False)
    strict = found(sampler=Sampler.HEUN, reuse=Reuse.STRICT)
    assert strict.track.steps == 15
    assert found(reuse=Reuse.STRICT).track.draws[0], "the checkpoint's own sampler draws"


@pytest.mark.parametrize(
    ("form", "bits", "blends"),
    [*zip([*CacheForm] * 2, (0, 4, 8, 4), (True, False, False, True), strict=False)],
)
def test_a_recording_is_as_large_as_was_reckoned_with_its_file(
    tmp_path: Path, form: CacheForm, bits: int, *, blends: bool
) -> None:
    """Where a network does not blend, with the pictures in the run's latents."""
    inspection = INSPECTION.model_copy(update={"tokens": 64})
    network = SimpleNamespace(companions=lambda *_: 0, blends=blends, conditioning={"image_latents": 64})
    family = SimpleNamespace(**{**vars(CHECKPOINT.family), "network": network})
    checkpoint: Any = SimpleNamespace(card=CARD, family=family)
    options: dict[str, Any] = {"template_form": form, "template_bits": bits, "template_levels": 200}
    found = wanted_recording(config(template_memory_mb=1, **options), checkpoint, "alice", inspection)
    data = torch.zeros(64, 192, dtype=torch.bfloat16)

    def kept() -> CachedBlock:
        if form is CacheForm.KV:
            return CachedBlock(key=store(data, bits), value=store(data, bits))
        return CachedBlock(hidden=store(data, bits))

    def blocks() -> tuple[CachedBlock, ...]:
        first, *others = *[CachedBlock()] * found.first_block, *(kept() for _ in range(6 - found.first_block))
        picture = store(torch.zeros(64, 64, dtype=torch.bfloat16), EXACT)
        return first if blends else replace(first, picture=picture), *others

    entries = tuple(Entry(level, blocks()) for level in found.track.levels[:-1].tolist())
    template_store.write_recording(CachedTemplate(found.recording_id, (8, 8), entries), tmp_path / "f")
    assert 0.7 * (1 << 20) < (tmp_path / "f").stat().st_size <= 1 << 20


@pytest.mark.parametrize("edits", [1, 2])
def test_a_registered_template_is_worth_a_run_at_first_sight(edits: int) -> None:
    admission = TemplateRunPolicy(edits)
    assert admission.see("a", registered=True)
    assert [admission.see("b") for _ in range(2)] == [edits == 1, True]


def test_a_picture_that_an_earlier_edit_serves_is_recorded_later() -> None:
    admission = TemplateRunPolicy()
    assert [admission.see("a", served=number > 0) for number in range(4)] == [False, False, False, True]
    assert admission.see("b", registered=True, served=True)
    assert [admission.see("c", served=served) for served in (False, False)] == [False, True]


@pytest.mark.parametrize("default", [Sampler.PNDM, Sampler.DDIM])
def test_a_unet_takes_by_samplers_that_keep_the_picture_alone(default: Sampler) -> None:
    unet: Any = SimpleNamespace(
        specs=(SPEC.model_copy(update={"together": True}),), schedule=SimpleNamespace(default_sampler=default)
    )

    def asked(**parameters: Any) -> bool:
        return takes_from_recordings(EditParameters.model_validate({"prompt": "x", **parameters}), unet)

    assert asked(reuse=Reuse.AUTO) is (default is Sampler.DDIM)
    assert asked(reuse=Reuse.AUTO, sampler=Sampler.UNIPC)
    assert not asked(reuse=Reuse.AUTO, sampler=Sampler.EULER_ANCESTRAL)
    assert asked(reuse=Reuse.STRICT, sampler=Sampler.EULER_ANCESTRAL)
    assert not asked(reuse=Reuse.OFF, sampler=Sampler.DDIM)
