"""The segmenter that ships with the trained model, and what tells prepost to make masks from words with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from giornata_tools.checkout import SEGMENTER
from giornata_tools.launcher.adapters import is_trained
from giornata_tools.launcher.model import StackModel

MASKS: Final = "GIORNATA_MASK_MODEL"
REFINER: Final = "GIORNATA_MASK_REFINER"


def shipped_masks(models: Sequence[StackModel], env: Mapping[str, str]) -> Mapping[str, str]:
    """Environment of prepost, for masks from words in the scenes of the trained model.

    It is empty where `env` says what makes masks, or by an empty `MASKS` that nothing does. It is empty, too, where one
    of `models` is not the trained one: its pictures would be searched by a segmenter that knows nothing of them.
    """
    said = MASKS in env or bool(env.get(REFINER))
    ours = SEGMENTER.is_dir() and all(map(is_trained, models))
    return {MASKS: str(SEGMENTER)} if ours and not said else {}
