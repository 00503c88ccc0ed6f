"""``python -m tests.fuzz.worker TARGET FLAGS FOLDERS``: libFuzzer on one target, which ends this process."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(
    include=["PIL", "giornata", "giornata_gateway", "giornata_tools", "giornata_lora_store"]
):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    program, target, *flags = sys.argv
    atheris.Setup([program, *flags], TARGETS[target])
    atheris.Fuzz()
