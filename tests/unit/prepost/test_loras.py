"""LoRAs' text parts on disk, and the configuration in a stranger's file."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from giornata import lora_files
from giornata.bus.bus import Bus
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import (
    GiornataError,
    LoraMismatch,
    LoraNotFound,
    LoraNotSupported,
    LoraTooLarge,
    LoraUnreadable,
    ServiceUnavailable,
)
from giornata.wire.loras import FileChunk, ReadFile
from giornata_prepost.loras.canonical import FETCHES, SUFFIX, TextLoraCache, write_canonical
from giornata_prepost.loras.source import METADATA, AdapterConfig, read_configs
from tests.patience import HUNG_S

FILE_BYTES = 1 << 22


class Store:
    """Answers as LoRA stores do."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.begun: list[str] = []
        self.fetching = self.most = 0
        self.away = False
        self.gate: asyncio.Event | None = None
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    async def call(self, _subject: str, request: ReadFile, *_: Any, **__: Any) -> FileChunk:
        if self.away:
            raise ServiceUnavailable
        if request.sha256 not in self.files:
            raise LoraNotFound(received=request.sha256)
        if request.offset == 0:
            self.begun.append(request.sha256)
            self.heard.put_nowait(request.sha256)
            self.fetching += 1
            self.most = max(self.most, self.fetching)
            if self.gate is not None:
                await self.gate.wait()
        end = request.offset + request.size_bytes
        data = self.files[request.sha256]
        self.fetching -= end >= len(data)
        return FileChunk(data=data[request.offset : end])


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def parts(store: Store, tmp_path: Path) -> TextLoraCache:
    return made(store, tmp_path, 1 << 20)


def made(store: Store, tmp_path: Path, kept_bytes: int) -> TextLoraCache:
    folder = tmp_path / "texts"
    folder.mkdir()
    return TextLoraCache(cast("Bus", store), folder, file_bytes=FILE_BYTES, kept_bytes=kept_bytes)


def lora(store: Store, tmp_path: Path, seed: int = 0, *, text: bool = True, scale: float = 0.5) -> LoraUse:
    """A canonical file in the store, whose text part has the value `seed`."""
    tensors = {"block.down": torch.zeros(4, 4096), "block.up": torch.full((4096, 4), float(seed))}
    if text:
        tensors |= {
            "text_encoder.a.b.down": torch.ones(2, 3),
            "text_encoder.a.b.up": torch.full((3, 2), seed * 1.0),
        }
    path = tmp_path / f"lora-{seed}"
    write_canonical(path, tensors, {"text_encoders": "text_encoder" if text else ""})
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    store.files[sha256] = data
    return LoraUse(
        lora_id=f"lora_{seed:032x}", sha256=sha256, size_bytes=len(data), rank=4, modules=1, text_modules=1,
        scale=scale,
    )  # fmt: skip


def kept(tmp_path: Path) -> set[str]:
    return {path.name.removesuffix(SUFFIX) for path in (tmp_path / "texts").iterdir()}


async def test_a_text_part_is_fetched_once_and_kept_without_the_rest(
    store: Store, parts: TextLoraCache, tmp_path: Path
) -> None:
    use = lora(store, tmp_path, 3)
    for _ in range(2):
        (found,) = await parts.of([use])
        assert found.scale == use.scale
        factors = found.encoders["text_encoder"]["a.b"]
        assert torch.equal(factors.down, torch.ones(2, 3))
        assert torch.equal(factors.up, torch.full((3, 2), 3.0))
    assert store.begun == [use.sha256]
    assert kept(tmp_path) == {use.sha256}
    assert (tmp_path / "texts" / f"{use.sha256}{SUFFIX}").stat().st_size < 1024 < len(store.files[use.sha256])


async def test_jobs_at_the_same_time_share_one_fetch(
    store: Store, parts: TextLoraCache, tmp_path: Path
) -> None:
    use, store.gate = lora(store, tmp_path, 1), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(parts.of([use]))
        await asyncio.wait_for(store.heard.get(), HUNG_S)
        store.gate.set()
    assert store.begun == [use.sha256]


async def test_a_fetch_that_is_given_up_is_begun_again_by_who_waits(
    store: Store, parts: TextLoraCache, tmp_path: Path
) -> None:
    use, store.gate = lora(store, tmp_path, 1), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(parts.of([use]))
        await asyncio.wait_for(store.heard.get(), HUNG_S)
        second = tasks.create_task(parts.of([use]))
        first.cancel()
        store.gate.set()
    assert len(second.result()) == 1
    assert store.begun == [use.sha256, use.sha256]
    assert kept(tmp_path) == {use.sha256}


async def test_few_files_are_fetched_at_the_same_time(
    store: Store, parts: TextLoraCache, tmp_path: Path
) -> None:
    uses, store.gate = [lora(store, tmp_path, seed) for seed in range(6)], asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for use in uses:
            tasks.create_task(parts.of([use]))
        for _ in range(FETCHES):
            await asyncio.wait_for(store.heard.get(), HUNG_S)
        store.gate.set()
    assert store.most == FETCHES
    assert len(store.begun) == 6


async def test_one_that_is_larger_than_all_may_be_acts_and_is_not_kept(store: Store, tmp_path: Path) -> None:
    parts, use = made(store, tmp_path, 0), lora(store, tmp_path, 2)
    assert len(await parts.of([use, use])) == 2
    assert kept(tmp_path) == set()


async def test_what_does_not_change_the_text_is_not_fetched(
    store: Store, parts: TextLoraCache, tmp_path: Path
) -> None:
    use = lora(store, tmp_path, 2, scale=0.0)
    assert await parts.of([use, use.model_copy(update={"scale": 1.0, "text_modules": 0})]) == ()
    assert store.begun == []


@pytest.mark.parametrize("kind", ["unknown", "damaged", "too large", "no text part", "away"])
async def test_a_text_part_is_never_dropped_silently(
    kind: str, store: Store, parts: TextLoraCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_files, "RESTART_S", 0.0)
    use = lora(store, tmp_path, 4, text=kind != "no text part")
    expected: type[GiornataError] = LoraNotFound
    if kind == "unknown":
        store.files.clear()
    elif kind == "damaged":
        data = bytearray(store.files[use.sha256])
        data[-1] ^= 1
        store.files[use.sha256], expected = bytes(data), LoraUnreadable
    elif kind == "too large":
        use, expected = use.model_copy(update={"size_bytes": FILE_BYTES + 1}), LoraTooLarge
    elif kind == "away":
        store.away, expected = True, ServiceUnavailable
    else:
        expected = LoraMismatch
    with pytest.raises(expected):
        await parts.of([use])
    assert kept(tmp_path) == set()


# PEFT's configuration in a stranger's file: its fields are typed, and its patterns are no programs.


MODULE = "blocks.0.attn.to_q"


def config(**fields: Any) -> AdapterConfig:
    metadata = {METADATA: json.dumps({f"transformer.{name}": value for name, value in fields.items()})}
    return read_configs(metadata, ("transformer", "text_encoder"))["transformer"]


@pytest.mark.parametrize(
    ("pattern", "alpha"),
    [
        ("to_q", 2.0),
        ("attn.to_q", 2.0),
        (MODULE, 2.0),
        (f"^{MODULE}", 2.0),
        (f"^{MODULE}$", 2.0),
        ("^to_q", 16.0),
        ("o_q", 16.0),
        ("blocks.0.attn.to_", 16.0),
    ],
)
def test_a_pattern_is_the_end_of_a_modules_name(pattern: str, alpha: float) -> None:
    assert config(lora_alpha=16, alpha_pattern={pattern: 2}).alpha(MODULE, 4) == alpha


def test_names_of_z_images_layers_have_hyphens() -> None:
    assert config(lora_alpha=1, alpha_pattern={"all_x_embedder.2-1": 3}).alpha("all_x_embedder.2-1", 4) == 3.0


def test_the_first_pattern_counts() -> None:
    assert config(lora_alpha=1, alpha_pattern={"to_k": 5, "to_q": 3, MODULE: 2}).alpha(MODULE, 4) == 3.0


def test_without_an_alpha_it_is_the_rank_and_rslora_scales_by_its_root() -> None:
    assert config().alpha(MODULE, 4) == 4.0
    assert read_configs({}, ("unet",)) == {"unet": AdapterConfig()}
    assert config(lora_alpha=8, use_rslora=True, r=4, target_modules=["to_q"]).alpha(MODULE, 4) == 16.0


@pytest.mark.parametrize(
    ("fields", "received"),
    [
        ({"lora_alpha": "abc"}, "transformer.lora_alpha: 'abc'"),
        ({"lora_alpha": [1]}, "transformer.lora_alpha: [1]"),
        ({"lora_alpha": True}, "transformer.lora_alpha: True"),
        ({"lora_alpha": float("nan")}, "transformer.lora_alpha: nan"),
        ({"lora_alpha": 1e300}, "transformer.lora_alpha: 1e+300"),
        ({"lora_alpha": 1, "alpha_pattern": ["to_q"]}, "transformer.alpha_pattern: ['to_q']"),
        ({"lora_alpha": 1, "alpha_pattern": {"to_q": "x"}}, "transformer.alpha_pattern.to_q: 'x'"),
        ({"lora_alpha": 1, "alpha_pattern": {"(": 1}}, "transformer.alpha_pattern.(: '('"),
        (
            {"lora_alpha": 1, "alpha_pattern": {"([a-z_0-9.]+)+!": 1}},
            "transformer.alpha_pattern.([a-z_0-9.]+)+!",
        ),
        ({"use_rslora": "yes"}, "transformer.use_rslora: 'yes'"),
        ({"use_dora": True}, "transformer.use_dora: True"),
    ],
)
def test_what_is_not_accepted_is_told(fields: dict[str, Any], received: str) -> None:
    with pytest.raises(LoraNotSupported) as refused:
        config(**fields)
    assert (refused.value.received or "").startswith(received)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "1", '{"transformer.lora_alpha": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_a_text_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(LoraNotSupported):
        read_configs({METADATA: text}, ("transformer",))


def test_thousands_of_patterns_cost_nothing() -> None:
    patterns = {f"m{number}": number for number in range(4096)}
    many = config(lora_alpha=1, alpha_pattern=patterns)
    assert [many.alpha(f"blocks.{number}.m{number}", 4) for number in range(0, 4096, 8)] == [
        *range(0, 4096, 8)
    ]
    with pytest.raises(LoraNotSupported, match="4096"):
        config(lora_alpha=1, alpha_pattern={f"m{number}": number for number in range(5000)})
