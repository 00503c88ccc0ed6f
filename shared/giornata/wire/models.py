"""The model card: a served model, the blocks of its network, its samplers and step caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from pydantic import Field

from giornata.wire.values import BlockMode, WireModel

# The blocks of a network as data: what they compute, counted by kind of operation, and what a template
# keeps of them.
#
# Telemetry carries them, so that planner, store, router and simulator need no code for a family.


BORDER: Final = "border"
"""The part of a convolution: its input's cells at the borders of tokens, which their neighbours read."""
MOMENTS: Final = "moments"
"""The part of a group norm: mean and sum of squared differences of each token's groups; never quantised."""
PARTS: Final[Mapping[BlockMode, tuple[str, ...]]] = {
    BlockMode.FULL: (),
    BlockMode.HIDDEN: ("hidden",),
    BlockMode.KV: ("key", "value", BORDER, MOMENTS),
}
"""What a block in each mode takes from a recording, as far as a block of its kind has it."""
EXACT_BITS: Final = 32
"""Least bits of a value that is never quantised: it is kept as it was computed."""


class BlockSpec(WireModel):
    """A block, or `count` equal ones. What it counts is of one block and one sequence.

    Operations are multiplications; every one of them is followed by an addition.
    """

    grain: int = 1
    """Finest cells a side of one of its cells: 1 for every block of a transformer, whose cells are tokens."""
    heads: int = 0
    parts: dict[str, int] = Field(default_factory=dict)
    """Channels a cell of each part that a recording keeps; :data:`PARTS` names them."""
    linear: float = 0.0
    """In linear layers, for a computed cell."""
    text: float = 0.0
    """In linear layers, for a computed text token beside the picture's; 0 where text passes no such layer."""
    outside: float = 0.0
    """In linear layers, for a cell whose keys and values are projected, and nothing else."""
    pair: float = 0.0
    """In attention, for a query and a key of the picture."""
    text_pair: float = 0.0
    """In attention, for a query and a key one of which, or both, is a text token beside the picture's."""
    across: float = 0.0
    """In attention, for a computed cell over a text that passes no block: cross-attention."""
    convolution: float = 0.0
    """In convolutions, for a computed cell."""
    gathered: float = 0.0
    """Values, no operations, that a computed cell gathers from itself and its neighbours where it takes from a
    recording: the windows of convolutions over tiles."""
    count: int = 1
    together: bool = False
    """Whether all such blocks of a network take from a recording, or none: a UNet's, which know no outside cells."""

    def channels(self, modes: Iterable[BlockMode]) -> int:
        """Channels a cell of all that a recording for these modes keeps of one block."""
        return sum(self.parts.get(part, 0) for mode in modes for part in PARTS[mode])

    def cell_bits(self, modes: Iterable[BlockMode], bits: int) -> int:
        """Bits a cell of what :meth:`channels` counts, in so many `bits` a value; :data:`MOMENTS` stay exact."""
        kept = [part for mode in modes for part in PARTS[mode]]
        exact = max(bits, EXACT_BITS)
        return sum(self.parts.get(part, 0) * (exact if part == MOMENTS else bits) for part in kept)


class Sampler(StrEnum):
    """A solver of the way from noise to a picture; a scheduler of diffusers by `giornata.component_configs`."""

    EULER = "euler"
    EULER_ANCESTRAL = "euler_ancestral"
    DDIM = "ddim"
    DDPM = "ddpm"
    PNDM = "pndm"
    DPMPP_2M = "dpmpp_2m"
    DPMPP_2M_KARRAS = "dpmpp_2m_karras"
    DPMPP_2M_SDE = "dpmpp_2m_sde"
    DPMPP_2M_SDE_KARRAS = "dpmpp_2m_sde_karras"
    DPMPP_3M = "dpmpp_3m"
    DPMPP_3M_KARRAS = "dpmpp_3m_karras"
    UNIPC = "unipc"
    DEIS = "deis"
    HEUN = "heun"
    LCM = "lcm"
    EULER_LIGHTNING = "euler_lightning"
    """Euler's method on the noise levels that the Lightning LoRAs of Qwen-Image were distilled for."""

    @property
    def stochastic(self) -> bool:
        """Return whether its steps add noise, drawn from the generator of the row's seed."""
        return self in _STOCHASTIC

    @property
    def remembers(self) -> bool:
        """Return whether its steps follow from earlier ones, too: a latent alone is then no state to go on from."""
        return self not in _ONE_STEP


_STOCHASTIC: Final = frozenset(
    {
        Sampler.EULER_ANCESTRAL,
        Sampler.DDPM,
        Sampler.DPMPP_2M_SDE,
        Sampler.DPMPP_2M_SDE_KARRAS,
        Sampler.LCM,
    }
)
_ONE_STEP: Final = frozenset(
    {
        Sampler.EULER,
        Sampler.EULER_ANCESTRAL,
        Sampler.DDIM,
        Sampler.DDPM,
        Sampler.LCM,
        Sampler.EULER_LIGHTNING,
    }
)
FLOW_MATCHING: Final = (Sampler.EULER,)
"""Samplers of models that predict a velocity between noise and picture: Flux, SD3."""
WITH_LIGHTNING: Final = (*FLOW_MATCHING, Sampler.EULER_LIGHTNING)
"""Those of Qwen-Image and Qwen-Image-Edit."""
DISCRETE_TIME: Final = tuple(sampler for sampler in Sampler if sampler is not Sampler.EULER_LIGHTNING)
"""Samplers of models that are trained at a thousand discrete times: SD, SDXL."""


def evaluations(sampler: Sampler, steps: int, strength: float, *, keeps_whole_steps: bool) -> int:
    """Return how often the network is evaluated for a picture: `get_timesteps` of diffusers' inpainting pipelines.

    `strength` keeps the last ones of `steps`: ``int(steps * strength)`` of them with `keeps_whole_steps`, otherwise all
    but ``int(steps - steps * strength)``. Heun evaluates each but the last one twice, PNDM the second one.
    """
    if keeps_whole_steps:
        kept = min(int(steps * strength), steps)
    else:
        kept = steps - int(max(steps - min(steps * strength, steps), 0))
    if not kept:
        return 0
    if sampler is Sampler.HEUN:
        return 2 * kept - 1
    return kept + (sampler is Sampler.PNDM and steps > 1)


MAX_INTERVAL: Final = 20
MAX_ORDER: Final = 3
ORDER: Final = 1
WARMUP: Final = 3
"""Order and warm-up of TaylorSeer, where a request names none: the defaults of diffusers."""
INTERVALS: Final = ((40, 5), (10, 3), (1, 2))
"""From so many steps on, TaylorSeer computes one in so many: noise levels of short runs lie further apart."""


class StepCache(StrEnum):
    """The rule by which a row computes fewer steps."""

    OFF = "off"
    """It computes all blocks in every step."""
    TAYLORSEER = "taylorseer"
    """Between computed steps, the network's output is extrapolated by finite differences."""


SETTINGS: Final = ("step_cache_interval", "step_cache_order", "step_cache_warmup")
"""Fields that set TaylorSeer."""


class TaylorSeerSchedule(NamedTuple):
    """The steps that TaylorSeer computes: `TaylorSeerCacheConfig` of diffusers."""

    interval: int
    warmup: int
    """All first steps, so many."""

    def computes(self, step: int) -> bool:
        """Return whether a step is computed, 0 for the first."""
        return step < self.warmup or (step - self.warmup - 1) % self.interval == 0

    def skipped(self, steps: int) -> int:
        """Return how many of the first so many steps are not."""
        return sum(not self.computes(step) for step in range(steps))


def settings_of(cache: StepCache, steps: int) -> Mapping[str, int]:
    """The defaults of a cache's fields in a run of so many `steps`."""
    if cache is StepCache.OFF:
        return {}
    interval = next(interval for least, interval in INTERVALS if steps >= least)
    return dict(zip(SETTINGS, (interval, ORDER, WARMUP), strict=True))


# What a served model is. `giornata.families` reads it from a checkpoint's folder.
#
# The digest lets a rolling model change never mix two autoencoders: it travels with every job and every
# worker's state.


class Guidance(StrEnum):
    """The meaning of `guidance_scale` to a model."""

    EMBEDDED = "embedded"
    """The network was distilled to take the scale as an input; one forward a step."""
    CLASSIFIER_FREE = "classifier-free"
    """The scale weighs the prompt's output against that of the negative prompt: two forwards a step."""
    NONE = "none"
    """Nothing: the network was distilled to one strength of guidance."""


class Task(StrEnum):
    """The inputs that a picture is made from."""

    EDIT = "edit"
    GENERATE = "generate"


class ModelCard(WireModel):
    """A served model: what the gateway validates against and the router matches."""

    name: str
    family: str
    """Names what computes it in prepost and in the denoiser; see :data:`giornata.families.KINDS`."""
    digest: str
    """sha-256 over configuration files and samples of the weight files."""
    vae_scale_factor: int
    """Pixels a latent pixel stands for, per side (8 for Flux)."""
    token_latents: int = 2
    """Latent pixels a side of a token."""
    mask_grain: int = 1
    """Model pixels a side of the cells in which the family tells edited from kept."""
    latent_channels: int
    max_text_tokens: int
    """Text tokens that a prompt has at most; where the family pads prompts, the length to which it does. A UNet's
    longer prompts have several times as many."""
    max_prompt_tokens: int | None = None
    """How many of a prompt's own tokens are read; None where all are."""
    takes_guidance: bool
    """Whether requests may name `guidance_scale`; :attr:`guidance` tells what it means."""
    guided_above: float | None = None
    """`guidance_scale` is that of classifier-free guidance, computed above this value; None where it is another."""
    takes_true_cfg: bool
    """Whether classifier-free guidance has a scale of its own, `true_cfg_scale`, and needs a negative prompt."""
    default_steps: int
    default_guidance_scale: float
    default_true_cfg_scale: float = 1.0
    """Default `true_cfg_scale` of requests with a negative prompt; 1 where they must name it."""
    default_strength: float
    reuses: bool = True
    """Whether `reuse=auto` reuses; otherwise it is `off`."""
    samplers: tuple[str, ...] = FLOW_MATCHING
    default_sampler: str = Sampler.EULER
    keeps_whole_steps: bool = False
    """How `strength` is rounded; see :func:`giornata.wire.models.evaluations`."""
    tasks: tuple[Task, ...] = (Task.EDIT,)
    generation_guidance_scale: float | None = None
    """Default of generations; None where it generates nothing."""
    generation_steps: int | None = None
    """Default of generations; None where it is that of edits."""
    native_size: int = 1024
    """Pixels a side of the square pictures that the checkpoint was made for."""
    references: int = 0
    """Times that the picture's own clean tokens stand beside those that are denoised."""
    max_references: int = 0
    """How many pictures a request may name as `reference`; their clean tokens stand there, too."""
    replaces_own: bool = False
    """Whether a request's references stand in place of the picture's own tokens."""
    causal_references: bool = False
    """Whether clean tokens attend among themselves alone: they are computed once, and are no companions."""
    token_multiple: int = 1
    """The network pads text and picture, each for itself, to a multiple of so many tokens, which attend."""

    step_caches: tuple[str, ...] = ()
    """What `step_cache` may be beside `off`: what the family can, or the instance that tells the card."""

    @property
    def guidance(self) -> Guidance:
        """Return what `guidance_scale` means."""
        if not self.takes_guidance:
            return Guidance.NONE
        return Guidance.EMBEDDED if self.guided_above is None else Guidance.CLASSIFIER_FREE

    @property
    def takes_negative_prompt(self) -> bool:
        """Return whether classifier-free guidance can be asked for."""
        return self.takes_true_cfg or self.guidance is Guidance.CLASSIFIER_FREE

    @property
    def embedded_guidance_scale(self) -> float:
        """The default of the scale that the network embeds; 0 where it embeds none."""
        return self.default_guidance_scale if self.guidance is Guidance.EMBEDDED else 0.0

    @property
    def pixel_multiple(self) -> int:
        """Pixels a side of a token; sides of the model's picture are multiples of it."""
        return self.token_latents * self.vae_scale_factor

    def companion_tokens(self, tokens: int, given: Sequence[int] = (), *, generated: bool = False) -> int:
        """Tokens that blocks compute beside the `tokens` of a picture: clean ones, and padding.

        `given` are those of the request's references. A picture that is `generated` has no clean tokens of its own.
        """
        alone = generated or (self.replaces_own and bool(given))
        clean = 0 if self.causal_references else sum(given) + (0 if alone else self.references * tokens)
        return clean + self.padding_tokens(tokens + clean)

    def padding_tokens(self, tokens: int) -> int:
        """Tokens by which the network pads so many of text, or of a picture."""
        return -tokens % self.token_multiple
