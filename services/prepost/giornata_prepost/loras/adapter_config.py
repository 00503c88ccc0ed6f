"""PEFT's configuration in a LoRA's metadata: typed, and without its regular expressions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StringConstraints, ValidationError

from giornata.wire.errors import LoraNotSupported

METADATA: Final = "lora_adapter_metadata"
"""Where diffusers' savers write PEFT's configuration, as JSON, in a file's metadata."""
ACCEPTED: Final = "PEFT's fields: lora_alpha a number, alpha_pattern an object of numbers by names of modules"
_PATTERN: Final = r"^\^?[A-Za-z0-9_.-]{1,512}\$?$"
_MOST: Final = 65536.0

Alpha = Annotated[StrictFloat, Field(ge=-_MOST, le=_MOST, allow_inf_nan=False)]
ModulePattern = Annotated[str, StringConstraints(pattern=_PATTERN)]


class AdapterConfig(BaseModel):
    """The fields that count of one part's configuration.

    PEFT reads the keys of `alpha_pattern` as regular expressions of module names. A file comes from a stranger, and
    such an expression may take for ever, so a key is taken as it stands: the name of a module or the end of it, after
    a dot. That is what trainers and diffusers write; `^` before it asks for the whole name.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_alpha: Alpha | None = None
    alpha_pattern: Annotated[dict[ModulePattern, Alpha], Field(max_length=4096)] | None = None
    use_rslora: StrictBool | None = False

    def alpha(self, module: str, rank: int) -> float:
        """What the configuration says of a module; without a word, the rank, as diffusers and PEFT have it."""
        if self.lora_alpha is None:
            return float(rank)
        ends = {module[at:] for at in (0, *(dot.end() for dot in re.finditer(r"\.", module)))} | {
            f"^{module}"
        }
        alpha = next(
            (alpha for name, alpha in (self.alpha_pattern or {}).items() if name.removesuffix("$") in ends),
            self.lora_alpha,
        )
        return alpha * (math.sqrt(rank) if self.use_rslora else 1.0)


def read_configs(metadata: Mapping[str, str], parts: tuple[str, ...]) -> dict[str, AdapterConfig]:
    """The configuration of each of `parts`, whose names stand before the fields' with a dot.

    Raises:
        LoraNotSupported: it is no such configuration, or one of a kind of LoRA that is not supported.
    """
    try:
        told = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise LoraNotSupported(
            f"The metadata {METADATA} is not JSON.", received=error, accepted=ACCEPTED
        ) from error
    if not isinstance(told, dict):
        raise LoraNotSupported(
            f"The metadata {METADATA} is no object.", received=type(told).__name__, accepted=ACCEPTED
        )
    for name, value in told.items():
        if value and name.endswith(("use_dora", "lora_bias")):
            raise LoraNotSupported("This kind of LoRA is not supported.", received=f"{name}: {value}")
    return {part: _config(told, f"{part}.") for part in parts}


def _config(told: Mapping[str, object], prefix: str) -> AdapterConfig:
    own = {name.removeprefix(prefix): value for name, value in told.items() if name.startswith(prefix)}
    try:
        return AdapterConfig.model_validate(own)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(one) for one in first["loc"] if one != "[key]")
        raise LoraNotSupported(
            f"The metadata {METADATA} has a field that is not accepted: {first['msg']}.",
            received=f"{prefix}{field}: {first['input']!r}",
            accepted=ACCEPTED,
        ) from error
