"""A real LoRA store and a real prepost: from the uploaded file to the canonical one, and what text parts make."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.config import new_instance
from giornata.families import Family
from giornata.lora_files import fetch, read_pieces
from giornata.model_cards import read_model_card
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import LoraMismatch, LoraNotFound, LoraUnreadable
from giornata.wire.jobs import BlobRef
from giornata.wire.loras import LoraRecord, LoraState, StoredFile
from giornata_prepost.checkpoint import FAMILIES, open_model
from giornata_prepost.config import PrepostConfig
from giornata_prepost.encoding import TextFactors, TextLora, act_text_loras
from giornata_prepost.families.pipeline import Tensors
from giornata_prepost.images.pictures import Size
from giornata_prepost.loras.canonical import (
    read_text_part,
    write_canonical,
    write_text_part,
)
from giornata_prepost.loras.normalisation import normalise
from tests.forked_processes import FORKS
from tests.integration.lora_bench import open_bench
from tests.integration.prepost.asking import MASK, SCENE, a_job, encoded, inspected, png, serving
from tests.integration.prepost.loras import oracle
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, SIZE
from tests.present import present


async def test_a_store_and_a_prepost_make_a_canonical_file(
    nats_url: str,
    redis_url: str,
    tmp_path: Path,
    tiny_checkpoint: Callable[[Family], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multiprocessing.get_context", lambda _: FORKS)
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    config = PrepostConfig(
        nats_url=nats_url,
        blobs_url=redis_url,
        instance=new_instance("prepost"),
        model=str(folder),
        model_name=new_instance("lora-model"),
        telemetry_hz=20,
    )
    source = oracle.saved(folder, tmp_path)
    async with (
        open_bench(nats_url, tmp_path) as bench,
        RedisBlobs.open(redis_url) as blobs,
        serving(config, bench.bus, blobs, open_model(config)),
        bench.instance(),
    ):
        bench.model = config.served_name
        ready = await bench.settled(await bench.send(source.read_bytes(), "default"))
        assert ready.state is LoraState.READY, ready.error
        assert ready.canonical is not None
        assert ready.canonical.text_modules > 0
        found = [piece async for piece in read_pieces(bench.bus, ready.canonical.file, 1 << 30)]
        (tmp_path / "canonical").write_bytes(b"".join(found))
        wrong = torch.full((4, 8), torch.nan)
        name = "transformer.transformer_blocks.0.attn.to_q"
        bad = save({f"{name}.lora_A.weight": wrong, f"{name}.lora_B.weight": wrong.T.contiguous()})
        failed = await bench.settled(await bench.send(bad, "default"))
        assert (failed.state, present(failed.error).code) == (LoraState.FAILED, "lora_not_finite")
        await _check_text(bench.bus, blobs, config, ready)
    oracle.check_equal(tmp_path / "canonical", folder, source)


async def _check_text(bus: Bus, blobs: RedisBlobs, config: PrepostConfig, ready: LoraRecord) -> None:
    """The LoRA acts on its own job's prompts alone, by its scale; what the store does not have is an error."""
    made = present(ready.canonical)
    use = LoraUse(
        lora_id=ready.lora_id, sha256=made.file.sha256, size_bytes=made.file.size_bytes, rank=made.rank,
        modules=made.modules, text_modules=made.text_modules, scale=0.8,
    )  # fmt: skip
    model = open_model(config)
    job = await a_job(blobs, model.card, png(SCENE), png(MASK), reuse="auto")
    inspection = await inspected(bus, job)

    async def text(*loras: LoraUse) -> tuple[Tensors, BlobRef | None]:
        found = await encoded(bus, job.model_copy(update={"loras": loras}), inspection)
        return tensors.unpack(await blobs.get(found.text)), found.empty_text

    plain, under, after = await text(), await text(use), await text()
    assert under[1] == plain[1] == after[1], "the empty text of templates has no LoRA"
    size = Size(inspection.model_width, inspection.model_height)
    with act_text_loras(model, [TextLora(0.8, await _part(bus, made.file))]):
        expected = model.encode_text(job.parameters.prompt, size)
    for name, tensor in expected.items():
        torch.testing.assert_close(under[0][name], tensor, rtol=1e-5, atol=1e-5, msg=name)
        assert torch.equal(after[0][name], plain[0][name])
    assert not torch.allclose(under[0]["pooled_prompt_embeds"], plain[0]["pooled_prompt_embeds"], atol=1e-2)
    with pytest.raises(LoraNotFound):
        await text(use.model_copy(update={"sha256": "0" * 64}))


async def _part(bus: Bus, file: StoredFile) -> dict[str, dict[str, TextFactors]]:
    with tempfile.NamedTemporaryFile() as whole:
        await fetch(bus, file, Path(whole.name), 1 << 30)
        return read_text_part(Path(whole.name))


# Text parts of LoRAs: what they make of prompts is what diffusers makes of them, and nothing of them stays.


Checkpoint = Callable[[Family], Path]
SCALES = (0.7, -1.3)


@cache
def model_of(family: Family, folder: Path) -> Any:
    return FAMILIES[family](folder, read_model_card(folder), torch.device("cpu"), torch.float32)


def text_part(source: Path, folder: Path, target: Path) -> Any:
    """As prepost keeps it: from the source by the canonical file."""
    whole, part = target / "canonical", target / "part"
    made = normalise(source, whole, folder, {})
    assert write_text_part(whole, part) == made.text_modules > 0
    assert part.stat().st_size < whole.stat().st_size
    return read_text_part(part)


@pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config`:UserWarning"
)  # of the second LoRA in diffusers
@pytest.mark.parametrize("family", [Family.SDXL, Family.FLUX_INPAINT])
def test_two_loras_make_of_prompts_what_diffusers_makes(
    family: Family, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family)
    pipeline, model, loras = oracle.loaded(folder), model_of(family, folder), []
    plain = model.encode_text(PROMPT, SIZE) | model.encode_unguided(NEGATIVE, SIZE)
    folders = [tmp_path / str(index) for index in range(len(SCALES))]
    for index, own in enumerate(folders):
        own.mkdir()
        source = oracle.saved(folder, own, rank=4 + index, seed=index)
        loras.append(TextLora(SCALES[index], text_part(source, folder, own)))
    for index, own in enumerate(folders):
        pipeline.load_lora_weights(own, weight_name=oracle.FILE, adapter_name=f"lora_{index}")
    pipeline.set_adapters(["lora_0", "lora_1"], list(SCALES))
    model_under, model.pipeline = model.pipeline, pipeline  # the same code reads diffusers' adapted encoders
    expected = model.encode_text(PROMPT, SIZE) | model.encode_unguided(NEGATIVE, SIZE)
    model.pipeline = model_under
    pipeline.unload_lora_weights()
    with act_text_loras(model, loras):
        found = model.encode_text(PROMPT, SIZE) | model.encode_unguided(NEGATIVE, SIZE)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    changed = "pooled_prompt_embeds" if "pooled_prompt_embeds" in plain else "prompt_embeds"
    for name in (changed, f"negative_{changed}"):
        assert (found[name] - plain[name]).abs().max() > 0.1
    after = model.encode_text(PROMPT, SIZE) | model.encode_unguided(NEGATIVE, SIZE)
    assert all(torch.equal(after[name], plain[name]) for name in plain), "nothing of them stays"


@pytest.mark.parametrize(
    ("encoder", "path", "shapes", "said"),
    [
        ("text_encoder", "nowhere.fc1", ((4, 32), (32, 4)), "nowhere.fc1"),
        ("text_encoder_9", "fc1", ((4, 32), (32, 4)), "no text encoder"),
        ("text_encoder", "encoder.layers.0.mlp.fc1", ((4, 31), (64, 4)), r"\(4, 31\)"),
        ("text_encoder", "encoder.layers.0.mlp.fc1", ((4, 32), (64, 3)), r"\(64, 3\)"),
        ("text_encoder", "encoder.layers.0.layer_norm1", ((4, 32), (32, 4)), "layer_norm1"),
    ],
)
def test_what_the_model_does_not_have_is_refused_and_nothing_stays(
    encoder: str, path: str, shapes: Any, said: str, tiny_checkpoint: Checkpoint
) -> None:
    folder = tiny_checkpoint(Family.SD)
    model = model_of(Family.SD, folder)
    prefix = "text_model." if hasattr(model.pipeline.text_encoder, "text_model") else ""
    fits = TextFactors(torch.ones(4, 32), torch.ones(32, 4))
    wrong = TextFactors(*(torch.ones(shape) for shape in shapes))
    good = TextLora(1.0, {"text_encoder": {f"{prefix}encoder.layers.0.self_attn.q_proj": fits}})
    plain = model.encode_text(PROMPT, Size(64, 64))["prompt_embeds"]
    with (
        pytest.raises(LoraMismatch, match=said),
        act_text_loras(model, [good, TextLora(1.0, {encoder: {prefix + path: wrong}})]),
    ):
        pass
    assert torch.equal(model.encode_text(PROMPT, Size(64, 64))["prompt_embeds"], plain)


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    write_canonical(tmp_path / "other", {"x.down": torch.ones(1, 1)}, {"form": "another"})
    with pytest.raises(LoraUnreadable, match="another"):
        read_text_part(tmp_path / "other")
    (tmp_path / "cut").write_bytes((tmp_path / "other").read_bytes()[:-1])
    with pytest.raises(LoraUnreadable):
        read_text_part(tmp_path / "cut")
