"""What one hostile request costs the others: how long another client waits meanwhile, and the gateway's memory.

A gateway in a process of its own, with keys, real NATS and Valkey. One client asks `/healthz` again and again; another
sends an attack a few times. Each attack has a fresh gateway, so that its peak of memory is the attack's.

Writes ``out/bench/hostile_inputs.json``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import uvloop

from giornata.bus import bus
from giornata.wire import subjects
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.systems.servers import embedded
from tests.fakes.key_files import write_keys
from tests.integration.gateway_fakes import listening_port
from tests.lab.fuzz.seeds import PART

MIB: Final = 1 << 20
KEY: Final = "gio_bench"
MODULE: Final = "tests.lab.bench.hostile_inputs"
SEND: Final = "--send"
"""Begins the arguments of the process that sends an attack: its name, the gateway's port and NATS."""
TIMES: Final = 2
"""How often each attack is sent, one after the other."""
PING: Final = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
JSON: Final = "application/json"
FORM: Final = "multipart/form-data; boundary=b"
PAUSE_S: Final = 0.005
"""Between two questions of the other client."""


@dataclass(frozen=True)
class AttackedGateway:
    """A running gateway: where it listens, its process, and the NATS server of both."""

    port: int
    pid: int
    nats_url: str


Attack = Callable[[AttackedGateway], Coroutine[Any, Any, object]]


async def main() -> None:
    """Measure, print and write."""
    rows, chosen = [], sys.argv[1:]
    if chosen[:1] == [SEND]:
        _, name, port, nats_url = chosen
        await ATTACKS[name](AttackedGateway(int(port), 0, nats_url))
        return
    with embedded() as (nats_url, redis_url):
        for name in ATTACKS:
            if chosen and not any(word in name for word in chosen):
                continue
            async with _gateway(nats_url, redis_url) as gateway:
                before_mib = _peak_mib(gateway)
                waits_ms = await _waits(gateway, name)
                quiet_ms = await _waits(gateway, None)
                rows.append(
                    {
                        "attack": name,
                        "other's longest wait": f"{max(waits_ms):.0f} ms",
                        "without it": f"{max(quiet_ms):.0f} ms",
                        "memory before": f"{before_mib:.0f} MiB",
                        "peak": f"{_peak_mib(gateway):.0f} MiB",
                    }
                )
                print(rows[-1], flush=True)
    write("hostile_inputs", rows, workload={"times": TIMES})


async def _waits(gateway: AttackedGateway, name: str | None) -> list[float]:
    """Milliseconds of each question of another client while an attack is sent, from a process of its own, or none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    waits_ms: list[float] = []

    async def ask() -> None:
        while True:
            began_s = time.perf_counter()
            writer.write(PING)
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(found[1]) if found else 0)
            waits_ms.append((time.perf_counter() - began_s) * 1e3)
            await asyncio.sleep(PAUSE_S)

    asking = asyncio.create_task(ask())
    for _ in range(TIMES):
        if name is None:
            await asyncio.sleep(0.5)
            continue
        sent = (SEND, name, str(gateway.port), gateway.nats_url)
        sending = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, *sent)
        await sending.wait()
    await asyncio.sleep(0.2)  # the last of its work
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    writer.close()
    return waits_ms


def posted(path: str, content_type: str, body: Callable[[], bytes], chunk: int = 0) -> Attack:
    """A request with a body, in chunks of HTTP of so many bytes where it says so; the answer is read."""

    async def attack(gateway: AttackedGateway) -> None:
        data = body()
        length = "Transfer-Encoding: chunked" if chunk else f"Content-Length: {len(data)}"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: {content_type}\r\n{length}\r\n\r\n"
        )
        if chunk:
            parts = (data[at : at + chunk] for at in range(0, len(data), chunk))
            data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1 << 24)
        answer = asyncio.create_task(reader.read())
        with suppress(ConnectionError):
            writer.write(head.encode())
            view = memoryview(data)
            for at in range(0, len(view), 1 << 18):
                writer.write(view[at : at + (1 << 18)])
                await writer.drain()
                if answer.done():
                    break
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(60):
                await answer
        writer.close()

    return attack


def asked(data: Callable[[], bytes], headers: Callable[[], dict[str, str]] = dict) -> Attack:
    """A message to `giornata.edit`."""

    async def attack(gateway: AttackedGateway) -> None:
        async with bus.connect(gateway.nats_url, "attacker") as connected:
            with suppress(TimeoutError, Exception):
                await connected.client.request(subjects.EDIT, data(), timeout=30, headers=headers())

    return attack


def _message(rest: bytes) -> bytes:
    return (
        bytes(msgpack.packb({"schema": 1, "parameters": {"prompt": "x"}, "image": b"x", "x": None})[:-1])
        + rest
    )


ATTACKS: Final[dict[str, Attack]] = {
    "72 MB of lists in JSON": posted(
        "/v1/images/generations", JSON, lambda: b'{"prompt":[' + b"[]," * (23 * MIB) + b"[]]}"
    ),
    "8 MB of 700,000 unknown names": posted(
        "/v1/images/generations",
        JSON,
        lambda: b"{" + b",".join(b'"u%06d":0' % number for number in range(700_000)) + b"}",
    ),
    "70 MB of one text in JSON": posted(
        "/v1/images/generations", JSON, lambda: b'{"prompt":"' + b"x" * (70 * MIB) + b'"}'
    ),
    "70 MB of escapes in JSON": posted(
        "/v1/images/generations", JSON, lambda: b'{"prompt":"' + b"\\u0041" * (11 * MIB) + b'"}'
    ),
    "70 MB of one number in JSON": posted(
        "/v1/images/generations", JSON, lambda: b'{"prompt":"x","seed":' + b"1" * (70 * MIB) + b"}"
    ),
    "40 MB of base64 (A1111)": posted(
        "/sdapi/v1/img2img", JSON, lambda: b'{"prompt":"x","init_images":["' + b"Ab/+" * (10 * MIB) + b'"]}'
    ),
    "40 MB of base64 (a reference)": posted(
        "/v1/images/generations",
        JSON,
        lambda: b'{"prompt":"x","reference":["' + b"Ab/+" * (10 * MIB) + b'"]}',
    ),
    "8 MB of lines before a form": posted(
        "/v1/images/edits", FORM, lambda: b"\r\n" * (4 * MIB) + b"--b--\r\n"
    ),
    "a form of 47 x 120 headers": posted(
        "/v1/images/edits",
        FORM,
        lambda: PART.format("n", "1").replace("\r\n\r\n", "\r\n" + "X: y\r\n" * 120 + "\r\n").encode() * 47,
    ),
    "4 MB of JSON in chunks of 1 byte": posted(
        "/v1/images/generations", JSON, lambda: b'{"prompt":"' + b"x" * (4 * MIB) + b'"}', chunk=1
    ),
    "8 MB of lists over NATS, no key": asked(
        lambda: _message(b"\xdd" + (7 * MIB).to_bytes(4, "big") + b"\x90" * (7 * MIB))
    ),
    "6 MB of names over NATS, no key": asked(
        lambda: bytes(msgpack.packb({f"u{number}": 0 for number in range(500_000)}))
    ),
    "7 MB of headers over NATS": asked(
        lambda: _message(b"\xc0"), lambda: {f"h{number}": "x" for number in range(500_000)}
    ),
}


@asynccontextmanager
async def _gateway(nats_url: str, redis_url: str) -> AsyncIterator[AttackedGateway]:
    with tempfile.TemporaryDirectory(prefix="gio-") as name:
        folder = Path(name)
        options = {
            "NATS_URL": nats_url,
            "BLOBS_URL": redis_url,
            "PORT": "0",
            "PORT_FILE": str(folder / "port"),
            "API_KEYS_FILE": str(write_keys(folder, {KEY: "alice"})),
            "NOTICE_S": "0",
        }
        environment = os.environ | {f"GIORNATA_{option}": value for option, value in options.items()}
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "giornata_gateway", env=environment, stdout=log, stderr=log
            )
        try:
            port = await listening_port(folder / "port")
            await asyncio.sleep(1)  # the NATS door opens once the gateway has listened for routers
            yield AttackedGateway(port, process.pid, nats_url)
            if process.returncode is not None:
                raise SystemExit((folder / "log").read_text())
        except OSError as error:
            raise SystemExit((folder / "log").read_text()) from error
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()


def _peak_mib(gateway: AttackedGateway) -> float:
    status = Path(f"/proc/{gateway.pid}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else float("nan")


if __name__ == "__main__":
    uvloop.run(main())
