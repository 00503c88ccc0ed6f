"""The system of the Compose files, driven by the commands that ``docs/deploy.md`` and ``docs/replace.md`` give."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from giornata_tools.launcher.plan import KEPT_PORTS
from tests.lab.compose.bases import ROOT
from tests.lab.compose.engine import Engine, run

SINGLE: Final = ("-f", "deploy/compose.yaml")
CLUSTER: Final = (*SINGLE, "-f", "deploy/compose.cluster.yaml")
USER: Final = 10001
"""User id of the services in their containers."""
GATEWAYS: Final = 3
"""How many gateways the range of ports has room for."""
NAME: Final = "shop"
"""Name of the application."""


@dataclass(frozen=True)
class Application:
    """What `giornata keys add` has printed."""

    name: str
    """Name of the application and of its tenant."""
    api_key: str
    nats_url: str

    @property
    def headers(self) -> dict[str, str]:
        """Headers of its requests over HTTP."""
        return {"Authorization": f"Bearer {self.api_key}"}


class Stack:
    """Compose with the settings of this test; `files` may be changed to those of the cluster."""

    def __init__(self, engine: Engine, keys: Path, torch_index: str | None) -> None:
        self.engine = engine
        self.files: Sequence[str] = SINGLE
        nats = _free_ports(1 + GATEWAYS)
        first = nats + 1
        self.urls = [f"http://127.0.0.1:{port}" for port in range(first, first + GATEWAYS)]
        """Where gateways may listen."""
        self.webhook_secret = _webhook_secret(keys.parent)
        self.env = engine.env | {
            "COMPOSE_PROGRESS": "plain",
            "COMPOSE_ANSI": "never",
            "GIORNATA_KEYS_FOLDER": str(keys),
            "GIORNATA_WEBHOOK_SECRET_FILE": str(self.webhook_secret),
            "GIORNATA_WEBHOOK_NETWORKS": f"{engine.address}/32",
            "GIORNATA_NOTICE_S": "5",
            "GATEWAY_PORTS": f"127.0.0.1:{first}-{first + GATEWAYS - 1}",
            "NATS_PORTS": f"127.0.0.1:{nats}",
        }
        if torch_index is not None:
            self.env["TORCH_CPU_INDEX"] = torch_index
        self.application = self._new_application(keys, nats)

    def _new_application(self, keys: Path, nats: int) -> Application:
        giornata = Path(sys.executable).with_name("giornata")
        told = run(giornata, "keys", "add", NAME, "--file", keys / "keys.json")
        os.chown(keys / "keys.json", USER, USER)
        found = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        address = found["GIORNATA_NATS_URL"].replace("HOST:4222", f"127.0.0.1:{nats}")
        return Application(NAME, found["GIORNATA_API_KEY"], address)

    def compose(self, *arguments: str, profiles: Sequence[str] = ("cpu",), **env: str) -> str:
        """`docker compose` with the files of this stack; more environment by keyword."""
        chosen = [word for profile in profiles for word in ("--profile", profile)]
        return run(*self.engine.compose, *self.files, *chosen, *arguments, cwd=ROOT, env=self.env | env)

    def up(self, **env: str) -> None:
        """Start what is missing, and wait until everything is healthy."""
        self.compose("up", "--detach", "--wait", **env)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self.compose("ps", "--quiet", service).split()

    def services(self) -> dict[str, list[str]]:
        """Ids of the running containers, by service."""
        rows = [json.loads(line) for line in self.compose("ps", "--format", "json").splitlines()]
        found: dict[str, list[str]] = {}
        for row in rows:
            found.setdefault(row["Service"], []).append(row["ID"])
        return found

    def images(self, profiles: Sequence[str]) -> dict[str, str]:
        """Names of the images that these profiles build, by the Dockerfile's argument ``SERVICE``."""
        config = json.loads(self.compose("config", "--format", "json", profiles=profiles))
        built = (described for described in config["services"].values() if "build" in described)
        return {described["build"]["args"]["SERVICE"]: described["image"] for described in built}

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of a container."""
        [told] = json.loads(self.engine.docker("inspect", container))
        described: dict[str, Any] = told
        return described

    def replace(self, service: str) -> None:
        """Replace all instances by the block of commands of the page that says how."""
        page = (ROOT / "docs" / "replace.md").read_text(encoding="utf-8")
        block = re.search(r"```sh\n(compose=\"docker compose .*?)```", page, re.DOTALL)
        assert block is not None
        commands, n = re.subn(r"service=\w+\n", f"service={service}\n", block[1])
        assert n == 1
        commands = commands.replace("docker compose", " ".join(self.engine.compose))
        run("bash", "-euo", "pipefail", "-c", commands, cwd=ROOT, env=self.env)

    def logs(self) -> str:
        """Logs of all containers."""
        return self.compose("logs", "--no-color", "--timestamps")


def _webhook_secret(folder: Path) -> Path:
    """A file that the gateway's user alone may read."""
    file = folder / "webhooks.secret"
    file.touch(mode=0o400)
    file.write_text(secrets.token_urlsafe(32) + "\n")
    os.chown(file, USER, USER)
    return file


def _free_ports(n: int) -> int:
    """The first of `n` free ports in a row, for servers that are started again."""
    while True:
        first = random.SystemRandom().choice(KEPT_PORTS)
        with ExitStack() as opened, suppress(OSError):
            for port in range(first, first + n):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@contextmanager
def composed(engine: Engine, folder: Path, torch_index: str | None) -> Iterator[Stack]:
    """A stack that has not been started; nothing of it is left afterwards but its images."""
    keys = folder / "keys"
    keys.mkdir()
    stack = Stack(engine, keys, torch_index)
    try:
        yield stack
    finally:
        (folder / "compose.log").write_text(stack.logs(), encoding="utf-8")
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")
