"""Which files are LoRAs, by names, shapes and dtypes of their tensors alone. Prepost checks their values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from giornata.wire.errors import GiornataError, LoraNotSupported, LoraTooLarge
from giornata.wire.loras import LoraStyle

DTYPES: Final = ("F32", "F16", "BF16")
"""Dtypes of factors, as safetensors calls them."""
ACCEPTED: Final = (
    "low-rank factors with the names of diffusers, PEFT, kohya, XLabs or the original checkpoint"
)
OTHERS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("DoRA", re.compile(r"dora_scale|lora_magnitude_vector")),
    ("LoKr", re.compile(r"lokr_")),
    ("LoHa", re.compile(r"hada_")),
    ("OFT", re.compile(r"oft_|boft")),
    ("LoCon with a middle factor", re.compile(r"lora_mid")),
    ("LoRA with biases", re.compile(r"lora_(A|B|up|down)\.bias$|lora\.(up|down)\.bias$")),
    ("whole differences of weights", re.compile(r"\.diff(_b)?$|\.set_weight$")),
    ("embeddings (textual inversion)", re.compile(r"^emb_params$|^bundle_emb|^clip_[lg]$")),
    ("Control LoRA", re.compile(r"lora_controlnet|(query|key)_norm\.scale$|\.norm_(added_)?[qk]\.weight$")),
)
"""What a tensor's name betrays to be something else."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.]{1,512}\Z")
_FACTOR: Final = re.compile(
    r"(?P<module>.+?)(?:\.lora_(?P<peft>[AB])(?:\.default)?|\.lora_(?P<kohya>down|up)"
    r"|(?:\.lora|\.lora_linear_layer|_lora\d?)\.(?P<old>down|up))\.weight\Z"
)
_DOWN: Final = {"A", "down"}
_STYLES: Final[tuple[tuple[LoraStyle, re.Pattern[str]], ...]] = (
    (LoraStyle.XLABS, re.compile(r"(double|single)_blocks\.\d+\.processor\.")),
    (LoraStyle.KOHYA, re.compile(r"lora_(unet|te\d?|transformer|prior)_|lycoris_")),
    (LoraStyle.ORIGINAL, re.compile(r"diffusion_model\.|base_model\.model\.(double|single)_blocks\.")),
    (LoraStyle.DIFFUSERS, re.compile(r"(transformer|unet|text_encoder(_\d)?)\.")),
)
"""By how names of modules begin; PEFT's begin with a module of the network itself."""


class Tensor(NamedTuple):
    """A tensor of a header."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """The largest LoRA that is accepted."""

    rank: int
    tensors: int


@dataclass(frozen=True)
class Found:
    """What a header says."""

    style: LoraStyle
    rank: int
    """The largest of any module."""
    modules: int


def recognised(tensors: Mapping[str, Tensor], limits: Limits) -> Found:
    """What a file with these tensors is.

    Raises:
        LoraNotSupported: something else than a LoRA, or one of an unknown form; the text names the first such tensor.
        LoraTooLarge: more tensors, or a larger rank, than the limits allow.
    """
    if len(tensors) > limits.tensors:
        raise LoraTooLarge(received=f"{len(tensors)} tensors", accepted=f"at most {limits.tensors}")
    factors: defaultdict[str, dict[bool, Tensor]] = defaultdict(dict)
    scaled: set[str] = set()
    for name, tensor in sorted(tensors.items()):
        if (module := _scaled(name, tensor)) is not None:
            scaled.add(module)
            continue
        module, is_down = _factor(name, tensor)
        if is_down in factors[module]:
            raise _unknown("Two tensors are the same factor of one module.", name)
        factors[module][is_down] = tensor
    if not factors:
        raise LoraNotSupported("The file holds no factors.", received="no tensors", accepted=ACCEPTED)
    if stray := scaled - factors.keys():
        raise _unknown("An alpha belongs to no module with factors.", min(stray))
    rank = max(_rank(module, pair) for module, pair in factors.items())
    if rank > limits.rank:
        raise LoraTooLarge(received=f"rank {rank}", accepted=f"rank {limits.rank} at most")
    return Found(_style(factors), rank, len(factors))


def _scaled(name: str, tensor: Tensor) -> str | None:
    """The module whose alpha a tensor is; None if it is a factor."""
    if not _NAME.match(name):
        raise _unknown("A tensor has a name that no module has.", name)
    if not name.endswith(".alpha"):
        return None
    if tensor.shape not in {(), (1,)}:
        raise _unknown("An alpha is not one number.", f"{name} of shape {tensor.shape}")
    if tensor.dtype not in {*DTYPES, "F64"}:
        raise _unknown("An alpha has a dtype that is not accepted.", f"{name} of {tensor.dtype}")
    return name.removesuffix(".alpha")


def _factor(name: str, tensor: Tensor) -> tuple[str, bool]:
    """The module of a factor, and whether it is the first, which maps down to the rank."""
    for kind, pattern in OTHERS:
        if pattern.search(name):
            raise LoraNotSupported(
                f"This is {kind}, which is not supported.", received=name, accepted=ACCEPTED
            )
    found = _FACTOR.match(name)
    if found is None:
        raise _unknown("A tensor is no factor of a LoRA of a known form.", name)
    if tensor.dtype not in DTYPES:
        raise LoraNotSupported(
            "A factor has a dtype that is not accepted.",
            received=f"{name} of {tensor.dtype}",
            accepted=", ".join(DTYPES),
        )
    if len(tensor.shape) not in {2, 4} or 0 in tensor.shape:
        raise _unknown("A factor is no matrix and no convolution.", f"{name} of shape {tensor.shape}")
    side = found["peft"] or found["kohya"] or found["old"]
    # XLabs has two pairs a module: qkv_lora1 and qkv_lora2, proj_lora1 and proj_lora2
    return name[: found.end("module")] + (_numbered(name) if found["old"] else ""), side in _DOWN


def _numbered(name: str) -> str:
    found = re.search(r"_lora(\d)\.(down|up)\.weight\Z", name)
    return f"#{found[1]}" if found else ""


def _rank(module: str, pair: Mapping[bool, Tensor]) -> int:
    if len(pair) != 2:
        raise _unknown("A module has one factor and not two.", module)
    down, up = pair[True].shape, pair[False].shape
    if down[0] != up[1]:
        raise _unknown("The factors of a module have different ranks.", f"{module}: {down} and {up}")
    return down[0]


def _style(modules: Mapping[str, object]) -> LoraStyle:
    name = min(modules)
    return next((style for style, pattern in _STYLES if pattern.match(name)), LoraStyle.PEFT)


def _unknown(message: str, received: str) -> GiornataError:
    return LoraNotSupported(message, received=received, accepted=ACCEPTED)
