"""`giornata demo`, with fewer steps and pictures: edits through its own stack, with adapters too, and a report.

Its services are forked, and it runs in this process: what a true start of each service imports is tested beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from giornata_lab.cli.system import demo as command
from giornata_lab.demo import demo
from giornata_lab.demo.exhibits import by_words, exhibits
from giornata_tools.clients import http
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.stack import Stack, running
from tests import forked_programs
from tests.patience import HUNG_S


def forked(plan: StackPlan, tell: Callable[[str], None]) -> AbstractAsyncContextManager[Stack]:
    """A stack whose services are forked and may take their time."""
    return running(replace(plan, ready_s=HUNG_S), tell, spawn=forked_programs.spawn)


@pytest.mark.timeout(900)
async def test_the_demo_edits_pictures_one_by_words_shows_the_adapters_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    astronaut, *_, removal = exhibits()
    shown = (astronaut, removal)
    monkeypatch.setattr(demo, "exhibits", lambda: shown)
    monkeypatch.setattr(demo, "running", forked)
    monkeypatch.setattr(http, "SILENCE_S", HUNG_S)
    flags = ["--out", str(out), "--steps", "2", "--torch-threads", "1"]
    status = await demo.demo(demo.DemoOptions(**command.make_context("demo", flags).params))
    assert status == 0, capsys.readouterr().out

    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["model"] == "fresco"
    assert {edit["name"] for edit in report["edits"]} == {"astronaut", "removal", "words"}
    for edit in report["edits"]:
        assert edit["outside_mask_max_abs_diff"] == 0
        assert edit["oracle_max_abs_diff"] <= 2 / 255, "another picture than diffusers' own"
    named = report["edits"][-1]
    assert named["mask_prompt"] == "the red circle"
    assert named["mask_overlap"] >= 0.85
    with Image.open(out / "words" / "mask.png") as found:
        assert found.size == by_words().mask.size
        assert np.asarray(found).any()
    for exhibit in (*shown, by_words()):
        with Image.open(out / exhibit.name / "output.png") as edited:
            assert edited.size == exhibit.picture.size
            assert (np.asarray(edited.convert("RGB")) != np.asarray(exhibit.picture)).any()
    for adapter in report["adapters"]:
        for one in (adapter["without"], adapter["under"]):
            assert one["outside_mask_max_abs_diff"] == 0
        assert adapter["effect_mean_abs_diff"] > 0
        without, under = [
            np.asarray(Image.open(out / adapter["name"] / f"{which}.png").convert("RGB"))
            for which in ("without", "output")
        ]
        assert (without != under).any()
    kinds = {each["name"]: (len(each["loras"]), len(each["controlnets"])) for each in report["adapters"]}
    assert kinds == {"swapped": (1, 0), "outlined": (1, 0), "outline": (0, 1)}
    assert [each["loras_from"] for each in report["adapters"]] == [0, 0, None]
    assert (out / "outline" / "control.png").is_file()
    with Image.open(out / "adapters.png") as sheet:
        assert sheet.height > 3 * 256
    with Image.open(out / "comparison.png") as sheet:
        assert sheet.width > 2 * sheet.height / 3
