"""A claimed GPU is the only one that CUDA shows, in the process that has claimed it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from giornata.control.networks import device_id
from tests.patience import HUNG_S

CLAIMING = """
import asyncio, json, sys
from pathlib import Path
from giornata.gpus import claim_gpus as claimed
from giornata.wire.workers import ServiceName
import torch

async def main():
    async with claimed(ServiceName.DENOISER, "d1", Path(sys.argv[1]), 1) as gpus:
        ids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        sum_ = torch.ones(3, device="cuda").sum().item()
        print(json.dumps([[gpu.id for gpu in gpus], ids, sum_]))

asyncio.run(main())
"""


def test_cuda_shows_the_claimed_gpu_alone(cuda: torch.device, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", CLAIMING, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=HUNG_S,
    )
    claimed, visible, computed = json.loads(told.stdout.splitlines()[-1])
    assert claimed == [f"GPU-{device_id(cuda)}"], "the first one is free"
    assert [f"GPU-{one}" for one in visible] == claimed
    assert computed == 3.0
