"""LoRA files by their headers alone: read without torch and without their tensors, and recognised within limits."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from giornata.lora_files import ALPHA, FactorName, read_factor_name
from giornata.wire.errors import GiornataError, LoraNotSupported, LoraTooLarge, LoraUnreadable
from giornata.wire.loras import LoraStyle

TENSOR_QUOTES: Final = 10
"""Quotes of a tensor in a header: two each of its name, its three fields and its dtype."""
OTHER_QUOTES: Final = 1 << 14
"""Quotes of a trainer's notes, which have about a hundred names; those within texts are escaped."""
LENGTH: Final = struct.Struct("<Q")
SAFETENSORS: Final = "a whole file of safetensors"
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
    header_bytes: int = 4 << 20


@dataclass(frozen=True)
class LoraHeader:
    """The contents of a LoRA file's header."""

    style: LoraStyle
    rank: int
    """The largest of any module."""
    modules: int


def inspect_file(path: Path, limits: LoraSizeLimits) -> LoraHeader:
    """Return what the header of a file says; raises as :func:`read_header` and :func:`recognise_header`. Blocking."""
    return recognise_header(read_header(path, limits.header_bytes, limits.tensors), limits)


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


def read_header(path: Path, limit_bytes: int, most_tensors: int) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor in a file.

    The library reads the header into its own types, and refuses every other structure, before Python makes objects of
    it. It checks that tensors do not overlap, leave no hole and fill the file. It takes the last of two tensors with
    one name, so names are checked here.

    Raises:
        LoraUnreadable: it is no file of safetensors, or not a whole one.
        LoraTooLarge: its header is larger than `limit_bytes`, or has more than `most_tensors`.
    """
    text = _header_text(path, limit_bytes)
    quotes = text.count(b'"') - text.count(b'\\"')
    if quotes > (most := TENSOR_QUOTES * most_tensors + OTHER_QUOTES):
        raise LoraTooLarge(
            "The header has too many names.", received=f"{quotes} quotes", accepted=f"at most {most}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            _check_names(text)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            return {name: TensorInfo(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise LoraUnreadable(received=str(error), accepted=SAFETENSORS) from error


def _header_text(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        head = file.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise LoraUnreadable(received=f"{len(head)} bytes", accepted=SAFETENSORS)
        (size_bytes,) = LENGTH.unpack(head)
        left = path.stat().st_size - LENGTH.size
        if size_bytes > left:
            received = f"a header of {size_bytes} bytes in {left} bytes"
            raise LoraUnreadable(
                "The file is not whole safetensors; maybe it is another format, such as a pickle.",
                received=received,
                accepted=SAFETENSORS,
            )
        if size_bytes > limit_bytes:
            raise LoraTooLarge(
                "The header is too large.", received=f"{size_bytes} bytes", accepted=f"at most {limit_bytes}"
            )
        return file.read(size_bytes)


def _check_names(text: bytes) -> None:
    """ValueError where a map in a header has a name twice; what the maps hold is let go of at once."""

    def once_each(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise ValueError(f"the name {twice!r} is given twice")

    json.loads(text, object_pairs_hook=once_each)
