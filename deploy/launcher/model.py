"""The checkpoint to serve: the one that ``GIORNATA_MODEL`` names, else the built-in one, built once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.launcher.process import LaunchError
from giornata.models import Family

ROOT: Final = Path(__file__).parents[2]
"""The repository."""
BUILDER: Final = ROOT / "deploy" / "model"
"""The package that builds the checkpoint; its digest names the cached result."""
SEED: Final = 0


@dataclass(frozen=True)
class Model:
    """What the services are told."""

    source: str
    """Local folder or hub id."""
    name: str | None
    """How requests call it; None for the folder's name."""


async def choose(env: Mapping[str, str], family: Family, cache: Path, say: Callable[[str], None]) -> Model:
    """The model that `env` names, else the built-in one of `family`, built into `cache` once.

    Raises:
        LaunchError: the build failed.
    """
    if named := env.get("GIORNATA_MODEL"):
        return Model(named, env.get("GIORNATA_MODEL_NAME"))
    folder = cache / f"{family}-{builder_digest(BUILDER)}"
    if not folder.exists():
        say(f"Building the model {family} into {folder} (once).")
        await _build(family, folder)
    return Model(str(folder), f"tiny-{family}")


def builder_digest(folder: Path) -> str:
    """12 hex digits of the sha-256 over the builder's source files: another builder, another checkpoint."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


async def _build(family: Family, folder: Path) -> None:
    """Build beside `folder` and rename, so that it is there as a whole or not at all.

    In a process of its own: building imports torch, which the launcher need not hold.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    command = (
        sys.executable,
        "-m",
        "deploy.model.build",
        str(unfinished),
        "--family",
        family,
        "--seed",
        str(SEED),
    )
    try:
        child = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await child.communicate()
        if child.returncode:
            said = output.decode(errors="replace")[-2000:]
            raise LaunchError(f"The model {family} could not be built:\n{said}")
        with contextlib.suppress(FileExistsError):  # somebody else was faster
            unfinished.rename(folder)  # noqa: ASYNC240 - one call
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
