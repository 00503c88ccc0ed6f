"""The files of a checkpoint's folder that hold the loaded weights, of several variants. Free of torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

VARIANTS: Final = (None, "fp16", "bf16", "fp32")
"""Variants of weights that are loaded, the best first; None: `model.safetensors`, not `model.fp16.safetensors`."""
SHARD: Final = r"(?:-\d{5}-of-\d{5})?"
WEIGHTS: Final = re.compile(rf"(?:diffusion_pytorch_)?model{SHARD}(?:\.([^.]+?){SHARD})?\.safetensors")


def chosen_weights(paths: Iterable[str]) -> frozenset[str]:
    """Those of the `paths` to safetensors that are loaded: of each folder one variant. Files of other names stay."""
    paths, best = frozenset(paths), defaultdict[PurePosixPath, set[str | None]](set)
    found = {path: match[1] for path in paths if (match := WEIGHTS.fullmatch(PurePosixPath(path).name))}
    for path, variant in found.items():
        best[PurePosixPath(path).parent].add(variant)
    return paths - {
        path for path, variant in found.items() if variant != _best(best[PurePosixPath(path).parent])
    }


def variant_of(folder: Path) -> str | None:
    """The variant that is loaded of the weights in a component's `folder`.

    Raises:
        ValueError: it has none that is loaded.
    """
    names = (WEIGHTS.fullmatch(path.name) for path in folder.glob("*.safetensors"))
    found = {match[1] for match in names if match}
    if (best := _best(found)) not in VARIANTS:
        raise ValueError(
            f"{folder} holds weights of the variant {best} alone; accepted: weights without a variant's name, or of "
            + ", ".join(filter(None, VARIANTS))
        )
    return best


def pipeline_variant(folder: Path, left_out: Collection[str] = ()) -> str | None:
    """The variant of a folder's components but those `left_out`; some may have none. Raises as :func:`variant_of`."""
    parts = (path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in left_out)
    return next((variant for part in parts if (variant := variant_of(part)) is not None), None)


def unloadable(config: Mapping[str, Any]) -> str | None:
    """Return why a component with this ``config.json`` is not loaded, as the end of a sentence; None where it is."""
    if not (told := config.get("quantization_config")):
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    return (
        f"was saved quantised; received: {method or 'an unknown method'}; accepted: weights in float32, float16, "
        "bfloat16 or float8, which GIORNATA_QUANTIZE can make smaller on a GPU"
    )


def _best(found: Collection[str | None]) -> str | None:
    return next((name for name in VARIANTS if name in found), min(filter(None, found), default=None))
