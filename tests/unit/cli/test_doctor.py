"""The doctor's checks, with what they look at given as values where the machine would decide."""

from __future__ import annotations

import json
import re
import socket
import sys
from contextlib import closing
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from huggingface_hub import try_to_load_from_cache

from giornata_tools.cli import doctor, doctor_checks, extras
from giornata_tools.cli.doctor_checks import CheckStatus, DoctorFinding, TorchReport, fail, ok, warn, worst
from tests.fakes.published import published

ROOT = Path(__file__).parents[3]
CPU = TorchReport("2.13.0+cpu", None, None, [])
CUDA = TorchReport("2.13.0+cu130", "13.0", None, ["NVIDIA H100"])


def test_python_is_new_enough() -> None:
    assert doctor_checks.python().verdict is CheckStatus.OK
    assert doctor_checks.python((3, 11, 0)).verdict is CheckStatus.OK
    old = doctor_checks.python((3, 10, 14))
    assert (old.verdict, "3.10.14" in old.sentence) == (CheckStatus.FAIL, True)


def test_all_distributions_of_the_checkout_are_wanted_and_here() -> None:
    want = doctor_checks.wanted(ROOT)
    assert len(want) == 9
    assert doctor_checks.distributions(want).verdict is CheckStatus.OK
    assert doctor_checks.requirements(want).verdict is CheckStatus.OK


def test_a_missing_and_an_old_distribution_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "installed", {"giornata": "0.0.9", "giornata-router": "1"}.get)
    found = doctor_checks.distributions({"giornata": "1", "giornata-router": "1", "giornata-denoiser": "1"})
    assert found.verdict is CheckStatus.FAIL
    assert found.sentence == "giornata-denoiser is not installed; giornata 0.0.9 instead of 1."
    assert "make setup" in (found.remedy or "")


def test_what_a_distribution_requires_and_nobody_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"a": ["redis[hiredis]>=5; python_version >= '3'", "click; extra == 'cli'"], "b": ["nats-py"]}
    have = {"a": "1", "nats-py": "2"}
    for module in (doctor_checks, extras):
        monkeypatch.setattr(module, "installed", have.get)
    monkeypatch.setattr(metadata, "requires", needs.get)
    found = doctor_checks.requirements(["a", "b"])
    assert (found.verdict, found.sentence) == (CheckStatus.FAIL, "Not installed: redis.")


@pytest.mark.parametrize(
    ("found", "gpus", "verdict", "told"),
    [
        (CUDA, "NVIDIA H100, 580.1", CheckStatus.OK, "on NVIDIA H100"),
        (CPU, None, CheckStatus.OK, "on the CPU"),
        (CPU, "NVIDIA L4, 550.2", CheckStatus.WARN, "build for CPUs"),
        (
            TorchReport("2+cu130", "13.0", "driver too old", []),
            "NVIDIA L4, 450.1",
            CheckStatus.WARN,
            "driver too old",
        ),
        (TorchReport("2+cu130", "13.0", "no driver", []), None, CheckStatus.OK, "no NVIDIA driver answers"),
    ],
)
def test_torch_is_judged_beside_the_gpu(
    found: TorchReport, gpus: str | None, verdict: CheckStatus, told: str
) -> None:
    finding = doctor_checks.judge(found, gpus)
    assert finding.verdict is verdict
    assert told in finding.sentence
    assert (finding.remedy is None) == (verdict is CheckStatus.OK)


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    told = json.dumps({"version": "2", "cuda": None, "reason": None, "devices": []})
    assert doctor_checks.probe(f"print('noise'); print({told!r})") == TorchReport("2", None, None, [])
    finding = doctor_checks.torch("raise ImportError('libcuda is broken')")
    assert (finding.verdict, "libcuda is broken" in finding.sentence) == (CheckStatus.FAIL, True)


def test_the_embedded_servers_run_and_missing_ones_matter_only_if_needed(tmp_path: Path) -> None:
    assert doctor_checks.nats_program(needed=True).verdict is CheckStatus.OK
    assert doctor_checks.valkey_server(needed=True).verdict is CheckStatus.OK
    assert doctor_checks.runs(tmp_path / "none", needed=True).verdict is CheckStatus.FAIL
    assert doctor_checks.runs(tmp_path / "none", needed=False).verdict is CheckStatus.WARN
    broken = tmp_path / "nats-server"
    broken.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    broken.chmod(0o700)
    assert "does not run" in doctor_checks.runs(broken, needed=True).sentence


def test_a_port_is_free_or_taken_or_the_gateways() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        number = taken.getsockname()[1]
        assert doctor_checks.port("127.0.0.1", number, answered=False).verdict is CheckStatus.FAIL
        assert doctor_checks.port("127.0.0.1", number, answered=True).verdict is CheckStatus.OK
    assert doctor_checks.port("127.0.0.1", number, answered=False).sentence == "free"
    assert "not this machine" in doctor_checks.port("192.0.2.1", 80, answered=False).sentence


@pytest.mark.parametrize(
    ("gib", "verdict"), [(0.5, CheckStatus.FAIL), (2, CheckStatus.WARN), (50, CheckStatus.OK)]
)
def test_disk(tmp_path: Path, gib: float, verdict: CheckStatus) -> None:
    assert doctor_checks.disk(tmp_path, int(gib * doctor_checks.GIB)).verdict is verdict


def test_memory() -> None:
    assert doctor_checks.memory(2 * doctor_checks.GIB).verdict is CheckStatus.WARN
    assert doctor_checks.memory(8 * doctor_checks.GIB).verdict is CheckStatus.OK
    assert "GiB" in doctor_checks.memory().sentence


def test_a_browser_is_one_that_the_tests_of_the_page_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_checks.browser().verdict is CheckStatus.WARN
    program = tmp_path / "chromium"
    program.touch(mode=0o700)
    assert doctor_checks.browser() == ok(str(program))


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home of a hub that nothing was fetched from and nobody has logged in to."""
    for name in (
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def test_a_repository_that_may_be_gated_wants_a_token(
    hub_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor_checks.model("owner/name")
    assert (found.verdict, "HF_TOKEN" in (found.remedy or "")) == (CheckStatus.WARN, True)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert doctor_checks.model("owner/name").verdict is CheckStatus.OK
    monkeypatch.delenv("HF_TOKEN")
    (hub_home / "token").write_text("hf_x")  # hf auth login
    assert doctor_checks.model("owner/name").verdict is CheckStatus.OK


def test_a_repository_that_the_hub_has_in_its_cache_wants_nothing(hub_home: Path) -> None:
    folder = hub_home / "hub" / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    assert doctor_checks.model("owner/name").verdict is CheckStatus.WARN  # begun, and no more
    index = folder / "snapshots" / "c0ffee" / "model_index.json"
    index.touch()
    assert doctor_checks.model("owner/name").verdict is CheckStatus.OK
    assert doctor_checks.model("owner/other").verdict is CheckStatus.WARN
    asked = try_to_load_from_cache("owner/name", index.name, cache_dir=hub_home / "hub")
    assert asked == str(index), "the hub keeps its cache otherwise"


def test_the_model(tmp_path: Path) -> None:
    assert doctor_checks.model(None).verdict is CheckStatus.OK
    assert doctor_checks.model("./nowhere").verdict is CheckStatus.FAIL
    empty = doctor_checks.model(str(tmp_path))
    assert (empty.verdict, "model_index.json is missing" in empty.sentence) == (CheckStatus.FAIL, True)


@pytest.mark.parametrize(
    ("policy", "appends", "verdict"),
    [
        ("noeviction", True, CheckStatus.OK),
        ("noeviction", False, CheckStatus.WARN),
        ("allkeys-lfu", True, CheckStatus.FAIL),
        ("None", True, CheckStatus.FAIL),  # it does not tell
    ],
)
def test_a_blob_store_keeps_what_it_has(policy: str, appends: bool, verdict: CheckStatus) -> None:
    assert doctor_checks.judge_blob_store("redis://a", policy, appends=appends).verdict is verdict


def test_the_worst_finding_decides() -> None:
    good, bad, broken = ok("x"), warn("y", "mend"), fail("z", "mend now")
    assert worst([good]) is CheckStatus.OK
    assert worst([good, bad]) is CheckStatus.WARN
    assert worst([broken, bad, good]) is CheckStatus.FAIL
    assert doctor.summary({"a": good}) == "Nothing is missing."
    assert doctor.summary({"a": good, "b": bad}) == "Nothing essential is missing; look at: b."
    assert doctor.summary({"a": good, "b": bad, "c": broken}) == "To be mended: c."


async def test_a_check_that_fails_itself_is_a_finding() -> None:
    async def broken() -> DoctorFinding:
        raise RuntimeError("a surprise")

    found = await doctor._guarded(broken)
    assert found.verdict is CheckStatus.FAIL
    assert "RuntimeError" in found.sentence


def test_a_gateway_whose_streams_are_nearly_full_is_a_warning() -> None:
    ready = {"models": ["fresco"], "nearly_full": []}
    assert doctor_checks.judge_gateway("http://g", ready).verdict is CheckStatus.OK
    found = doctor_checks.judge_gateway("http://g", ready | {"nearly_full": ["KV_giornata-jobs"]})
    assert (found.verdict, "KV_giornata-jobs" in found.sentence) == (CheckStatus.WARN, True)


async def test_each_of_several_models_is_looked_at_and_their_names() -> None:
    fresco = str(Path(__file__).parents[3] / "deploy/model/fresco")
    checks = doctor._models((fresco, f"other={fresco}", "third=./nowhere"))
    found = {name: await check() for name, check in checks.items()}
    assert {name: one.verdict for name, one in found.items()} == {
        "Models": CheckStatus.OK,
        "Model fresco": CheckStatus.OK,
        "Model other": CheckStatus.OK,
        "Model third": CheckStatus.FAIL,
    }
    assert found["Models"].sentence == "fresco, other, third"
    twice = await doctor._models((fresco, fresco))["Models"]()
    assert (twice.verdict, twice.sentence) == (CheckStatus.FAIL, "Several models have the name fresco.")


def test_a_model_whose_templates_do_not_fit_is_told() -> None:
    folder = str(Path(__file__).parents[3] / "deploy/model/fresco")
    assert doctor_checks.model(folder).verdict is CheckStatus.OK
    tight = doctor_checks.model(folder, memory_bytes=1000)
    assert tight.verdict is CheckStatus.WARN
    assert "GIORNATA_CACHE_MEMORY_MB" in (tight.remedy or "")


def of_device(name: str, size: str, folder: Path) -> DoctorFinding:
    return doctor_checks.device(str(published(folder / name, name)), doctor_checks.size_of(size))


def test_a_gpu_with_room_is_told_what_each_part_takes(tmp_path: Path) -> None:
    found = of_device("flux", "80GB", tmp_path)
    assert (found.verdict, found.remedy) == (CheckStatus.OK, None)
    assert "the network 23.8 GB, text encoders 9.8 GB, the autoencoder 0.2 GB, " in found.sentence
    assert "decoding 1024 x 1024 1.6 GB" in found.sentence
    assert "host memory while the denoiser loads 23.8 GB, and prepost 9.9 GB" in found.sentence
    assert re.search(r"80 GB have room for \d+ rows in a step beside prepost$", found.sentence)


def test_a_gpu_whose_text_encoders_do_not_fit_is_a_warning(tmp_path: Path) -> None:
    found = of_device("flux", "32GB", tmp_path)
    assert found.verdict is CheckStatus.WARN
    assert "once its text encoders are on the CPU" in found.sentence


def test_a_gpu_is_planned_in_the_dtype_that_services_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIORNATA_DTYPE", "float32")
    found = of_device("flux", "48GB", tmp_path)
    assert found.verdict is CheckStatus.FAIL
    assert "the network 47.6 GB, text encoders 19.5 GB, the autoencoder 0.3 GB, " in found.sentence
    assert re.match(
        r"Of rows of that size GIORNATA_DTYPE=bfloat16 has room for \d+ in a step; ", found.remedy or ""
    )
    monkeypatch.setenv("GIORNATA_DTYPE", "bfloat16")
    assert of_device("flux", "48GB", tmp_path).verdict is CheckStatus.OK


def test_what_does_not_fit_is_told_with_what_would(tmp_path: Path) -> None:
    found = of_device("qwen-image", "40 gb", tmp_path)
    assert found.verdict is CheckStatus.FAIL
    assert "40 GB have no room for one row beside prepost" in found.sentence
    assert re.match(
        r"Of rows of that size GIORNATA_QUANTIZE=int8 has room for \d+ in a step; a GPU of 48 GB",
        found.remedy or "",
    )
    smallest = doctor_checks.device(str(tmp_path / "qwen-image"), 10**9)
    assert (smallest.verdict, "a GPU of 32 GB" in (smallest.remedy or "")) == (CheckStatus.FAIL, False)


def test_a_model_without_sizes_is_told(tmp_path: Path, hub_home: Path) -> None:
    assert "in the hub's cache" in doctor_checks.device("owner/name", 10**9).sentence
    (published(tmp_path, "flux") / "vae" / "model.safetensors").unlink()
    found = doctor_checks.device(str(tmp_path), 10**9)
    assert (found.verdict, "vae has neither weights nor an index" in found.sentence) == (
        CheckStatus.FAIL,
        True,
    )
    assert doctor_checks.device(str(tmp_path / "vae"), 10**9).verdict is CheckStatus.FAIL


@pytest.mark.parametrize("size", ["", "GB", "0GB", "80GiB", "a lot", "-3"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(click.BadParameter, match="write it as 80GB"):
        doctor_checks.size_of(size)


@pytest.mark.parametrize(("size", "status"), [("80GB", 0), ("16", 1)])
def test_the_exit_status_is_that_of_the_device_alone(size: str, status: int, tmp_path: Path) -> None:
    """Nothing else is looked at: a machine without a gateway, or without torch, can be asked."""
    folder = str(published(tmp_path / "flux", "flux"))
    ended = CliRunner().invoke(doctor.doctor, ["--model", folder, "--device", size, "--json"])
    assert ended.exit_code == status
    assert [one["name"] for one in json.loads(ended.stdout)["checks"]] == ["flux on a GPU"]


def test_a_device_needs_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIORNATA_MODEL", raising=False)
    ended = CliRunner().invoke(doctor.doctor, ["--device", "80GB"])
    assert (ended.exit_code, "--device needs --model" in ended.output) == (2, True)
