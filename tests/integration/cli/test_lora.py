"""``giornata lora`` against a real gateway and a real store; prepost's answer is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from giornata.bus.bus import Endpoint
from giornata.wire import subjects
from giornata.wire.errors import LoraMismatch
from giornata.wire.loras import CanonicalLora, NormaliseLora
from tests.fakes.key_files import write_keys
from tests.integration.cli.conftest import Run
from tests.integration.gateway_fakes import Stage, open_stage
from tests.integration.lora_bench import canonical, lora, open_bench

KEY = "sk-command-line-1"


@dataclass
class Door:
    """A gateway, and what prepost says of the next LoRA."""

    stage: Stage
    folder: Path
    command: Run
    refusal: LoraMismatch | None = None

    async def normalise(self, request: NormaliseLora) -> CanonicalLora:
        if self.refusal is not None:
            raise self.refusal
        return canonical(request)

    async def run(self, *words: str, key: str = KEY) -> Result:
        return await self.command("lora", *words, "--url", self.stage.url, "--api-key", key)

    async def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((await self.run("list", "--json")).stdout)
        return found

    def file(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture
async def door(nats_account: str, redis_url: str, tmp_path: Path, run: Run) -> AsyncIterator[Door]:
    keys = write_keys(tmp_path, {KEY: tmp_path.name})
    async with (
        open_bench(nats_account, tmp_path) as bench,
        bench.instance(),
        open_stage(nats_account, redis_url, tmp_path, api_keys_file=keys) as stage,
    ):
        door = Door(stage, tmp_path, run)
        prepost = Endpoint(subjects.prepost("adapter", "tiny"), NormaliseLora, door.normalise)
        async with bench.bus.serve("prepost", prepost, instance="tiny"):
            yield door


async def test_a_lora_is_added_listed_and_removed(door: Door) -> None:
    file = door.file("rims.safetensors", lora(70))
    added = await door.run("add", file, "--model", "tiny", "--name", "dark rims")
    assert (added.exit_code, added.stderr) == (0, "Ready: rank 4, 1 modules of tiny.\n")
    name = (await door.listed())[0]["id"]
    assert added.stdout.splitlines()[-1] == name
    second = json.loads((await door.run("add", door.file("b.safetensors", lora(71)), "--json")).stdout)
    assert [(one["id"], one["name"], one["state"]) for one in await door.listed()] in (
        [(second["id"], "b", "ready"), (name, "dark rims", "ready")],
        [(name, "dark rims", "ready"), (second["id"], "b", "ready")],  # made in one second
    )
    table = (await door.run("list")).stdout
    assert "dark" in table
    assert name in _column(table), "whole, for other commands"
    assert name in _column((await door.run("show", name)).stdout)
    assert json.loads((await door.run("show", name, "--json")).stdout)["joins_within"] is None
    unknown = await door.run("show", f"lora_{'0' * 32}")
    assert (unknown.exit_code, "[lora_not_found]" in unknown.stderr) == (1, True)
    removed = await door.run("rm", name)
    assert (removed.exit_code, removed.stderr) == (0, f"{name} is removed.\n")
    assert json.loads((await door.run("rm", second["id"], "--json")).stdout)["deleted"] is True
    assert await door.listed() == []
    assert (await door.run("list")).stderr == "There is no LoRA.\n"


def _column(table: str) -> str:
    """The first column of a table."""
    return " ".join(line.split()[0] for line in table.splitlines())


async def test_what_is_refused_is_told_with_its_code(door: Door) -> None:
    door.refusal = LoraMismatch(received="double_blocks", accepted="modules of a UNet")
    failed = await door.run("add", door.file("other.safetensors", lora(72)))
    assert failed.exit_code == 1
    assert failed.stderr == (
        "Error: The LoRA does not fit the model. "
        "Received: double_blocks. Accepted: modules of a UNet. [lora_mismatch]\n"
    )
    assert "lora_mismatch" in (await door.run("list")).stdout
    for words, said in (
        (("add", door.file("junk.safetensors", b"junk")), "lora_unreadable"),
        (("rm", "lora_0"), "lora_not_found"),
    ):
        refused = await door.run(*words)
        assert refused.exit_code == 1
        assert said in refused.stderr
    assert (await door.run("list", key="sk-of-nobody")).exit_code == 1
