"""OpenAI's package for Node, as npm installs it, and the programs of `node/` that ask by it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

NODE: Final = Path(__file__).parent / "node"
INSTALL_S: Final = 120


def install(folder: Path) -> None:
    """Put the programs and the locked version of the package into `folder`; skips without Node or a registry."""
    missing = [program for program in ("node", "npm") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"missing: {', '.join(missing)}; apt-get install -y nodejs npm")
    for name in ("package.json", "package-lock.json", "client.mjs", "generate.mjs"):
        shutil.copy(NODE / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed OpenAI's package in {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"npm cannot install OpenAI's package: {done.stderr[-300:]}")


async def told(package: Path, program: str, *arguments: str) -> dict[str, Any]:
    """What a program in the folder `package` was told, as it prints it."""
    process = await asyncio.create_subprocess_exec(
        "node", program, *arguments,
        cwd=package, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(output)
    return found
