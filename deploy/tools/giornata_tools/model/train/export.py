"""Last stage: the checkpoint, in diffusers' layout and bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from diffusers import FluxFillPipeline

from giornata.model_cards import SERVING, ServingDefaults
from giornata_tools.model import architecture
from giornata_tools.model.painter import Painter
from giornata_tools.model.train import autoencoder, guidance, painter, stage
from giornata_tools.model.train.stage import Unusable

STEPS: Final = 20
"""What requests get that do not say; diffusers' 50 gain nothing on a flow this straight."""


def run(folder: Path, target: Path) -> None:
    """Write the averaged weights of the last stage in `folder` as a checkpoint into `target`.

    Raises:
        Unusable: no stage was trained, or the last one was stopped on its way.
    """
    titles = (guidance.GUIDANCE.title, painter.PAINTER.title)
    states = [state for title in titles if (state := stage.load(folder / f"{title}.pt"))]
    if not states:
        raise Unusable(f"{folder} holds the state of no stage of {' and '.join(titles)}: train first")
    if states[0]["step"] < states[0]["steps"]:
        raise Unusable(
            f"the last stage stopped at step {states[0]['step']} of {states[0]['steps']}: let it end"
        )
    text = architecture.text_encoders()
    trained = Painter(architecture.transformer(), text)
    trained.load_state_dict(states[0]["average"])
    pipeline = FluxFillPipeline(
        scheduler=architecture.scheduler(),
        vae=autoencoder.load(folder),
        text_encoder=text.clip,
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.t5,
        tokenizer_2=text.t5_tokenizer,
        transformer=trained.transformer,
    )
    pipeline.to(dtype=torch.bfloat16)
    pipeline.save_pretrained(target, safe_serialization=True)
    for weights in target.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes for the owner alone; services run as others
    defaults = ServingDefaults(steps=STEPS)
    (target / SERVING).write_text(defaults.model_dump_json(exclude_none=True) + "\n", encoding="utf-8")
