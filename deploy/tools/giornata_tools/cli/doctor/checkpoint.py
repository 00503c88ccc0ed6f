"""The checkpoint to serve: a folder, or a repository of the hub, which is not asked.

Cache and token are looked for where huggingface_hub does: it belongs to the services that compute, and may be absent.
"""

from __future__ import annotations

from os import environ
from pathlib import Path

from giornata.families import read_model_card
from giornata_tools.cli.doctor.finding import Finding, fail, ok, warn


def model(source: str | None) -> Finding:
    """The checkpoint that ``GIORNATA_MODEL`` names can be read."""
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
    return ok(f"{card.name}: {card.family}, {card.default_steps} steps by default")


def _on_hub(source: str) -> Finding:
    if _cached(source):
        return ok(f"{source} is in the hub's cache")
    if _has_token():
        return ok(f"{source} is to be fetched from the hub, with the token of this machine")
    return warn(
        f"{source} is not in the hub's cache, and there is no token: it can be fetched only if it is not gated.",
        "If it is gated, accept its terms on the hub and set HF_TOKEN.",
    )


def _cached(source: str) -> bool:
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or _home() / "hub"
    folder = Path(cache).expanduser() / f"models--{source.replace('/', '--')}"
    return any(folder.glob("snapshots/*/model_index.json"))


def _has_token() -> bool:
    """Whether there is a token, in the environment or as ``hf auth login`` leaves it."""
    if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return Path(environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser().is_file()


def _home() -> Path:
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or caches / "huggingface").expanduser()
