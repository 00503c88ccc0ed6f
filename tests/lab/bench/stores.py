"""Blob stores beside each other: put and get of pictures. ``python -m tests.lab.bench.stores``.

Prints a table and writes ``out/bench/stores.json``: milliseconds of one put and one get with its checks, by size.
Baseline: Valkey over a unix socket, appending to disk. Ours: SeaweedFS's S3 server. All on one machine.
"""

from __future__ import annotations

import os
from unittest import mock

import uvloop

from giornata.blobs import BlobStore, open_blobs
from giornata.wire.jobs import BlobRef
from giornata_lab.bench.payloads import repeat
from giornata_lab.bench.reporting.report import Measurement, write
from giornata_lab.bench.systems.servers import embedded
from tests.s3_server import CREDENTIALS, s3_server

SIZES_MB = (1, 5, 16)
REPEATS = 30


async def main() -> None:
    """Measure every size in both stores, in one run."""
    rows = []
    with embedded() as (_, valkey), s3_server(volume_mb=1024) as s3, mock.patch.dict(os.environ, CREDENTIALS):
        async with open_blobs(valkey) as baseline, open_blobs(s3.url()) as ours:
            for size_mb in SIZES_MB:
                put_valkey, get_valkey = await _measured(baseline, size_mb)
                put_s3, get_s3 = await _measured(ours, size_mb)
                rows.append(
                    {
                        "megabytes": size_mb,
                        "ratio": put_valkey.p50_ms / put_s3.p50_ms,
                        "valkey_put_ms": put_valkey.as_dict(),
                        "valkey_get_ms": get_valkey.as_dict(),
                        "s3_put_ms": put_s3.as_dict(),
                        "s3_get_ms": get_s3.as_dict(),
                    }
                )
    write("stores", rows, workload={"repeats": REPEATS, "sizes_mb": SIZES_MB})


async def _measured(blobs: BlobStore, size_mb: int) -> tuple[Measurement, Measurement]:
    """Put, and get of what was put last."""
    data, last = os.urandom(size_mb << 20), list[BlobRef]()

    async def put() -> None:
        last[:] = [await blobs.put("bench", data, 60)]

    async def get() -> None:
        await blobs.get(last[0])

    return await repeat(put, REPEATS), await repeat(get, REPEATS)


if __name__ == "__main__":
    uvloop.run(main())
