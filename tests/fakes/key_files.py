"""Files of API keys, with keys that tests can read."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from giornata import api_keys
from giornata.api_keys import KeysFile, TenantLimits

CREATED = datetime(2026, 11, 22, tzinfo=UTC)


def keys_of(keys: dict[str, str], limits: dict[str, TenantLimits] | None = None) -> KeysFile:
    """A file with `keys`, each with its tenant, and what some tenants may do."""
    file = KeysFile()
    for key, tenant in keys.items():
        file = api_keys.with_key(file, key, tenant, CREATED)
    for tenant, changes in (limits or {}).items():
        file = api_keys.with_limits(file, tenant, changes)
    return file


def write_keys(folder: Path, keys: dict[str, str], limits: dict[str, TenantLimits] | None = None) -> Path:
    """The path of a file in `folder` that holds them."""
    path = folder / "keys.json"
    path.write_text(api_keys.render(keys_of(keys, limits)))
    return path
