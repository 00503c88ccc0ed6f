"""CLIPSeg (Lüddecke and Ecker, CVPR 2022): a heat map of everything that words name, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import AutoProcessor, CLIPSegForImageSegmentation

from giornata.wire.masks import MaskCard
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.regions import HeatMap, Wanted
from giornata_prepost.words.segmenter import checked

KIND: Final = "clipseg"
"""Its `model_type`."""
THRESHOLD: Final = 0.5
"""More likely than not: it is trained by the cross-entropy of each pixel."""


class ClipSeg:
    """See :class:`giornata_prepost.words.segmenter.Segmenter`. Float32 everywhere: it is small."""

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        self.card = MaskCard(name=name, threshold=THRESHOLD)
        self._processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        network = CLIPSegForImageSegmentation.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        self._network, self._device = network.to(device).eval(), device

    @torch.no_grad()
    def seen(self, picture: Pixels, words: str, wanted: Wanted) -> HeatMap:  # noqa: ARG002 - the map has all of them
        """The map, of the network's own size: (352, 352) of published ones."""
        text = self._network.config.text_config
        words = checked(words, self._processor.tokenizer, text.max_position_embeddings)
        inputs = self._processor(text=[words], images=[picture], return_tensors="pt").to(self._device)
        logits = self._network(**inputs).logits
        heat = torch.sigmoid(logits.reshape(logits.shape[-2:])).float().cpu().numpy()
        return HeatMap(np.ascontiguousarray(heat))
