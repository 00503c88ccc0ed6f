"""`giornata quality` through the whole system: an untrained model fails, a rerun is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from giornata.model_cards import read_model_card
from giornata_lab.cli.system import quality
from giornata_lab.quality.evaluation import QualityOptions, evaluate
from giornata_lab.quality.report import QualityReport
from giornata_tools.launcher.process import LaunchError
from tests.e2e.live import LiveStack
from tests.integration.nats_server import impatience


def given(*flags: str) -> QualityOptions:
    return QualityOptions(**quality.make_context("quality", list(flags)).params)


def options(stack: LiveStack, out: Path, *more: str) -> QualityOptions:
    # A picture that comes again, as in a rerun, may have been recorded meanwhile.
    few = ("--limit", "6", "--steps", "2", "--in-flight", "3", "--reuse", "off")
    return given("--nats", stack.nats_url, "--out", str(out), *few, *more)


async def test_a_random_model_fails_its_gates_and_a_rerun_gives_the_same_pictures(
    stack: LiveStack, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="does not let this user"):
        await evaluate(options(stack, tmp_path / "refused"))
    monkeypatch.setenv("GIORNATA_NATS_PASSWORD_FILE", str(stack.observer_password_file))
    first, second = tmp_path / "first", tmp_path / "second"

    assert await evaluate(options(stack, first)) == 1
    report = QualityReport.model_validate_json((tmp_path / "first.json").read_text())
    adherence, completion, seams, strayed = report.gates
    assert not any(gate.holds for gate in (adherence, completion, seams))
    assert strayed.holds, "the paste keeps every pixel outside of the mask, however bad the model"
    assert (report.run.cases, report.run.of_cases, report.run.steps) == (6, 612, 2)
    assert report.run.model_digest == read_model_card(tiny_model).digest
    assert report.run.edit_ms_p50 > 0
    assert (tmp_path / "first-failed.png").exists()
    assert len(list(first.glob("*.png"))) == 6

    assert await evaluate(options(stack, second, "--against", str(first), "--no-gates")) == 0
    closeness = QualityReport.model_validate_json((tmp_path / "second.json").read_text()).closeness
    assert closeness is not None
    assert closeness.n == 6
    assert closeness.psnr_in_mask_db > 45, "seeds are fixed; who shares a batch changes a rounding at most"

    with pytest.raises(LaunchError, match="overwritten"):
        await evaluate(options(stack, first, "--against", str(first)))
    with pytest.raises(LaunchError, match="received other, accepted tiny"):
        await evaluate(options(stack, tmp_path / "third", "--model-name", "other"))


async def test_nobody_at_the_address_is_told(tmp_path: Path) -> None:
    with impatience(), pytest.raises(LaunchError):
        await evaluate(given("--nats", "nats://127.0.0.1:1", "--limit", "1", "--out", str(tmp_path / "out")))
