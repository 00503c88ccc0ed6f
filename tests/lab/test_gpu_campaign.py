"""The campaign for a GPU: every part ends in a record, whatever becomes of it, and a second call goes on."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from giornata_lab.bench import harness, options
from giornata_lab.rehearsals.gpu import campaign, needs, wheels
from giornata_lab.rehearsals.gpu.campaign import Folder, Record, SharedProcess, Status
from giornata_lab.rehearsals.gpu.command import NO_GPU, main, page
from giornata_lab.rehearsals.gpu.parts import TINY, Part, parts
from tests.fakes.cuda import pretended

CAMPAIGN = "giornata_lab.rehearsals.gpu"
LAB = needs.ROOT / "deploy" / "lab"


def part(how: str, *arguments: str, limit_s: float = 120.0) -> Part:
    return Part(how, "tests.fakes.measured_part", (how, *arguments), limit_s, f"how to {how}")


def record(name: str, status: Status, **values: Any) -> Record:
    return Record(name, "something", status, 1.0, 60.0, f"python -m {name}", "2026-11-23T12:00:00", **values)


def test_what_a_part_wrote_and_printed_is_in_its_record(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    [done] = campaign.carried_out([part("done", "x")], folder, None)
    assert done.status is Status.DONE
    assert done.report["rows"] == [{"what": "done", "ms": 1.5}]
    assert done.report["workload"]["given"] == ["x"]
    assert "began to done" in done.output
    assert folder.records() == {"done": done}


def test_a_part_that_fails_leaves_its_traceback_and_the_next_one_runs(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    found = list(campaign.carried_out([part("raise"), part("half"), part("done")], folder, None))
    assert [each.status for each in found] == [Status.FAILED, Status.FAILED, Status.DONE]
    assert "RuntimeError: it was to raise" in found[0].output
    assert found[1].report["rows"], "what it wrote before it failed"
    assert "RuntimeError: it was to half" in page(found)


@pytest.mark.parametrize(("limit_s", "status"), [(60.0, Status.CUT), (0.1, Status.FAILED)])
def test_a_part_that_hangs_has_failed_or_is_to_be_run_again(
    tmp_path: Path, limit_s: float, status: Status
) -> None:
    """At its own limit it has failed; when the campaign's time is up, it is to be run again."""
    with SharedProcess() as process:
        found = campaign.run(part("hang", limit_s=limit_s), process, tmp_path, 0.1)
    assert found.status is status
    assert "ended after 0 s" in found.output


def test_what_a_part_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up as soon as its child is known."""
    told = tmp_path / "told"
    os.mkfifo(told)
    found: list[psutil.Process] = []

    def until_told(*_: object) -> tuple[list[object], list[object], list[object]]:
        found.append(psutil.Process(int(told.read_text())))
        return [], [], []

    monkeypatch.setattr(campaign, "select", SimpleNamespace(select=until_told))
    with SharedProcess() as process:
        assert process.ended(part("hang", str(told)), tmp_path, tmp_path / "log", 120.0) is None
    psutil.wait_procs(found, timeout=20)
    assert not found[0].is_running() or found[0].status() == psutil.STATUS_ZOMBIE


def test_parts_share_a_process_until_one_fails_is_its_last_or_wants_it_alone(tmp_path: Path) -> None:
    last = replace(part("done"), last=True)
    parts_of = [part("done"), part("done"), part("raise"), last, replace(part("done"), alone=True)]
    with SharedProcess() as process:
        pids = []
        for each in [*parts_of, part("done")]:
            process.ended(each, tmp_path, tmp_path / "log", 120.0)
            pids.append(json.loads((tmp_path / "measured_part.json").read_text())["workload"]["pid"])
    first, second, failed, third, alone, last = pids
    assert first == second == failed, "the one that failed wrote nothing: the file is the one before it"
    assert len({first, third, alone, last}) == 4


def test_no_part_begins_when_the_time_is_up(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 100.0])
    every = [part("done"), part("raise")]
    found = list(campaign.carried_out(every, Folder(tmp_path), 90.0, lambda: next(times)))
    assert [each.part for each in found] == ["done"]


def test_a_second_call_runs_what_is_not_done_and_what_failed_last() -> None:
    every = [part("a"), part("b"), part("c"), part("d")]
    records = {
        "a": record("a", Status.FAILED),
        "b": record("b", Status.DONE),
        "c": record("c", Status.CUT),
    }
    assert [each.name for each in campaign.due(every, records, again=False)] == ["c", "d", "a"]
    assert campaign.due(every, records, again=True) == every


def test_a_part_whose_packages_are_missing_is_told_and_the_others_run() -> None:
    def has(module: str) -> bool:
        return module not in {"skimage", "triton"}

    assert needs.missing("pictures", has) == ["scikit-image"]
    assert needs.missing("step_time_1024", has) == []
    told = needs.told(["pictures", "step_time_1024"], has)
    assert told[0] == "pictures will not run: scikit-image missing."
    assert told[-1].startswith("triton is missing")
    assert needs.told(["pictures"], lambda _: True) == []


def test_what_is_missing_is_found_as_deep_as_it_is_imported_and_told_once() -> None:
    """Of packages that are missing it is known what they bring; others tell it of themselves."""
    assert needs.missing("step_rows", lambda module: module != "pydantic") == ["pydantic"]
    assert needs.missing("step_rows", lambda module: module not in {"pydantic", "dotenv", "yaml"}) == [
        "pydantic",
        "python-dotenv",
        "pyyaml",
    ]
    told = needs.told(["a", "pictures", "b"], lambda module: module != "rich")
    assert told[0] == "a, pictures, b will not run: rich missing."
    assert "constraints.txt rich; without a network" in told[1]


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> None:
    """A wheel with one module of its name."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", "VALUE = 1\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{about}/RECORD", "")


def test_carried_wheels_are_imported_by_the_campaign_and_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    wheel(tmp_path / "whl", "carried_here")
    given = ["--only", "launches", "--wheels", str(tmp_path / "whl"), "--again"]
    assert wheels.used(given) == ["--only", "launches", "--again"]
    site = str(tmp_path / "whl" / "site")
    assert sys.path[0] == site
    assert os.environ["PYTHONPATH"] == os.pathsep.join([site, "before"])
    code = "import carried_here; print(carried_here.VALUE)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "1\n"
    )
    installed = Path(site, "carried_here.py").stat().st_mtime_ns
    wheels.installed(tmp_path / "whl")
    assert Path(site, "carried_here.py").stat().st_mtime_ns == installed, "once"


def test_a_python_with_nothing_but_the_standard_library_is_told_all_at_once() -> None:
    command = [sys.executable, "-S", "-E", "-m", CAMPAIGN, "--only", "launches"]
    ended = subprocess.run(command, cwd=LAB, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "pydantic, pydantic-core, pydantic-settings" in ended.stdout
    assert "make gpu-wheels" in ended.stdout
    assert not ended.stderr


def test_without_a_gpu_it_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = CliRunner().invoke(main, [])
    assert ended.exit_code == NO_GPU
    assert "has no CUDA device" in ended.output
    assert "--device cpu --size tiny" in " ".join(ended.output.split())


IMPORTED = """
import ast, importlib, sys
from pathlib import Path
root = Path(sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
found = set()
for module in list(sys.modules.values()):
    path = Path(getattr(module, "__file__", None) or "/")
    if path.is_relative_to(root) and ".venv" not in path.parts:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
print(*sorted({name.partition(".")[0] for name in found} & sys.modules.keys() - sys.stdlib_module_names))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tests", marks=pytest.mark.long),
        "pictures",
        pytest.param("others", marks=pytest.mark.long),
    ],
)
def test_the_packages_that_parts_import_are_named(name: str) -> None:
    """Directly, by modules of this project; an import within a function counts where it has run."""
    every = {each.name: each for each in parts(TINY, "cpu")}
    chosen = [every[name]] if name in every else [e for e in every.values() if e.name not in needs.NEEDS]
    modules = {each.module for each in chosen}
    if name == "tests":
        tests = (needs.ROOT / "tests" / "lab" / "gpu").glob("test_*.py")
        modules |= {f"tests.lab.gpu.{path.stem}" for path in tests} | {"tests.conftest"}
    command = [sys.executable, "-c", IMPORTED, str(needs.ROOT), *sorted(modules)]
    found = subprocess.run(command, cwd=needs.ROOT, capture_output=True, text=True, check=True).stdout
    named = set(needs.NEEDS.get(name, needs.ENGINE)) | needs.WISHED.keys() | {"cycler", "tests"}
    assert {package for package in found.split() if not package.startswith("giornata")} - named == set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["step_time_256", "step_rows_256", "throughput_256"])
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
    written = json.loads((tmp_path / f"{chosen.report}.json").read_text())
    assert written["rows"]
    assert written["workload"]["device"] == "cuda"
    assert {"_gather", "_modulate"} <= world.launches.keys()
    assert not world.races


def rehearsed(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", CAMPAIGN, "--device", "cpu", "--size", TINY, "--out", str(out)]
    return subprocess.run([*command, *flags], cwd=needs.ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_one_part_can_be_run_alone_and_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    assert rehearsed(tmp_path, "--only", "launches").returncode == 0
    records = Folder(tmp_path).records()
    assert records.keys() == {"launches"}
    assert records["launches"].report["rows"]
    assert rehearsed(tmp_path, "--only", "launches").returncode == 0
    assert Folder(tmp_path).records() == records
    assert rehearsed(tmp_path, "--minutes", "0").returncode == 1, "other parts are not done"


@pytest.mark.long
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    """On the CPU, at a tiny size: what runs on a GPU is the same code."""
    ended = rehearsed(tmp_path)
    records = Folder(tmp_path).records()
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
    assert records.keys() == {each.name for each in parts(TINY, "cpu")}
    assert all(each.status is Status.DONE and each.report["rows"] for each in records.values())
    trace = json.loads(gzip.decompress((tmp_path / "step_trace_256.json.gz").read_bytes()))
    assert trace["traceEvents"]
    text = (tmp_path / "results.md").read_text()
    assert all(f"### {name}\n" in text for name in records)
