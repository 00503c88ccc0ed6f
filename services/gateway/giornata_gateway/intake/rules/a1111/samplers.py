"""A1111's names of samplers and schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from giornata.wire.errors import InvalidField
from giornata.wire.models import ModelCard
from giornata.wire.samplers import WITH_LIGHTNING, Sampler

AUTOMATIC: Final = "automatic"
KARRAS: Final = "karras"
UNIFORM: Final = "uniform"


class A1111SamplerName(NamedTuple):
    """How A1111 names a sampler, and the noise levels that it takes."""

    name: str
    scheduler: str
    automatic: bool = True
    """Whether the scheduler `automatic` stands for these noise levels: Karras' where there are several, as in A1111."""


NAMES: Final[Mapping[Sampler, A1111SamplerName]] = MappingProxyType(
    {
        Sampler.EULER: A1111SamplerName("Euler", UNIFORM),
        Sampler.EULER_ANCESTRAL: A1111SamplerName("Euler a", UNIFORM),
        Sampler.DDIM: A1111SamplerName("DDIM", UNIFORM),
        Sampler.DDPM: A1111SamplerName("DDPM", UNIFORM),
        Sampler.PNDM: A1111SamplerName("PLMS", UNIFORM),
        Sampler.DPMPP_2M: A1111SamplerName("DPM++ 2M", UNIFORM, automatic=False),
        Sampler.DPMPP_2M_KARRAS: A1111SamplerName("DPM++ 2M", KARRAS),
        Sampler.DPMPP_2M_SDE: A1111SamplerName("DPM++ 2M SDE", UNIFORM, automatic=False),
        Sampler.DPMPP_2M_SDE_KARRAS: A1111SamplerName("DPM++ 2M SDE", KARRAS),
        Sampler.DPMPP_3M: A1111SamplerName("DPM++ 3M", UNIFORM, automatic=False),
        Sampler.DPMPP_3M_KARRAS: A1111SamplerName("DPM++ 3M", KARRAS),
        Sampler.UNIPC: A1111SamplerName("UniPC", UNIFORM),
        Sampler.DEIS: A1111SamplerName("DEIS", UNIFORM),
        Sampler.HEUN: A1111SamplerName("Heun", UNIFORM),
        Sampler.LCM: A1111SamplerName("LCM", UNIFORM),
        Sampler.EULER_LIGHTNING: A1111SamplerName("Euler", "lightning", automatic=False),
    }
)
NORMAL, SIMPLE = "normal", "simple"
"""Two names of the levels `uniform`: `normal`, and of models that predict a velocity `simple`, which Forge sends."""
DEFAULTS: Final = frozenset({"euler", "euler a", "ddim"})
"""What clients send whose user chose nothing: a model that does not take it computes by its own sampler."""
_BY_NAME: Final = {
    (named.name.lower(), scheduler): sampler
    for sampler, named in NAMES.items()
    for scheduler in (named.scheduler, *([AUTOMATIC] if named.automatic else []))
}


def sampler_of(name: str | None, scheduler: str | None, card: ModelCard) -> Sampler | None:
    """The sampler of a request for the model `card`; None: the model's own.

    InvalidField where the model does not take the two together.
    """
    wanted, levels = (name or "").strip().lower(), (scheduler or AUTOMATIC).strip().lower()
    if wanted.endswith(f" {KARRAS}"):  # as A1111 named them before it had schedulers
        wanted, levels = wanted.removesuffix(f" {KARRAS}"), KARRAS
    flows = set(card.samplers) <= set(WITH_LIGHTNING)
    if levels == NORMAL or (flows and levels == SIMPLE):
        levels = UNIFORM
    if not wanted:
        if levels == AUTOMATIC:
            return None
        wanted = NAMES[Sampler(card.default_sampler)].name.lower()
    if name is not None and wanted in card.samplers and levels == AUTOMATIC:
        return Sampler(wanted)
    sampler = _BY_NAME.get((wanted, levels))
    if sampler in card.samplers:
        return sampler
    if wanted in DEFAULTS and (levels == AUTOMATIC or (flows and levels == UNIFORM)):
        return None
    raise InvalidField(
        f"The model {card.name} ({card.family}) does not take this sampler with this scheduler.",
        field="sampler_name",
        received=f"{name or 'none'} with the scheduler {scheduler or AUTOMATIC}",
        accepted=", ".join(f"{told.name} with {told.scheduler}" for told in taken(card)),
    )


def taken(card: ModelCard) -> list[A1111SamplerName]:
    """A1111's names of what a model takes."""
    return [NAMES[Sampler(sampler)] for sampler in card.samplers]
