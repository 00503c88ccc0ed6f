"""A real LoRA store and a real prepost: from the uploaded file to the canonical one, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

from giornata.blobs import RedisBlobs
from giornata.config import new_instance
from giornata.families import Family
from giornata.lora_transfer import pieces
from giornata.wire.loras import LoraState
from giornata_prepost.checkpoint import open_model
from giornata_prepost.config import PrepostConfig
from tests.integration.lora_bench import open_bench
from tests.integration.prepost.asking import serving
from tests.integration.prepost.loras import oracle


async def test_a_store_and_a_prepost_make_a_canonical_file(
    nats_url: str, redis_url: str, tmp_path: Path, tiny_checkpoint: Callable[[Family], Path]
) -> None:
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
        found = [piece async for piece in pieces(bench.bus, ready.canonical.file, 1 << 30)]
        (tmp_path / "canonical").write_bytes(b"".join(found))
        wrong = torch.full((4, 8), torch.nan)
        name = "transformer.transformer_blocks.0.attn.to_q"
        bad = save({f"{name}.lora_A.weight": wrong, f"{name}.lora_B.weight": wrong.T.contiguous()})
        failed = await bench.settled(await bench.send(bad, "default"))
        assert failed.error is not None
        assert (failed.state, failed.error.code) == (LoraState.FAILED, "lora_not_finite")
    oracle.check_equal(tmp_path / "canonical", folder, source)
