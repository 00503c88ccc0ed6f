"""torch, and whether it computes on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from giornata_tools.cli.doctor.finding import SETUP, DoctorFinding, fail, ok, warn

PROBE: Final = """\
import json, torch
reason = None
if torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error).splitlines()[0]
n = torch.cuda.device_count() if reason is None and torch.cuda.is_available() else 0
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "reason": reason,
    "devices": [torch.cuda.get_device_name(i) for i in range(n)],
}))
"""
"""Run in a process of its own: importing torch takes seconds, and a broken driver may end the process."""
PROBE_S: Final = 120
DRIVER_S: Final = 20
CUDA_SETUP: Final = "make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class TorchReport:
    """What torch says of itself."""

    version: str
    cuda: str | None
    """CUDA's version that it was built for; None for a build for CPUs."""
    reason: str | None
    """Why CUDA does not start."""
    devices: list[str]


def torch(code: str = PROBE) -> DoctorFinding:
    """Torch imports, and uses the GPU if there is one; `code` asks it."""
    try:
        found = probe(code)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return fail(f"torch does not import: {_last_line(error)}", SETUP)
    return judge(found, driver())


def probe(code: str) -> TorchReport:
    """Ask torch in a process of its own.

    Raises:
        subprocess.SubprocessError: it does not import, or takes too long.
        ValueError: it says something else.
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=True
    )
    return TorchReport(**json.loads(done.stdout.splitlines()[-1] if done.stdout.strip() else ""))


def driver() -> str | None:
    """NVIDIA's GPUs and driver as ``nvidia-smi`` tells them, or None without any."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def judge(found: TorchReport, gpus: str | None) -> DoctorFinding:
    """The verdict on `found` beside `gpus`, what the driver tells."""
    if found.devices:
        return ok(f"{found.version} with CUDA {found.cuda} on {', '.join(found.devices)}")
    if gpus is None:
        build = "" if found.cuda is None else f"; built for CUDA {found.cuda}, and no NVIDIA driver answers"
        return ok(f"{found.version} on the CPU: fine for the built-in model{build}")
    if found.cuda is None:
        return warn(
            f"{found.version} is the build for CPUs, and there is a GPU: {gpus}.", f"Run `{CUDA_SETUP}`."
        )
    return warn(
        f"{found.version} cannot use the GPU ({gpus}): {found.reason or 'CUDA is not available'}.",
        f"Update the NVIDIA driver to one that knows CUDA {found.cuda}, or take another build of torch by TORCH_INDEX.",
    )


def _last_line(error: Exception) -> str:
    """The last line that the process wrote before it ended."""
    said = getattr(error, "stderr", None) or str(error)
    return str(said).strip().splitlines()[-1][:300] if str(said).strip() else type(error).__name__
