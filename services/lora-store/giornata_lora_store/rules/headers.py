"""The recognition of LoRA files by their headers alone, and what a record keeps of how late one may join. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from giornata.lora_names import ALPHA, FactorName, read_factor_name
from giornata.wire.errors import GiornataError, InvalidField, LoraMismatch, LoraNotSupported, LoraTooLarge
from giornata.wire.loras import LoraRecord, LoraStyle, ProfiledLora

# Which files are LoRAs, by names, shapes and dtypes of their tensors alone. Prepost checks their values.


DTYPES: Final = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes of factors, as safetensors calls them."""
ALPHA_DTYPES: Final = (*DTYPES, "F64", "I64", "I32", "I16", "I8", "U8")
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
)
"""What a tensor's name betrays to be something else."""
CONTROL: Final = re.compile(r"lora_controlnet|(query|key)_norm\.scale$|\.norm_(added_)?[qk]\.weight$")
"""What one tensor of a Control LoRA betrays of the whole file, whose factors may have biases, too."""
_NAME: Final = re.compile(r"(?!.*\d{4})[A-Za-z0-9_.-]{1,512}\Z")
"""Converters count to the largest number in a name; no network has a thousand blocks."""
_STYLES: Final[tuple[tuple[LoraStyle, re.Pattern[str]], ...]] = (
    (LoraStyle.XLABS, re.compile(r"(double|single)_blocks\.\d+\.processor\.")),
    (LoraStyle.KOHYA, re.compile(r"lora_(unet|te\d?|transformer|prior)_|lycoris_")),
    (LoraStyle.ORIGINAL, re.compile(r"diffusion_model\.|base_model\.model\.(double|single)_blocks\.")),
    (LoraStyle.DIFFUSERS, re.compile(r"(transformer|unet|text_encoder(_\d)?)\.")),
)
"""By how names of modules begin; PEFT's begin with a module of the network itself."""


class TensorInfo(NamedTuple):
    """A tensor of a header."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LoraSizeLimits:
    """The largest LoRA that is accepted."""

    rank: int
    tensors: int


@dataclass(frozen=True)
class LoraHeader:
    """The contents of a LoRA file's header."""

    style: LoraStyle
    rank: int
    """The largest of any module."""
    modules: int


def recognise_header(tensors: Mapping[str, TensorInfo], limits: LoraSizeLimits) -> LoraHeader:
    """Return what a file with these tensors is.

    Raises:
        LoraNotSupported: something else than a LoRA, or one of an unknown form; the text names the first such tensor.
        LoraTooLarge: more tensors, or a larger rank, than the limits allow.
    """
    if len(tensors) > limits.tensors:
        raise LoraTooLarge(received=f"{len(tensors)} tensors", accepted=f"at most {limits.tensors}")
    factors: defaultdict[str, dict[bool, TensorInfo]] = defaultdict(dict)
    scaled: set[str] = set()
    if control := next((name for name in sorted(tensors) if CONTROL.search(name)), None):
        raise _other_kind("Control LoRA", control)
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
    return LoraHeader(_style(factors), rank, len(factors))


def _scaled(name: str, tensor: TensorInfo) -> str | None:
    """The module whose alpha a tensor is; None if it is a factor."""
    if not _NAME.match(name):
        raise _unknown("A tensor has a name that no module has.", name)
    if not name.endswith(ALPHA):
        return None
    if tensor.shape not in {(), (1,)}:
        raise _unknown("An alpha is not one number.", f"{name} of shape {tensor.shape}")
    if tensor.dtype not in ALPHA_DTYPES:
        raise _unknown("An alpha has a dtype that is not accepted.", f"{name} of {tensor.dtype}")
    return name.removesuffix(ALPHA)


def _factor(name: str, tensor: TensorInfo) -> FactorName:
    """Return what the name of a factor says."""
    for kind, pattern in OTHERS:
        if pattern.search(name):
            raise _other_kind(kind, name)
    found = read_factor_name(name)
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
    return found


def _rank(module: str, pair: Mapping[bool, TensorInfo]) -> int:
    if len(pair) != 2:
        raise _unknown("A module has one factor and not two.", module)
    down, up = pair[True].shape, pair[False].shape
    if down[0] != up[1]:
        raise _unknown("The factors of a module have different ranks.", f"{module}: {down} and {up}")
    return down[0]


def _style(modules: Mapping[str, object]) -> LoraStyle:
    name = min(modules)
    return next((style for style, pattern in _STYLES if pattern.match(name)), LoraStyle.PEFT)


def _other_kind(kind: str, received: str) -> GiornataError:
    return LoraNotSupported(f"This is {kind}, which is not supported.", received=received, accepted=ACCEPTED)


def _unknown(message: str, received: str) -> GiornataError:
    return LoraNotSupported(message, received=received, accepted=ACCEPTED)


# What a record keeps of how late its LoRA may join. Pure.


def check_share(share: float) -> None:
    """Raise InvalidField unless `share` is a part of the steps, and not all of them."""
    if not 0 <= share < 1:
        raise InvalidField(field="joins_within", received=share, accepted="0 to below 1")


def with_share(record: LoraRecord, told: ProfiledLora) -> LoraRecord:
    """`record` with what was `told`; LoraMismatch where pictures of another file or checkpoint were compared."""
    canonical = record.canonical
    if canonical is None or (canonical.file.sha256, canonical.model_digest) != (
        told.sha256,
        told.model_digest,
    ):
        raise LoraMismatch(
            f"The LoRA {record.lora_id} is another file, or for another checkpoint, than the one that was profiled.",
            received=f"file {told.sha256[:12]}, checkpoint {told.model_digest[:12]}",
            accepted="none: it is not ready"
            if canonical is None
            else f"file {canonical.file.sha256[:12]}, checkpoint {canonical.model_digest[:12]}",
        )
    return record.model_copy(update={"joins_within": told.joins_within})
