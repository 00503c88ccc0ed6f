"""The checkpoint to serve: a folder, or a repository of the hub, which is not asked.

Cache and token are looked for where huggingface_hub does: it belongs to the services that compute, and may be absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import environ
from pathlib import Path
from typing import Final

import click

from giornata import machine
from giornata.memory_plan import CONTEXT_BYTES, USABLE, plan_device
from giornata.model_cards import ITEM_BYTES, TEMPLATE_BITS, level_bytes, model_memory, read_model_card
from giornata.planning.specs import LEAST_LEVELS
from giornata.wire.models import ModelCard
from giornata_tools.cli.doctor.finding import DoctorFinding, fail, ok, warn
from giornata_tools.cli.doctor.machine import GIB
from giornata_tools.launcher.model import StackModel, repeated_name

GB: Final = 10**9
GPU_GB: Final = (16, 24, 32, 48, 80, 96, 141, 192)
"""Sizes of GPUs that there are."""


def model(source: str | None, memory_bytes: int | None = None) -> DoctorFinding:
    """The checkpoint that ``GIORNATA_MODEL`` names can be read, and its templates fit into `memory_bytes`.

    Their default is what a denoiser would have on this machine.
    """
    if source is None:
        return ok("none is named; the built-in one is served")
    folder = Path(source)
    if not folder.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            return fail(
                f"There is no folder {source}.",
                "Name a diffusers folder, or an id of the hub like owner/name.",
            )
        return _on_hub(source)
    try:
        card = read_model_card(folder)
    except (ValueError, OSError) as error:
        return fail(f"{error}.", "Name the folder of a diffusers checkpoint, the one with model_index.json.")
    known = f"{card.name}: {card.family}, {card.default_steps} steps by default"
    return _with_templates(folder, card, known, _template_bytes() if memory_bytes is None else memory_bytes)


def device(source: str, device_bytes: int) -> DoctorFinding:
    """A denoiser and a prepost of a checkpoint fit on one GPU of so many bytes; if not, what would fit."""
    folder = Path(source) if Path(source).is_dir() else _cached(source)
    if folder is None:
        return fail(f"{source} is no folder, and not in the hub's cache.", f"Fetch it: hf download {source}")
    try:
        side = read_model_card(folder).native_size
        item_bytes = 4 if environ.get("GIORNATA_DTYPE") == "float32" else ITEM_BYTES
        model, fewer = (model_memory(folder, item_bytes, quantized=how) for how in (False, True))
        halved = model_memory(folder)
    except (ValueError, OSError) as error:
        return fail(f"{error}.", "Name the folder of a diffusers checkpoint with its weights.")
    prepost, rows = plan_device(device_bytes, model, side**2)
    sizes = {
        "the network": model.network,
        "text encoders": model.encoders,
        "the autoencoder": model.autoencoder,
        f"decoding {side} x {side}": model.pixel * side**2,
        "each row": model.row(side**2),
        "each process": CONTEXT_BYTES,
        "host memory while the denoiser loads": model.network,
        "and prepost": model.encoders + model.autoencoder,
    }
    quantized = plan_device(device_bytes, fewer, side**2)[1]
    apart = int((USABLE * device_bytes - model.denoiser(side**2, 0)) // model.row(side**2))
    ways = {"GIORNATA_DTYPE=bfloat16": plan_device(device_bytes, halved, side**2)[1]}
    ways |= {"GIORNATA_QUANTIZE=int8": quantized, "prepost elsewhere": apart}
    ways |= {f"a GPU of {gb} GB": plan_device(gb * GB, model, side**2)[1] for gb in GPU_GB}
    better = [f"{way} has room for {more} in a step" for way, more in ways.items() if more > max(0, rows)]
    told = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in sizes.items())
    remedy = f"Of rows of that size {'; '.join(better[:3])}." if better else "Take a smaller model."
    if rows < 1:
        return fail(f"{told}. {device_bytes / GB:.0f} GB have no room for one row beside prepost.", remedy)
    fit = f"{told}. {device_bytes / GB:.0f} GB have room for {rows} row{'s'[: rows > 1]} in a step beside prepost"
    if prepost.encoders:
        return ok(fit)
    return warn(f"{fit}, once its text encoders are on the CPU: GIORNATA_TEXT_ENCODERS=auto.", remedy)


def size_of(text: str) -> int:
    """Bytes of a size such as ``80GB``; click.BadParameter for another."""
    number = text.upper().removesuffix("GB").strip()
    if not number.isdecimal() or not int(number):
        raise click.BadParameter(f"{text} is no size; write it as 80GB")
    return int(number) * GB


def names(models: Sequence[StackModel]) -> DoctorFinding:
    """Requests tell several models by their names."""
    if twice := repeated_name(models):
        return fail(f"Several models have the name {twice}.", "Give each its own: --model NAME=FOLDER.")
    return ok(", ".join(model.served_name for model in models))


def _with_templates(folder: Path, card: ModelCard, known: str, room: int) -> DoctorFinding:
    """Memory has room for one template of the model's native size, with as many noise levels as pictures need."""
    least = LEAST_LEVELS * level_bytes(folder, card, TEMPLATE_BITS)
    if least <= room:
        return ok(known)
    return warn(
        f"{known}; one template of {card.native_size} x {card.native_size} pixels takes {least / GIB:.1f} GiB, and "
        f"{room / GIB:.1f} GiB of memory are for templates: blocks that are left out are computed in full.",
        "Raise GIORNATA_TEMPLATE_MEMORY_MB, or name a GIORNATA_TEMPLATE_FOLDER.",
    )


def _template_bytes() -> int:
    """What a denoiser keeps of templates in memory, as it is configured here."""
    asked = environ.get("GIORNATA_TEMPLATE_MEMORY_MB", "")
    return int(asked) << 20 if asked.isdecimal() else machine.memory_bytes() // machine.HOST_SHARE


def _on_hub(source: str) -> DoctorFinding:
    if _cached(source) is not None:
        return ok(f"{source} is in the hub's cache")
    if _has_token():
        return ok(f"{source} is to be fetched from the hub, with the token of this machine")
    return warn(
        f"{source} is not in the hub's cache, and there is no token: it can be fetched only if it is not gated.",
        "If it is gated, accept its terms on the hub and set HF_TOKEN.",
    )


def _cached(source: str) -> Path | None:
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or _home() / "hub"
    folder = Path(cache).expanduser() / f"models--{source.replace('/', '--')}"
    return next((index.parent for index in folder.glob("snapshots/*/model_index.json")), None)


def _has_token() -> bool:
    """Whether there is a token, in the environment or as ``hf auth login`` leaves it."""
    if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return Path(environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser().is_file()


def _home() -> Path:
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or caches / "huggingface").expanduser()
