"""The facts of a checkpoint's configurations: shapes, what templates keep, what is not served. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from giornata.wire.models import EXACT_BITS, Sampler

Config: TypeAlias = Mapping[str, Any]
"""A component's JSON, as diffusers writes it."""

UNSERVED_SAMPLING: Final = ("thresholding", "clip_sample")
"""Options of a scheduler by which a step is no longer linear in latent and output."""


class CheckpointConfigs(NamedTuple):
    """The configurations of one checkpoint."""

    pipeline: Config
    """``model_index.json``."""
    network: Config
    scheduler: Config
    """Empty where the checkpoint has none."""
    autoencoder: Config


Refusal: TypeAlias = Callable[[CheckpointConfigs], str | None]
"""Why a checkpoint is not served, as the end of a sentence; None where it is."""


@dataclass(frozen=True)
class LatentShape:
    """Shape of the latents of an autoencoder."""

    scale_factor: int
    """Pixels a side of a latent pixel."""
    channels: int


def autoencoder_kl(autoencoder: Config) -> LatentShape:
    """Latents of `AutoencoderKL` and `AutoencoderKLFlux2`; KeyError for the configuration of another class."""
    return LatentShape(2 ** (len(autoencoder["block_out_channels"]) - 1), int(autoencoder["latent_channels"]))


def autoencoder_qwen(autoencoder: Config) -> LatentShape:
    """Latents of `AutoencoderKLQwenImage`; KeyError for the configuration of another class."""
    return LatentShape(2 ** len(autoencoder["temperal_downsample"]), int(autoencoder["z_dim"]))


def autoencoder_qwen_21(autoencoder: Config) -> LatentShape:
    """Latents of `AutoencoderKLQwenImage21`; KeyError for the configuration of another class."""
    return LatentShape(int(autoencoder["scale_factor_spatial"]), int(autoencoder["z_dim"]))


def unserved_sampling(configs: CheckpointConfigs) -> str | None:
    """Return why the checkpoint's scheduler is not served, as the end of a sentence; None where it is."""
    asked = [option for option in UNSERVED_SAMPLING if configs.scheduler.get(option)]
    return f"its scheduler asks for {' and '.join(asked)}, which is not served" if asked else None


def unserved_qwen_21(configs: CheckpointConfigs) -> str | None:
    """Return why a checkpoint of Qwen-Image 2.1 is not served, as :func:`unserved_sampling` says it."""
    if configs.pipeline.get("sample_sigmas") is not None:
        return "its pipeline has sample_sigmas, which fix the noise levels; served are those of any number of steps"
    return unserved_sampling(configs)


def unserved_unet(configs: CheckpointConfigs, levels: int, **options: object) -> str | None:
    """As :func:`unserved_sampling`, of a UNet with at most so many `levels` and with these `options` alone."""
    fixed = {"time_cond_proj_dim": None, "class_embed_type": None, "encoder_hid_dim_type": None} | options
    for name, served in fixed.items():
        if (found := configs.network.get(name)) != served:
            return f"its UNet has {name} {found}; served is {served}"
    if (found_levels := len(configs.network["block_out_channels"])) > levels:
        return f"its UNet has {found_levels} levels; served are {levels} at most"
    return unserved_sampling(configs)


def unserved_sdxl(configs: CheckpointConfigs) -> str | None:
    """Why a checkpoint of Stable Diffusion XL is not served, such as a refiner, or one with normalised latents."""
    if configs.pipeline.get("requires_aesthetics_score"):
        return "it is a refiner, which takes an aesthetics score; base models are served"
    if configs.autoencoder.get("latents_mean") is not None:
        return "its autoencoder has latents_mean, which diffusers' inpainting does not encode with"
    return unserved_unet(configs, 3, addition_embed_type="text_time")


class CachedChannels(NamedTuple):
    """Channels a token, of all blocks together."""

    activations: int
    """Keys, values and borders: kept in the bits that are asked for."""
    statistics: int = 0
    """Moments of group norms, which are never quantised."""

    def size_bytes(self, tokens: int, bits: int) -> int:
        """Bytes of one noise level of so many tokens."""
        return tokens * (self.activations * bits + self.statistics * max(bits, EXACT_BITS)) // 8


def of_flux(network: Config) -> CachedChannels:
    """Keys and values of a network with two kinds of blocks, equally wide; KeyError if it is another one."""
    blocks = int(network["num_layers"]) + int(network["num_single_layers"])
    return CachedChannels(2 * blocks * _width(network))


def of_joint(network: Config) -> CachedChannels:
    """As :func:`of_flux`, of a network with one kind of block; some of SD3.5's attend twice."""
    sites = int(network["num_layers"]) + len(network.get("dual_attention_layers", ()))
    return CachedChannels(2 * sites * _width(network))


def of_z_image(network: Config) -> CachedChannels:
    """As :func:`of_flux`, of `ZImageTransformer2DModel`; its picture passes its own refiner first."""
    blocks = int(network["n_layers"]) + int(network["n_refiner_layers"])
    width = int(network["dim"]) * int(network["n_kv_heads"]) // int(network["n_heads"])
    return CachedChannels(2 * blocks * width)


def of_unet(tile: int, network: Config) -> CachedChannels:
    """Keys, values, borders and moments of a `UNet2DConditionModel`; a token is a tile of `tile` latent pixels a side.

    Raises:
        KeyError: the configuration is that of another network.
    """
    groups = int(network.get("norm_num_groups", 32))
    parts = list(_unet_parts(tile, network))
    kept = sum(part.convolved + part.attended for part in parts)
    return CachedChannels(kept, 2 * groups * sum(part.norms for part in parts))


class _UnetPartChannels(NamedTuple):
    """A part of a UNet, such as a resnet, a transformer or a sampler."""

    norms: int = 0
    convolved: int = 0
    attended: int = 0


def _unet_parts(tile: int, network: Config) -> Iterator[_UnetPartChannels]:
    """The parts in the order of a forward. `side` counts a tile's cells; `before` are channels that a resnet reads."""
    widths = [int(width) for width in network["block_out_channels"]]
    layers = _each_level(network["layers_per_block"], len(widths))
    depths = _each_level(network.get("transformer_layers_per_block", 1), len(widths))
    before, side, last = widths[0], tile, len(widths) - 1
    for level, (width, kind) in enumerate(zip(widths, network["down_block_types"], strict=True)):
        for layer in range(layers[level]):
            yield from _layer(before, width, side, _depth(depths[level], layer) if "CrossAttn" in kind else 0)
            before = width
        if level < last:
            # The last row and column: with a stride of 2 nothing else is read.
            yield _UnetPartChannels(convolved=(2 * side - 1) * width)
            side //= 2
    if network.get("mid_block_type", "UNetMidBlock2DCrossAttn") is not None:
        yield from _layer(before, before, side, _depth(depths[-1], 0))
        yield from _layer(before, before, side, 0)
    depths = network.get("reverse_transformer_layers_per_block") or depths[::-1]
    widths, layers = widths[::-1], layers[::-1]
    for level, (width, kind) in enumerate(zip(widths, network["up_block_types"], strict=True)):
        for layer in range(layers[level] + 1):
            kept = width if layer < layers[level] else widths[min(level + 1, last)]
            depth = _depth(depths[level], layer) if "CrossAttn" in kind else 0
            yield from _layer(before + kept, width, side, depth)
            before = width
        if level < last:
            # Each cell is repeated as 2x2 and kept once.
            yield _UnetPartChannels(convolved=_border(side) * width)
            side *= 2
    yield _UnetPartChannels(norms=1, convolved=_border(tile) * widths[-1])  # of the output


def _layer(before: int, width: int, side: int, depth: int) -> Iterator[_UnetPartChannels]:
    """A resnet, two norms each in front of a convolution, and a transformer of so many blocks behind it, if any."""
    yield _UnetPartChannels(norms=2, convolved=_border(side) * (before + width))
    if depth:
        yield _UnetPartChannels(norms=1, attended=2 * depth * width * side**2)


def _border(side: int) -> int:
    """Border cells of a tile with so many cells a side."""
    return max(1, 4 * (side - 1))


def _each_level(value: Any, levels: int) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value] * levels


def _depth(level: Any, layer: int) -> int:
    """Blocks of a transformer: a number for all of a level, or one for each."""
    return int(level[layer] if isinstance(level, Sequence) else level)


def _width(network: Config) -> int:
    return int(network["num_attention_heads"]) * int(network["attention_head_dim"])


# The schedulers of diffusers behind samplers' names. A sampler has the noise schedule of the checkpoint's own
# scheduler, and takes its other options from there, but for those that its name fixes.


@dataclass(frozen=True)
class Solver:
    """A scheduler of diffusers, and the options that a sampler's name fixes."""

    scheduler: str
    """The class."""
    options: Mapping[str, object]


def _dpm_solver(algorithm: str, order: int, *, karras: bool) -> Solver:
    fixed = {"algorithm_type": algorithm, "solver_order": order, "use_karras_sigmas": karras}
    return Solver("DPMSolverMultistepScheduler", fixed)


SOLVERS: Final[Mapping[Sampler, Solver]] = {
    Sampler.EULER: Solver("EulerDiscreteScheduler", {}),
    Sampler.EULER_ANCESTRAL: Solver("EulerAncestralDiscreteScheduler", {}),
    Sampler.DDIM: Solver("DDIMScheduler", {}),
    Sampler.DDPM: Solver("DDPMScheduler", {}),
    Sampler.PNDM: Solver("PNDMScheduler", {"skip_prk_steps": True}),
    Sampler.DPMPP_2M: _dpm_solver("dpmsolver++", 2, karras=False),
    Sampler.DPMPP_2M_KARRAS: _dpm_solver("dpmsolver++", 2, karras=True),
    Sampler.DPMPP_2M_SDE: _dpm_solver("sde-dpmsolver++", 2, karras=False),
    Sampler.DPMPP_2M_SDE_KARRAS: _dpm_solver("sde-dpmsolver++", 2, karras=True),
    Sampler.DPMPP_3M: _dpm_solver("dpmsolver++", 3, karras=False),
    Sampler.DPMPP_3M_KARRAS: _dpm_solver("dpmsolver++", 3, karras=True),
    Sampler.UNIPC: Solver("UniPCMultistepScheduler", {}),
    Sampler.DEIS: Solver("DEISMultistepScheduler", {}),
    Sampler.HEUN: Solver("HeunDiscreteScheduler", {}),
    Sampler.LCM: Solver("LCMScheduler", {}),
}
"""The solver of each sampler of models with discrete times."""
DEFAULTS: Final[Mapping[str, object]] = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "use_karras_sigmas": False,
    "skip_prk_steps": False,
}
"""Diffusers' own, of options that some name fixes."""


def sampler_of(config: Mapping[str, Any]) -> Sampler:
    """The sampler that a checkpoint's ``scheduler_config.json`` is.

    Raises:
        ValueError: none is; says which schedulers are served.
    """
    name = config.get("_class_name")
    for sampler, solver in SOLVERS.items():
        given = {option: config.get(option, DEFAULTS[option]) for option in solver.options}
        if solver.scheduler == name and given == solver.options:
            return sampler
    served = ", ".join(dict.fromkeys(solver.scheduler for solver in SOLVERS.values()))
    fixed = {option: config[option] for option in DEFAULTS if option in config}
    raise ValueError(
        f"the scheduler {name} with {fixed or 'its defaults'} is not served; served are: {served}"
    )
