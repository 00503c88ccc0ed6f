"""What a served model is. :mod:`giornata.families` reads it from a checkpoint's folder.

The digest lets a rolling model change never mix two autoencoders: it travels with every job and every worker's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from giornata.wire.samplers import FLOW_MATCHING, Sampler
from giornata.wire.values import WireModel


class Guidance(StrEnum):
    """What `guidance_scale` means to a model."""

    EMBEDDED = "embedded"
    """The network was distilled to take the scale as an input; one forward a step."""
    CLASSIFIER_FREE = "classifier-free"
    """The scale weighs the prompt's output against that of the negative prompt: two forwards a step."""
    NONE = "none"
    """Nothing: the network was distilled to one strength of guidance."""


class Task(StrEnum):
    """What a picture is made from."""

    EDIT = "edit"
    """A picture and a mask."""
    GENERATE = "generate"
    """Text alone."""


class ModelCard(WireModel):
    """A served model: what the gateway validates against and the router matches."""

    name: str
    family: str
    """Names what computes it in prepost and in the denoiser; see :data:`giornata.kinds.KINDS`."""
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
    """How many of a prompt's own tokens are read; None where all are, or an earlier version does not tell."""
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
    """What requests may ask for."""
    default_sampler: str = Sampler.EULER
    """The checkpoint's own."""
    keeps_whole_steps: bool = False
    """How `strength` is rounded; see :func:`giornata.wire.samplers.evaluations`."""
    tasks: tuple[Task, ...] = (Task.EDIT,)
    """What it is served for; versions before it was told know edits alone."""
    generation_guidance_scale: float | None = None
    """Default of generations; None where it generates nothing."""
    generation_steps: int | None = None
    """Default of generations; None where it is that of edits, as versions before it was told have it."""
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
        """What `guidance_scale` means."""
        if not self.takes_guidance:
            return Guidance.NONE
        return Guidance.EMBEDDED if self.guided_above is None else Guidance.CLASSIFIER_FREE

    @property
    def takes_negative_prompt(self) -> bool:
        """Whether classifier-free guidance can be asked for."""
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
