"""What this machine has of the hub: checkpoints in its cache, a token. Where huggingface_hub looks.

That package belongs to the services that compute, and so may be absent here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cached(source: str, env: Mapping[str, str]) -> bool:
    """Whether the checkpoint `source`, OWNER/NAME, was fetched before; `env` says where the cache is."""
    cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or _home(env) / "hub"
    folder = Path(cache).expanduser() / f"models--{source.replace('/', '--')}"
    return any(folder.glob("snapshots/*/model_index.json"))


def has_token(env: Mapping[str, str]) -> bool:
    """Whether there is a token, in `env` or as ``hf auth login`` leaves it."""
    if env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return Path(env.get("HF_TOKEN_PATH") or _home(env) / "token").expanduser().is_file()


def _home(env: Mapping[str, str]) -> Path:
    caches = Path(env.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(env.get("HF_HOME") or caches / "huggingface").expanduser()
