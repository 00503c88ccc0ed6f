"""The two stacks that tests share beside the plain one: what ships as a whole, and two of each service."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from giornata.wire.workers import ServiceName
from giornata_lab.quality.cases import draw, slots
from giornata_tools.checkout import ADAPTERS, SEGMENTER, TRAINED
from tests.e2e.collector import Collector
from tests.e2e.live import LiveStack, live_stack, paced
from tests.fakes.key_files import write_keys
from tests.s3_server import CREDENTIALS, S3Server

SERVED_AS: Final = "tiny"
"""What stacks of tests call their model."""
ALICE, BOB = "gio_alice", "gio_bob"
_SLOT = next(slot for slot in slots() if slot.task == "add" and slot.side == 128)
_CASE = draw(_SLOT)
PROMPT = f"a {_SLOT.colour} {_SLOT.shape}"
SCENE = Image.fromarray(_CASE.bare)
MASK = Image.fromarray((_CASE.scene.mask * 255).astype(np.uint8))

PAIRS: Final = dict.fromkeys(ServiceName, 2) | {ServiceName.CONTROLNET: 0, ServiceName.LORA_STORE: 0}
PAIRS_STEP_S: Final = 0.1


def _traced(collector: Collector) -> dict[str, str]:
    return {"GIORNATA_TRACES_URL": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}


@contextmanager
def shipped_stack(folder: Path, pace: Path, collector: Collector, s3: S3Server) -> Iterator[LiveStack]:
    """The model that ships with its adapters and its segmenter, the keys of two tenants, and an object store.

    A ControlNet service computes the net. The stack's files lie in `folder`, `pace` lets steps wait as
    :func:`tests.e2e.live.slowly` does, and `collector` is told of all work.
    """
    keys = write_keys(folder, {ALICE: "alice", BOB: "bob"})
    shutil.copytree(ADAPTERS / "loras" / "fresco", folder / "loras" / SERVED_AS)
    env = {
        "GIORNATA_API_KEYS_FILE": str(keys),
        "GIORNATA_LOG_FORMAT": "json",
        **CREDENTIALS,
        **_traced(collector),
    }
    with paced(pace) as paced_env:
        env_of = {
            **paced_env,
            ServiceName.LORA_STORE: {"GIORNATA_LORA_SHARED_FOLDER": str(folder / "loras")},
            ServiceName.CONTROLNET: {"GIORNATA_CONTROLNETS": str(ADAPTERS / "controlnets" / "outline")},
            ServiceName.PREPOST: {"GIORNATA_MASK_MODEL": str(SEGMENTER)},
        }
        one_more = {ServiceName.CONTROLNET: 1}
        with live_stack(TRAINED, one_more, env, env_of=env_of, blobs_url=s3.url()) as live:
            yield live


@contextmanager
def paired_stack(model: Path, pace: Path, collector: Collector) -> Iterator[LiveStack]:
    """Two of each service that a job meets, and denoisers whose steps wait; `collector` is told of all work."""
    settings = {"GIORNATA_DRAIN_S": "0", "GIORNATA_NOTICE_S": "0", **_traced(collector)}
    with paced(pace, PAIRS_STEP_S) as env_of, live_stack(model, PAIRS, settings, env_of=env_of) as live:
        yield live
