"""The campaign for a GPU: every part ends in a record, whatever becomes of it, and a second call goes on."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from giornata_lab.bench import harness, options
from giornata_lab.rehearsals import gpu
from giornata_lab.rehearsals.gpu import (
    TINY,
    CampaignPart,
    Record,
    Status,
    carried_out,
    due,
    main,
    page,
    parts,
    records,
)
from tests.fakes.cuda import pretended

ROOT = Path(__file__).parents[2]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules of parts: `done` writes a report, `failing` raises, `hanging` never ends."""
    folder = tmp_path / "programs"
    folder.mkdir()
    report = "import os\nfrom giornata_lab.bench.harness import write\n"
    (folder / "done.py").write_text(report + "write('done', [{'pid': os.getpid()}], workload={})\n")
    (folder / "failing.py").write_text("raise RuntimeError('it was to fail')\n")
    (folder / "hanging.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_parts_share_a_process_until_one_fails_and_each_leaves_a_record(
    programs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    every = [
        CampaignPart("a", "done", ()),
        CampaignPart("b", "done", ()),
        CampaignPart("c", "failing", ()),
        CampaignPart("d", "done", ()),
    ]
    found = list(carried_out(every, out, 600.0))
    assert [one.status for one in found] == [Status.DONE, Status.DONE, Status.FAILED, Status.DONE]
    first, second, _, after = ([row["pid"] for row in one.rows] for one in found)
    assert first == second != after
    assert "RuntimeError: it was to fail" in found[2].output
    assert "RuntimeError: it was to fail" in page(found)
    assert records(out) == {one.part: one for one in found}


@pytest.mark.parametrize(("limit_s", "status"), [(60.0, Status.CUT), (0.1, Status.FAILED)])
def test_a_part_that_hangs_has_failed_or_is_to_be_run_again(
    programs: Path, tmp_path: Path, limit_s: float, status: Status
) -> None:
    """At its own limit it has failed; when the campaign's time is up, it is to be run again."""
    process = gpu.SharedProcess()
    found = gpu.run(CampaignPart("hang", "hanging", (), limit_s), process, 0.1, tmp_path)
    assert found.status is status
    assert "ended after 0 s" in found.output


def test_no_part_begins_when_the_time_is_up(tmp_path: Path) -> None:
    assert list(carried_out([CampaignPart("a", "done", ())], tmp_path, 0.0)) == []


def test_a_second_call_runs_what_is_not_done_and_what_failed_last() -> None:
    def record(name: str, status: Status) -> Record:
        return Record(name, status, 1.0, "python", "2026-11-23T12:00:00", None, "")

    every = [CampaignPart(name, "done", ()) for name in "abcd"]
    known = {"a": record("a", Status.FAILED), "b": record("b", Status.DONE), "c": record("c", Status.CUT)}
    assert [part.name for part in due(every, known)] == ["c", "d", "a"]


def test_without_a_gpu_it_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = CliRunner().invoke(main, [])
    assert ended.exit_code == 2
    assert "has no CUDA device" in ended.output
    assert "--device cpu --size tiny" in ended.output


@pytest.mark.long
@pytest.mark.parametrize("name", ["step_time", "step_rows", "throughput"])
def test_a_part_on_a_pretended_gpu_writes_its_report_and_races_with_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the branches for CUDA: pinned memory, streams, Triton's launches, peaks of memory."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    monkeypatch.setattr(harness, "OUT", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process, which has other tests
    [chosen] = [each for each in parts(TINY, "cuda") if each.name == name]
    options._flux.cache_clear()
    with pretended() as world:
        importlib.import_module(chosen.module).main(chosen.arguments)
        options._flux.cache_clear()
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["rows"]
    assert written["workload"]["device"] == "cuda"
    assert {"_gather", "_modulate"} <= world.launches.keys()
    assert not world.races


@pytest.mark.long
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    """On the CPU, at a tiny size: what runs on a GPU is the same code."""
    command = [sys.executable, "-m", "giornata_lab.rehearsals.gpu", "--device", "cpu", "--size", TINY]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = records(tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
    assert found.keys() == {each.name for each in parts(TINY, "cpu")}
    assert all(each.rows or each.command.startswith("python -m pytest") for each in found.values())
