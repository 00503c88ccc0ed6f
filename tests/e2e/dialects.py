"""A whole stack of the model that ships, with its adapters and the keys of two tenants, for clients of other APIs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from giornata.wire.workers import ServiceName
from giornata_lab.quality.cases import draw, slots
from giornata_tools.checkout import ADAPTERS, TRAINED
from tests.e2e.live import LiveStack, live_stack, paced
from tests.fakes.key_files import write_keys

SERVED_AS = "tiny"
"""What stacks of tests call their model."""
ALICE, BOB = "gio_alice", "gio_bob"
_SLOT = next(slot for slot in slots() if slot.task == "add" and slot.side == 128)
_CASE = draw(_SLOT)
PROMPT = f"a {_SLOT.colour} {_SLOT.shape}"
SCENE = Image.fromarray(_CASE.bare)
MASK = Image.fromarray((_CASE.scene.mask * 255).astype(np.uint8))


@contextmanager
def shipped(folder: Path, pace: Path) -> Iterator[LiveStack]:
    """The stack; its files lie in `folder`, and `pace` lets steps wait as :func:`tests.e2e.live.slowly` does."""
    keys = write_keys(folder, {ALICE: "alice", BOB: "bob"})
    shutil.copytree(ADAPTERS / "loras" / "fresco", folder / "loras" / SERVED_AS)
    adapters = {
        ServiceName.LORA_STORE: {"GIORNATA_LORA_SHARED_FOLDER": str(folder / "loras")},
        ServiceName.DENOISER: {"GIORNATA_CONTROLNETS": str(ADAPTERS / "controlnets" / "outline")},
    }
    with paced(pace) as env_of:
        together = {
            service: {**env_of.get(service, {}), **adapters.get(service, {})}
            for service in {*env_of, *adapters}
        }
        with live_stack(TRAINED, env={"GIORNATA_API_KEYS_FILE": str(keys)}, env_of=together) as live:
            yield live
