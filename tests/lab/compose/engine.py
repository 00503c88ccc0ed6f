"""A Docker engine of the tests' own: a data root and a socket in a folder, and no registry."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PROGRAMS: Final = ("docker", "dockerd", "debootstrap", "iptables", "tar")
COMPOSE: Final = (2, 20)
"""The first version that knows ``depends_on.required``."""
COMPOSE_COMMANDS: Final = (("docker", "compose"), ("docker-compose",))
"""The plugin, and the program of its own that some packages bring instead."""
INSTALL: Final = (
    "apt-get install -y docker.io iptables debootstrap docker-compose (Debian 13's, on Debian 12 too)"
)
"""What brings all of it; Debian 12's own docker-compose is too old."""
UP: Final = "API listen on"
STARTS_S: Final = 120.0
STOPS_S: Final = 60.0


class NoEngine(Exception):
    """No Docker engine can be had here."""


class CommandFailed(Exception):
    """A command has failed; the text is the command and the end of what it wrote."""


def run(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, given: str = ""
) -> str:
    """Run a program, with `given` on its standard input; what it has written to its standard output."""
    done = subprocess.run(command, cwd=cwd, env=env, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(map(str, command))
        raise CommandFailed(f"{words}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-8000:]}")
    return done.stdout


def compose_version(command: tuple[str, ...]) -> tuple[int, ...]:
    """Version of Compose by this command; empty where there is none."""
    try:
        told = run(*command, "version", "--short")
    except (CommandFailed, OSError):
        return ()
    return tuple(map(int, re.findall(r"\d+", told)[:2]))


def compose_command() -> tuple[str, ...]:
    """The first command that is a Compose of at least :data:`COMPOSE`.

    Raises:
        NoEngine: there is none; it says which there are.
    """
    found = {command: compose_version(command) for command in COMPOSE_COMMANDS}
    for command, version in found.items():
        if version >= COMPOSE:
            return command
    told = ", ".join(
        f"{' '.join(command)} {'.'.join(map(str, version)) or 'missing'}"
        for command, version in found.items()
    )
    raise NoEngine(f"needs Compose {COMPOSE[0]}.{COMPOSE[1]} or newer, found {told}; {INSTALL}")


def check_programs() -> None:
    """NoEngine if this user or this machine cannot start an engine."""
    if os.geteuid() != 0:
        raise NoEngine("only root starts a Docker engine")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise NoEngine(f"missing programs: {', '.join(missing)}; {INSTALL}")


class Engine:
    """A running engine. Make it with :func:`running`."""

    def __init__(self, host: str, compose: tuple[str, ...]) -> None:
        self.compose: Final = compose
        """The command that is Compose here."""
        self.env = {**os.environ, "DOCKER_HOST": host, "DOCKER_BUILDKIT": "1"}
        """Environment of programs that use it."""

    def docker(self, *arguments: str | Path, given: str = "") -> str:
        """`docker` with these arguments; its output."""
        return run("docker", *arguments, env=self.env, given=given)

    def has_image(self, name: str) -> bool:
        """Whether there is such an image."""
        return bool(self.docker("images", "--quiet", name).strip())

    @property
    def address(self) -> str:
        """This machine's address, as containers see it.

        At its first start an engine tells no gateway of its bridge: then it is the first address of the subnet.
        """
        [bridge] = json.loads(self.docker("network", "inspect", "bridge"))
        config = bridge["IPAM"]["Config"][0]
        return str(config.get("Gateway") or ipaddress.ip_network(config["Subnet"])[1])


@contextmanager
def running(folder: Path) -> Iterator[Engine]:
    """An engine that keeps everything below `folder`, while inside.

    Raises:
        NoEngine: it did not come up, with the end of its log.
    """
    check_programs()
    compose = compose_command()
    host, log = f"unix://{folder}/s", folder / "dockerd.log"
    command = ["dockerd", "--host", host]
    places = {"--data-root": "data", "--exec-root": "exec", "--pidfile": "pid"}
    for flag, name in places.items():
        command += [flag, str(folder / name)]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    listens = threading.Event()

    def keep_log() -> None:
        assert daemon.stderr is not None
        with daemon.stderr, log.open("w", encoding="utf-8") as kept:
            for line in daemon.stderr:
                kept.write(line)
                kept.flush()
                if UP in line:
                    listens.set()
        listens.set()

    reader = threading.Thread(target=keep_log, name="dockerd's log")
    reader.start()
    try:
        if not listens.wait(STARTS_S) or daemon.poll() is not None:
            raise NoEngine(f"dockerd did not come up: {log.read_text(encoding='utf-8')[-500:]}")
        yield Engine(host, compose)
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOPS_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
        reader.join()
        if (left := folder / "exec" / "netns" / "default").is_mount():
            run("umount", left)
