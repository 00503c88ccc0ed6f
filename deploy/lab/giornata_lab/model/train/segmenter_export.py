"""Last stage of sinopia: the checkpoint as transformers loads it, in float16, and its card."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from giornata_lab.model.adapters.card import sha256_of
from giornata_lab.model.segmenter import architecture
from giornata_lab.model.segmenter.card import WEIGHTS, SegmenterCard
from giornata_lab.model.train.export import ended
from giornata_lab.model.train.segmenter import TITLE, SegmenterTrainingModel

COMMAND: Final = "python -m giornata_lab.model.train --model sinopia all"


def sinopia(folder: Path, target: Path) -> None:
    """Write the weights in `folder` as a CLIPSeg checkpoint with its processor into `target`.

    Raises:
        Unusable: it was not trained, or stopped on its way.
    """
    trained = ended(folder, TITLE)
    lesson = SegmenterTrainingModel()
    lesson.load_state_dict(trained["weights"])
    lesson.model.half().save_pretrained(target)
    architecture.processor().save_pretrained(target)
    weights = target / WEIGHTS
    weights.chmod(0o644)  # safetensors writes for the owner alone; services run as others
    SegmenterCard(
        name="sinopia",
        command=COMMAND,
        seed=trained["seed"],
        steps=trained["steps"],
        sha256=sha256_of(weights),
        size_bytes=weights.stat().st_size,
    ).write(target)
