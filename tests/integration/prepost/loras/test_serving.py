"""A real LoRA store and a real prepost: from the uploaded file to the canonical one, in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.config import new_instance
from giornata.families import Family
from giornata.lora_files import fetch, read_pieces
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import LoraNotFound
from giornata.wire.jobs import BlobRef
from giornata.wire.loras import LoraRecord, LoraState, StoredFile
from giornata_prepost.checkpoint import open_model
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.protocol import Tensors
from giornata_prepost.images.geometry import Size
from giornata_prepost.loras.canonical import TextFactors, TextLora, act_text_loras, read_text_part
from tests.forked_processes import FORKS
from tests.integration.lora_bench import open_bench
from tests.integration.prepost.asking import MASK, SCENE, a_job, encoded, inspected, png, serving
from tests.integration.prepost.loras import oracle
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
