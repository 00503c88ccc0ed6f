"""A checkpoint's diffusers pipeline without its network: what every family encodes and decodes alike.

All random numbers of an edit are drawn here, for each row from a CPU generator with the row's seed, in the order in
which the pipeline draws, whatever is reused. So a seed's picture is diffusers' own. The order is:

1. posterior samples of control images, 2. that of the picture, 3. the noise, 4. what the pipeline draws for the masked
picture.

A generation has no picture: its noise follows its control images.

A sampler that draws noise goes on with the same generator: its state after these draws is handed on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

import diffusers
import numpy as np
import numpy.typing as npt
import structlog
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img import retrieve_latents
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate, pixel_shuffle, pixel_unshuffle

from giornata.checkpoints import pipeline_variant
from giornata.model_cards import TILE, PrepostPlan
from giornata.tensors import normalisation_of
from giornata.weight_loading import multiply_scales
from giornata.wire.adapters import ControlInput, control_name
from giornata.wire.errors import Failed, InvalidField, NotSupported, RowPoisoned
from giornata.wire.jobs import PromptTokens
from giornata.wire.models import ModelCard
from giornata_prepost.images.pictures import Pixels, Size

Coded = TypeVar("Coded")

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors on the CPU, of the loaded dtype, by the names under which the denoiser reads them."""
SeenPictures: TypeAlias = Sequence[Pixels]
"""What a text encoder sees, (height, width, 3) uint8 each: the picture that is edited, then the request's references.

Empty for a generation, and of a family whose text encoder sees no picture."""
Condition: TypeAlias = Callable[[torch.Generator], Tensors]
"""Makes tensors of a row; draws from the row's generator."""

log = structlog.get_logger(__name__)

ON_DEVICE: Final = PrepostPlan(encoders=True, whole_pixels=sys.maxsize, size_bytes=0)
"""Of a device with room for everything."""
SAMPLE, MODE = "sample", "argmax"
"""The `sample_mode` by which diffusers' `retrieve_latents` takes latents from a posterior."""
REHEARSED_PIXELS: Final = 256
"""Pixels a side of the picture that a model rehearses with, about."""


def no_condition(_generator: torch.Generator) -> Tensors:
    """The condition that makes and draws nothing."""
    return {}


class ControlEncoding(NamedTuple):
    """The control inputs of a job's rows, encoded for its ControlNets."""

    condition: Condition
    """Makes `control_0` and so on, see :attr:`giornata.wire.jobs.Encoding.controls`."""
    shared: bool
    """Whether that is the same for all rows, and nothing is drawn."""


class ImageModel:
    """Autoencoder and text encoders of one checkpoint, by diffusers' pipeline. Used from one thread at a time.

    A family tells what its prompt becomes, and overrides what its pipeline does otherwise than most: the mask is one
    value a latent pixel, nearest to its centre, and `image_latents` are sampled before the noise.
    """

    kind: ClassVar[str]
    """Name of the diffusers pipeline."""
    left_out: ClassVar[tuple[str, ...]] = ("transformer",)
    """Components that are not loaded."""
    options: ClassVar[Mapping[str, object]] = {}
    """More arguments of the pipeline's constructor."""
    prompt_options: ClassVar[Mapping[str, object]] = {}
    """More arguments of its `encode_prompt`."""
    picture_mode: ClassVar[str] = SAMPLE
    """The `sample_mode` by which the pipeline takes a picture's latents."""
    text_varies_with_size: ClassVar[bool] = False
    """Whether what a prompt becomes depends on the picture's size."""
    text_varies_with_picture: ClassVar[bool] = False
    """Whether the text encoder sees the edit's pictures: :meth:`encode_text` then needs them."""
    draws_unread: ClassVar[bool] = False
    """Whether the inpainting pipeline samples the masked picture's latents after the noise, and reads them in no step.

    The image-to-image pipeline, which an edit of a whole picture equals, has none."""
    control_inputs: ClassVar[frozenset[ControlInput]] = frozenset()
    """What ControlNets of the family see; empty where diffusers has none for it."""
    control_pixels: ClassVar[bool] = False
    """Whether its usual ControlNets see pixels in 0 to 1, (3, height, width), which are not encoded."""

    def __init__(
        self,
        folder: Path,
        card: ModelCard,
        device: torch.device,
        dtype: torch.dtype,
        plan: Callable[[], PrepostPlan] = lambda: ON_DEVICE,
    ) -> None:
        planned = plan()
        if device.type != "cpu":
            log.info("memory_plan", **planned._asdict())
        left_out = self._left_out(folder)
        pipeline = getattr(diffusers, self.kind).from_pretrained(
            folder,
            dtype=dtype,
            variant=pipeline_variant(folder, left_out),
            use_safetensors=True,
            local_files_only=True,
            **dict.fromkeys(left_out),
            **self.options,
            **self._loaded(folder),
        )
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module):
                multiply_scales(part, folder / name)
        if not hasattr(pipeline, "mask_processor"):  # it paints no mask; others make one of these
            told = {"do_normalize": False, "do_binarize": True, "do_convert_grayscale": True}
            pipeline.mask_processor = VaeImageProcessor(vae_scale_factor=card.vae_scale_factor, **told)
        self.card, self.device, self.dtype = card, device, dtype
        self.text_device = device if planned.encoders else torch.device("cpu")
        self._whole_pixels = planned.whole_pixels
        self._replan = None if planned.encoders else plan
        self.pipeline = pipeline
        self._place()
        self._normalisation = normalisation_of(pipeline.vae)

    @torch.no_grad()
    def encode_text(self, prompt: str, size: Size, seen: SeenPictures = ()) -> Tensors:
        """Conditioning of a job by its prompt, as :meth:`_prompt` tells; `size` is that of the model's picture."""
        return self._text(partial(self._prompt, prompt, size, seen))

    @torch.no_grad()
    def encode_unguided(self, negative_prompt: str | None, size: Size, seen: SeenPictures = ()) -> Tensors:
        """Conditioning of the half that classifier-free guidance leads away from: names begin with `negative_`.

        None is what the family's pipeline takes where no negative prompt is given.
        """
        text = self._text(partial(self._unguided, negative_prompt, size, seen))
        return {f"negative_{name}": tensor for name, tensor in text.items()}

    def prompt_tokens(self, prompt: str) -> PromptTokens:
        """Return how many tokens a prompt has, and how many of them are read."""
        names = ("tokenizer_3", "tokenizer_2", "tokenizer", "processor")
        found = next(one for name in names if (one := getattr(self.pipeline, name, None)) is not None)
        given = len(tokens_of(getattr(found, "tokenizer", found), prompt))
        limit = self.card.max_prompt_tokens
        return PromptTokens(given=given, read=given if limit is None else min(given, limit))

    def text_tokens(self, text: Tensors) -> int:
        """Text tokens of one row that pass the network's blocks in each step; 0 where they only are attended to.

        By default the length of `prompt_embeds`, and what the network pads it with.
        """
        tokens = text["prompt_embeds"].shape[0]
        return tokens + self.card.padding_tokens(tokens)

    def prefix_tokens(self, text: Tensors, clean: int) -> int:  # noqa: ARG002 - of block-causal families
        """Tokens of one sequence that pass the blocks once, before its first step: block-causal text and references.

        `clean` are the tokens of the pictures that there are: references, and the one that is edited.
        """
        return 0

    @torch.no_grad()
    def encode_rows(
        self,
        image: Pixels,
        mask: npt.NDArray[np.uint8],
        seeds: Sequence[int],
        *,
        modes: bool = False,
        draws: bool = False,
        strength: float = 1.0,
        first: Condition = no_condition,
    ) -> Iterator[Tensors]:
        """Conditioning of each row of a job, one a seed; the picture is encoded once.

        What `first` makes, which draws before all else, is the row's, too.

        `image` is (height, width, 3) uint8 at the model's size; `mask` is (height, width) uint8, 255 = edit, 0 = keep.
        Everything is drawn as the pipeline does at this `strength`; with `modes` posteriors' modes, the same for all
        seeds, are taken instead. Each tensor is (tokens, channels), row-major, channels ordered by latent channel, row
        and column in the token: `noise` and `image_latents` (tokens, token_latents ** 2 * latent_channels), and what
        the pipeline adds. Where the row's sampler `draws` noise, so is `generator`: the state of the row's CPU
        generator after all of the pipeline's draws, (bytes,) uint8.
        """
        height, width = mask.shape
        picture = self.pipeline.image_processor.preprocess(Image.fromarray(image), height=height, width=width)
        holes = self.pipeline.mask_processor.preprocess(Image.fromarray(mask), height=height, width=width)
        picture = picture.to(torch.float32)
        posterior = self._posterior(picture)
        how = self._mode(strength, whole=bool((holes == 1).all()))
        condition = self._condition(picture, holes, modes=modes)
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            row = first(generator)
            image_latents = self._latents(posterior, generator, how)
            row["noise"] = self._pack(self._noise(image_latents, generator))
            row["image_latents"] = self._with_modes(self._pack(image_latents), posterior, modes=modes)
            row |= condition(generator)
            if draws:
                if self.draws_unread and not bool((row["mask"] == 1).all()):
                    self._noise(image_latents, generator)
                row["generator"] = generator.get_state()
            yield {name: tensor.cpu().contiguous() for name, tensor in row.items()}

    @torch.no_grad()
    def noise_rows(
        self, size: Size, seeds: Sequence[int], *, draws: bool = False, first: Condition = no_condition
    ) -> Iterator[Tensors]:
        """Return where each row of a generation begins, one a seed: `noise`, (tokens, channels), row-major.

        It is what the family's text-to-image pipeline draws for the seed, before the scheduler scales it. `draws` and
        `first` are as of :meth:`encode_rows`; the sides of `size` are multiples of a token's.
        """
        factor = self.card.vae_scale_factor
        shape = (1, self.card.latent_channels, size.height // factor, size.width // factor)
        latents = torch.empty(shape, device="meta")  # a shape is all that noise follows
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            row = first(generator) | {"noise": self._pack(self._noise(latents, generator))}
            if draws:
                row["generator"] = generator.get_state()
            yield {name: tensor.cpu().contiguous() for name, tensor in row.items()}

    @torch.no_grad()
    def encode_reference(self, image: Pixels) -> torch.Tensor:
        """The clean latents of a reference, the mode of its posterior: (rows, columns, channels) of tokens.

        `image` is (height, width, 3) uint8, its sides multiples of a token's.
        """
        height, width, _ = image.shape
        processor, multiple = self.pipeline.image_processor, self.card.pixel_multiple
        picture = processor.preprocess(Image.fromarray(image), height=height, width=width).to(torch.float32)
        nothing = torch.Generator("cpu")  # a mode draws nothing
        latents = self._pack(self._latents(self._posterior(picture), nothing, MODE))
        return latents.view(height // multiple, width // multiple, -1).cpu().contiguous()

    @torch.no_grad()
    def encode_controls(
        self, images: Sequence[tuple[Pixels, ControlInput]], mask: npt.NDArray[np.uint8] | None
    ) -> ControlEncoding:
        """Return what ControlNets see, prepared like the pipelines of diffusers do.

        `images` are (height, width, 3) uint8, of the size of the model's picture, and how their ControlNets see them.
        Its condition comes `first` in :meth:`encode_rows`: it samples the images' posteriors in their order. `mask` is
        as there, None of a generation.

        Raises:
            NotSupported: the family has no ControlNets.
            InvalidField: a ControlNet sees something that the family, or a generation, does not have.
        """
        if images and not self.control_inputs:
            family = self.card.family
            raise NotSupported("The model takes no ControlNets.", field="controlnets", received=family)
        samples = {control_name(index): self._control(*image, mask) for index, image in enumerate(images)}

        def condition(generator: torch.Generator) -> Tensors:
            own = self._control_generator(generator)
            return {name: sample(own) for name, sample in samples.items()}

        pixels = all(self._sees_pixels(sees) for _, sees in images)
        return ControlEncoding(condition, shared=pixels)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, size: Size) -> Pixels:
        """The picture of one row's final latents, as the pipeline decodes and rounds it: (height, width, 3) uint8.

        `latents` are (tokens, token_latents ** 2 * latent_channels), as `image_latents`; `size` is the picture's.

        Raises:
            RowPoisoned: latents or picture are not finite.
        """
        side, multiple = self.card.token_latents, self.card.pixel_multiple
        grid = (size.height // multiple, size.width // multiple)
        tokens = latents.to(self.device, self.dtype)
        unpacked = pixel_shuffle(tokens.T.reshape(1, -1, *grid), side)
        picture = self._coded(unpacked, size.width * size.height, self._normalisation.decoded)
        if not bool(torch.isfinite(picture).all()):
            raise RowPoisoned("The denoised latents do not decode to a picture: values are not finite.")
        return np.asarray(self.pipeline.image_processor.postprocess(picture, output_type="pil")[0])

    def rehearse(self) -> None:
        """Encode and decode an empty picture, so that no edit waits for kernels to be loaded.

        Raises:
            Failed: this model does not decode what it has encoded.
        """
        multiple = self.card.pixel_multiple
        side = max(1, REHEARSED_PIXELS // multiple) * multiple
        empty = np.zeros((side, side, 3), np.uint8)
        self.encode_text("", Size(side, side), [empty])
        (row,) = self.encode_rows(empty, np.full((side, side), 255, np.uint8), [0])
        try:
            self.decode(row["image_latents"], Size(side, side))
        except RowPoisoned as error:
            raise Failed("The model cannot decode a picture; is its dtype right?") from error

    def text_encoder(self, name: str) -> nn.Module | None:
        """A text encoder by its name in the checkpoint; None where there is none."""
        found: nn.Module | None = self.pipeline.components.get(name)
        return found

    def _text(self, encode: Callable[[], Tensors]) -> Tensors:
        """What encoders make of a prompt, on the CPU. Where they run out of memory, they stay there from then on.

        Planned to be there, they go to the device once others have left room for them, as a predecessor does.
        """
        try:
            if self._replan:
                plan = self._replan()
                self._whole_pixels = plan.whole_pixels
                if plan.encoders:
                    self._replan, self.text_device = None, self.device
                    log.info("memory_plan", **plan._asdict())
                    self._place()
            return {name: tensor.cpu() for name, tensor in encode().items()}
        except torch.OutOfMemoryError:
            if self.text_device.type == "cpu":
                raise
        # Outside of the handler, since the traceback keeps tensors alive.
        log.warning("text_encoders_out_of_memory", now="on the CPU")
        self.text_device = torch.device("cpu")
        self._place()
        return self._text(encode)

    def _coded(self, picture: torch.Tensor, pixels: int, code: Callable[[Any, torch.Tensor], Coded]) -> Coded:
        """What the autoencoder makes of a `picture` of so many pixels, or of its latents; of a large one in tiles.

        A size that ran out of memory is not tried again as a whole.
        """
        vae = self.pipeline.vae
        if pixels <= self._whole_pixels:
            try:
                return code(vae, picture.to(vae.dtype))
            except torch.OutOfMemoryError:
                if pixels <= TILE**2:
                    raise
            self._whole_pixels = pixels - 1
            log.warning("autoencoder_out_of_memory", pixels=pixels, now="in tiles")
            torch.cuda.empty_cache()
        with in_tiles(vae):
            return code(vae, picture.to(vae.dtype))

    def _place(self) -> None:
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module):
                part.to(self.text_device if name.startswith("text_encoder") else self.device)
        torch.cuda.empty_cache()

    @classmethod
    def _left_out(cls, folder: Path) -> tuple[str, ...]:  # noqa: ARG003 - families with optional encoders look there
        """Components that are not loaded of a checkpoint."""
        return cls.left_out

    @classmethod
    def _loaded(cls, folder: Path) -> Mapping[str, Any]:  # noqa: ARG003 - of a family that has some
        """Components that the family loads by itself."""
        return {}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - some families read them
        """What the text encoders make of a prompt: `prompt_embeds` (text_tokens, dim), and what the family adds."""
        embeds, *_ = self._encoded_prompt(prompt)
        return {"prompt_embeds": embeds[0]}

    def _encoded_prompt(self, prompt: str) -> tuple[Any, ...]:
        """What the pipeline's `encode_prompt` returns of a prompt of at most the model's tokens."""
        encoded: tuple[Any, ...] = self.pipeline.encode_prompt(
            prompt,
            device=self.text_device,
            max_sequence_length=self.card.max_text_tokens,
            **self.prompt_options,
        )
        return encoded

    def _unguided(self, negative_prompt: str | None, size: Size, seen: SeenPictures) -> Tensors:
        """As :meth:`_prompt`, of the half that guidance leads away from; None is what the pipeline takes unasked."""
        return self._prompt(negative_prompt or "", size, seen)

    def _mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - some families read them
        """The `sample_mode` by which an edit takes the picture's latents; `whole`: all of it is repainted."""
        return self.picture_mode

    def _with_modes(self, drawn: torch.Tensor, posterior: Any, *, modes: bool) -> torch.Tensor:
        """(tokens, channels) of a posterior: `drawn` as the pipeline does, or with `modes` its mode."""
        if not modes:
            return drawn
        return self._pack(self._latents(posterior, torch.Generator("cpu"), MODE))  # it draws nothing

    def _noise(self, image_latents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Noise of the shape of `image_latents`, drawn as the pipeline lays it out."""
        noise: torch.Tensor = randn_tensor(
            image_latents.shape, generator=generator, device=self.device, dtype=self.dtype
        )
        return noise

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:  # noqa: ARG002 - some do
        """What the pipeline adds to every row of a job: `mask`, one value a latent pixel, repeated for each channel.

        It draws after the noise. `picture` is (1, 3, height, width) float32 in -1..1; `holes` is (1, 1, height, width)
        float32, 1 = edit; `modes` as of :meth:`encode_rows`.
        """
        mask = self._pack(self._mask(holes).expand(-1, self.card.latent_channels, -1, -1))
        return lambda _generator: {"mask": mask}

    def _mask(self, holes: torch.Tensor) -> torch.Tensor:
        """(1, 1, h, w): the mask at each latent pixel, as the pipeline resizes it."""
        factor = self.card.vae_scale_factor
        size = [side // factor for side in holes.shape[-2:]]
        mask: torch.Tensor = interpolate(holes, size=size)
        return mask.to(self.device, self.dtype)

    def _posterior(self, picture: torch.Tensor) -> Any:
        """Return what the autoencoder makes of (1, 3, height, width) pixels in -1..1."""
        pixels = picture.to(self.device, self.dtype)  # rounded as the pipeline rounds, whatever encodes
        return self._coded(pixels, picture[0, 0].numel(), self._normalisation.posterior)

    def _latents(self, posterior: Any, generator: torch.Generator, how: str) -> torch.Tensor:
        """(1, latent_channels, h, w) of a posterior, as the network sees them."""
        sample = retrieve_latents(posterior, generator=generator, sample_mode=how).to(self.dtype)
        return self._normalisation.normalised(self.pipeline.vae, sample)

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        """(1, channels, h, w) → (tokens, channels * token_latents ** 2): rows of tokens, channels of (c, y, x)."""
        return pixel_unshuffle(latents, self.card.token_latents)[0].flatten(1).T

    def _control(
        self, image: Pixels, sees: ControlInput, mask: npt.NDArray[np.uint8] | None
    ) -> Callable[[torch.Generator], torch.Tensor]:
        """What one ControlNet sees, for one row: latents, (tokens, channels), packed as the picture's, or pixels."""
        if sees not in self.control_inputs:
            raise InvalidField(
                f"No ControlNet of {self.card.family} sees its control image so.",
                field="controlnets",
                received=sees,
                accepted=", ".join(sorted(self.control_inputs)),
            )
        height, width, _ = image.shape
        processor = VaeImageProcessor(
            vae_scale_factor=self.card.vae_scale_factor,
            do_normalize=not (self.control_pixels and sees is ControlInput.USUAL),
        )
        picture = processor.preprocess(Image.fromarray(image), height=height, width=width)
        if self._sees_pixels(sees):
            pixels = picture[0].to(self.device, self.dtype)
            return lambda _generator: pixels
        if sees is ControlInput.MASKED:
            return self._masked(picture, mask)
        posterior = self._posterior(picture)
        if sees is ControlInput.UNSHIFTED:
            return lambda generator: self._pack(self._unshifted(posterior, generator))
        return lambda generator: self._pack(self._latents(posterior, generator, SAMPLE))

    def _sees_pixels(self, sees: ControlInput) -> bool:
        return sees is ControlInput.PIXELS or (self.control_pixels and sees is ControlInput.USUAL)

    def _control_generator(self, generator: torch.Generator) -> torch.Generator:
        """Draws the posterior samples of a row's control images; `generator` is the row's, before its first draw."""
        return generator

    def _unshifted(self, posterior: object, generator: torch.Generator) -> torch.Tensor:
        """Latents from which the autoencoder's shift is not subtracted, (1, channels, h, w)."""
        sample: torch.Tensor = retrieve_latents(posterior, generator=generator, sample_mode=SAMPLE)
        scale: float = self.pipeline.vae.config.scaling_factor
        return (sample * scale).to(self.dtype)

    def _masked(
        self, picture: torch.Tensor, mask: npt.NDArray[np.uint8] | None
    ) -> Callable[[torch.Generator], torch.Tensor]:
        """Latents of the picture, black where it is edited, and a channel that is 1 where it is kept."""
        if mask is None:
            raise InvalidField(
                "The ControlNet completes a picture that is edited, and a generation has none.",
                field="controlnets",
                received="a generation",
                accepted="an edit",
            )
        holes = self.pipeline.mask_processor.preprocess(Image.fromarray(mask))
        posterior = self._posterior(picture.masked_fill(holes > 0.5, -1))
        kept = 1 - self._mask(holes)
        return lambda generator: self._pack(
            torch.cat([self._latents(posterior, generator, SAMPLE), kept], dim=1)
        )


@contextmanager
def in_tiles(autoencoder: Any) -> Iterator[None]:
    """Inside, larger pictures pass an autoencoder of diffusers in tiles of :data:`giornata.model_cards.TILE` pixels."""
    if hasattr(autoencoder, "tile_latent_min_size"):
        factor = 2 ** (len(autoencoder.config.block_out_channels) - 1)
        autoencoder.tile_sample_min_size, autoencoder.tile_latent_min_size = TILE, TILE // factor
        autoencoder.enable_tiling()
    else:
        autoencoder.enable_tiling(TILE, TILE, TILE * 3 // 4, TILE * 3 // 4)
    try:
        yield
    finally:
        autoencoder.disable_tiling()


def tokens_of(tokenizer: Any, prompt: str) -> list[int]:
    """The ids of a prompt's own tokens, however many there are."""
    found: list[int] = tokenizer(prompt, add_special_tokens=False, truncation=False).input_ids
    return found
