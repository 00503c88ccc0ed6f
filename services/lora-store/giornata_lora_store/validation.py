"""The judgement of a LoRA file: by its header alone, within limits; then by prepost, which makes the canonical file.

Headers are read without torch and without their tensors. Tenants take turns at prepost, and each has one LoRA there at
a time: another tenant's waits behind one of them at most.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
from safetensors import SafetensorError, safe_open

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, heed_cancel
from giornata.fleet import Fleet
from giornata.lora_files import ALPHA, FactorName, read_factor_name
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InternalError,
    LoraNotFound,
    LoraNotSupported,
    LoraTooLarge,
    LoraUnreadable,
)
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, LoraStyle, NormaliseLora
from giornata.wire.workers import ServiceState

TENSOR_QUOTES: Final = 10
"""Quotes of a tensor in a header: two each of its name, its three fields and its dtype."""
OTHER_QUOTES: Final = 1 << 14
"""Quotes of a trainer's notes, which have about a hundred names; those within texts are escaped."""
LENGTH: Final = struct.Struct("<Q")
SAFETENSORS: Final = "a whole file of safetensors"
DTYPES: Final = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes of factors, as safetensors calls them."""
ALPHA_DTYPES: Final = (*DTYPES, "F64", "I64", "I32", "I16", "I8", "U8")
ACCEPTED: Final = (
    "low-rank factors with the names of diffusers, PEFT, kohya, XLabs or the original checkpoint"
)
OTHERS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("DoRA", re.compile(r"dora_scale|lora_magnitude_vector")),
    ("LoKr", re.compile(r"lokr_")),
    ("LoHa", re.compile(r"hada_")),
    ("OFT", re.compile(r"oft_|boft")),
    ("LoCon with a middle factor", re.compile(r"lora_mid")),
    ("LoRA with biases", re.compile(r"lora_(A|B|up|down)\.bias$|lora\.(up|down)\.bias$")),
    ("whole differences of weights", re.compile(r"\.diff(_b)?$|\.set_weight$")),
    ("embeddings (textual inversion)", re.compile(r"^emb_params$|^bundle_emb|^clip_[lg]$")),
)
"""What a tensor's name betrays to be something else."""
CONTROL: Final = re.compile(r"lora_controlnet|(query|key)_norm\.scale$|\.norm_(added_)?[qk]\.weight$")
"""What one tensor of a Control LoRA betrays of the whole file, whose factors may have biases, too."""
_NAME: Final = re.compile(r"(?!.*\d{4})[A-Za-z0-9_.-]{1,512}\Z")
"""Converters count to the largest number in a name; no network has a thousand blocks."""
_STYLES: Final[tuple[tuple[LoraStyle, re.Pattern[str]], ...]] = (
    (LoraStyle.XLABS, re.compile(r"(double|single)_blocks\.\d+\.processor\.")),
    (LoraStyle.KOHYA, re.compile(r"lora_(unet|te\d?|transformer|prior)_|lycoris_")),
    (LoraStyle.ORIGINAL, re.compile(r"diffusion_model\.|base_model\.model\.(double|single)_blocks\.")),
    (LoraStyle.DIFFUSERS, re.compile(r"(transformer|unet|text_encoder(_\d)?)\.")),
)
"""By how names of modules begin; PEFT's begin with a module of the network itself."""


class TensorInfo(NamedTuple):
    """A tensor of a header."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LoraSizeLimits:
    """The largest LoRA that is accepted."""

    rank: int
    tensors: int
    header_bytes: int = 4 << 20


@dataclass(frozen=True)
class LoraHeader:
    """The contents of a LoRA file's header."""

    style: LoraStyle
    rank: int
    """The largest of any module."""
    modules: int


def inspect_file(path: Path, limits: LoraSizeLimits) -> LoraHeader:
    """Return what the header of a file says; raises as :func:`read_header` and :func:`recognise_header`. Blocking."""
    return recognise_header(read_header(path, limits.header_bytes, limits.tensors), limits)


def recognise_header(tensors: Mapping[str, TensorInfo], limits: LoraSizeLimits) -> LoraHeader:
    """Return what a file with these tensors is.

    Raises:
        LoraNotSupported: something else than a LoRA, or one of an unknown form; the text names the first such tensor.
        LoraTooLarge: more tensors, or a larger rank, than the limits allow.
    """
    if len(tensors) > limits.tensors:
        raise LoraTooLarge(received=f"{len(tensors)} tensors", accepted=f"at most {limits.tensors}")
    factors: defaultdict[str, dict[bool, TensorInfo]] = defaultdict(dict)
    scaled: set[str] = set()
    if control := next((name for name in sorted(tensors) if CONTROL.search(name)), None):
        raise _other_kind("Control LoRA", control)
    for name, tensor in sorted(tensors.items()):
        if (module := _scaled(name, tensor)) is not None:
            scaled.add(module)
            continue
        module, is_down = _factor(name, tensor)
        if is_down in factors[module]:
            raise _unknown("Two tensors are the same factor of one module.", name)
        factors[module][is_down] = tensor
    if not factors:
        raise LoraNotSupported("The file holds no factors.", received="no tensors", accepted=ACCEPTED)
    if stray := scaled - factors.keys():
        raise _unknown("An alpha belongs to no module with factors.", min(stray))
    rank = max(_rank(module, pair) for module, pair in factors.items())
    if rank > limits.rank:
        raise LoraTooLarge(received=f"rank {rank}", accepted=f"rank {limits.rank} at most")
    first = min(factors)
    style = next((style for style, pattern in _STYLES if pattern.match(first)), LoraStyle.PEFT)
    return LoraHeader(style, rank, len(factors))


def _scaled(name: str, tensor: TensorInfo) -> str | None:
    """The module whose alpha a tensor is; None if it is a factor."""
    if not _NAME.match(name):
        raise _unknown("A tensor has a name that no module has.", name)
    if not name.endswith(ALPHA):
        return None
    if tensor.shape not in {(), (1,)}:
        raise _unknown("An alpha is not one number.", f"{name} of shape {tensor.shape}")
    if tensor.dtype not in ALPHA_DTYPES:
        raise _unknown("An alpha has a dtype that is not accepted.", f"{name} of {tensor.dtype}")
    return name.removesuffix(ALPHA)


def _factor(name: str, tensor: TensorInfo) -> FactorName:
    """Return what the name of a factor says."""
    for kind, pattern in OTHERS:
        if pattern.search(name):
            raise _other_kind(kind, name)
    found = read_factor_name(name)
    if found is None:
        raise _unknown("A tensor is no factor of a LoRA of a known form.", name)
    if tensor.dtype not in DTYPES:
        raise LoraNotSupported(
            "A factor has a dtype that is not accepted.",
            received=f"{name} of {tensor.dtype}",
            accepted=", ".join(DTYPES),
        )
    if len(tensor.shape) not in {2, 4} or 0 in tensor.shape:
        raise _unknown("A factor is no matrix and no convolution.", f"{name} of shape {tensor.shape}")
    return found


def _rank(module: str, pair: Mapping[bool, TensorInfo]) -> int:
    if len(pair) != 2:
        raise _unknown("A module has one factor and not two.", module)
    down, up = pair[True].shape, pair[False].shape
    if down[0] != up[1]:
        raise _unknown("The factors of a module have different ranks.", f"{module}: {down} and {up}")
    return down[0]


def _other_kind(kind: str, received: str) -> GiornataError:
    return LoraNotSupported(f"This is {kind}, which is not supported.", received=received, accepted=ACCEPTED)


def _unknown(message: str, received: str) -> GiornataError:
    return LoraNotSupported(message, received=received, accepted=ACCEPTED)


def read_header(path: Path, limit_bytes: int, most_tensors: int) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor in a file.

    The library reads the header into its own types, and refuses every other structure, before Python makes objects of
    it. It checks that tensors do not overlap, leave no hole and fill the file. It takes the last of two tensors with
    one name, so names are checked here.

    Raises:
        LoraUnreadable: it is no file of safetensors, or not a whole one.
        LoraTooLarge: its header is larger than `limit_bytes`, or has more than `most_tensors`.
    """
    text = _header_text(path, limit_bytes)
    quotes = text.count(b'"') - text.count(b'\\"')
    if quotes > (most := TENSOR_QUOTES * most_tensors + OTHER_QUOTES):
        raise LoraTooLarge(
            "The header has too many names.", received=f"{quotes} quotes", accepted=f"at most {most}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            _check_names(text)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            return {name: TensorInfo(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise LoraUnreadable(received=str(error), accepted=SAFETENSORS) from error


def _header_text(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        head = file.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise LoraUnreadable(received=f"{len(head)} bytes", accepted=SAFETENSORS)
        (size_bytes,) = LENGTH.unpack(head)
        left = path.stat().st_size - LENGTH.size
        if size_bytes > left:
            received = f"a header of {size_bytes} bytes in {left} bytes"
            raise LoraUnreadable(
                "The file is not whole safetensors; maybe it is another format, such as a pickle.",
                received=received,
                accepted=SAFETENSORS,
            )
        if size_bytes > limit_bytes:
            raise LoraTooLarge(
                "The header is too large.", received=f"{size_bytes} bytes", accepted=f"at most {limit_bytes}"
            )
        return file.read(size_bytes)


def _check_names(text: bytes) -> None:
    """ValueError where a map in a header has a name twice; what the maps hold is let go of at once."""

    def once_each(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise ValueError(f"the name {twice!r} is given twice")

    json.loads(text, object_pairs_hook=once_each)


# LoRAs on their way from a whole source to a canonical file: who works on which, and what becomes of it.

AT_ONCE: Final = 2
"""LoRAs that an instance has with prepost at a time, each of another tenant."""
TRIES: Final = 2
"""A LoRA that prepost fails at unexpectedly so often is failed: its file may be made to do so."""
RENEWED_S: Final = 5.0
LOST_S: Final = 20.0
"""How often an instance says that it works on a LoRA, and after how long without that another one takes it over."""
LEAVING_S: Final = 2.0
"""How long an instance that leaves tries to say so."""

log = structlog.get_logger(__name__)


class LoraValidator:
    """The LoRAs that this instance knows to be unfinished. Used from one event loop; run :meth:`run` once."""

    def __init__(self, bus: Bus, records: LoraRecords, *, instance: str, limit_s: float) -> None:
        self._bus, self._records, self._instance = bus, records, instance
        self._limit_s = limit_s
        self._pending: dict[tuple[str, str], None] = {}
        """Tenants and ids, in order."""
        self._waiting: dict[str, dict[str, None]] = {}
        """Ids of LoRAs that wait for their check, by tenant; the first of a tenant may be with prepost."""
        self._turns: asyncio.Queue[str] = asyncio.Queue()
        """Tenants with LoRAs that wait and none with prepost: each is here once, so they take turns."""
        self._preposts = Fleet()
        self._arrivals = 0
        """How often a prepost has become ready."""
        self._unexpected: Counter[tuple[str, str]] = Counter()
        """Unexpected failures of LoRAs that are not settled."""
        self.ready = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        """LoRAs that are not settled, as far as this instance knows."""
        return len(self._pending)

    def add(self, record: LoraRecord) -> None:
        """Validate a LoRA soon."""
        self._enqueue((record.tenant, record.lora_id))

    def hear(self, state: ServiceState) -> None:
        """Take in telemetry of a prepost. One that becomes ready is asked at once for all that waits."""
        now = time.monotonic()
        self._preposts.expire(now)
        known = self._preposts.get(state.instance)
        self._preposts.observe(state, now)
        if state.ready and not (known and known.ready):
            self._arrivals += 1
            self._enqueue_all()

    async def run(self, pause_s: float) -> None:
        """Validate what is added; what no prepost has answered is tried again after `pause_s`. It never returns."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._work(), name=f"validation-{number}")
            while True:
                await asyncio.sleep(pause_s)
                self._enqueue_all()

    def _enqueue_all(self) -> None:
        for key in self._pending:
            self._enqueue(key)

    def _enqueue(self, key: tuple[str, str]) -> None:
        tenant, lora_id = key
        self._pending[key] = None
        if tenant not in self._waiting:
            self._waiting[tenant] = {}
            self._turns.put_nowait(tenant)
        self._waiting[tenant].setdefault(lora_id)

    async def _work(self) -> None:
        while True:
            heed_cancel()
            tenant, arrivals = await self._turns.get(), self._arrivals
            own = self._waiting[tenant]
            key = tenant, next(iter(own))
            try:
                if await self._settled(*key):
                    self._pending.pop(key, None)
                    self._unexpected.pop(key, None)
            except Exception as error:  # noqa: BLE001 - the task's edge: logged, and tried again
                log.warning("lora_validation_again", lora=key[1], error=repr(error))
            finally:
                del own[key[1]]
                if key in self._pending and arrivals != self._arrivals:
                    self._enqueue(key)  # a prepost came while another was asked
                if own:
                    self._turns.put_nowait(tenant)
                else:
                    del self._waiting[tenant]

    async def _settled(self, tenant: str, lora_id: str) -> bool:
        """Validate one LoRA, unless another instance does. Whether nothing is left to do for it.

        An instance that leaves meanwhile lets go of it, so that another one need not wait.
        """
        try:
            record = await self._records.change(tenant, lora_id, self._claimed)
            if record.state is LoraState.VALIDATING and record.worker == self._instance:
                async with self._working(record):
                    record = await self._settle(record)
        except LoraNotFound:  # it was deleted
            return True
        except asyncio.CancelledError:
            with suppress(LoraNotFound, TimeoutError):
                async with asyncio.timeout(LEAVING_S):
                    await self._records.change(tenant, lora_id, self._released)
            raise
        return record.state is not LoraState.VALIDATING

    async def _settle(self, record: LoraRecord) -> LoraRecord:
        deadline = Deadline.after_ms(self._limit_s * 1000)
        request = NormaliseLora(lora=record, remaining_ms=deadline.remaining_ms())
        subject = subjects.prepost("adapter", record.model or "")
        try:
            canonical = await self._bus.call(subject, request, CanonicalLora, deadline)
        except GiornataError as error:
            key = (record.tenant, record.lora_id)
            self._unexpected[key] += isinstance(error, InternalError)
            if self._unexpected[key] >= TRIES:
                error = InternalError(
                    "Reading the LoRA has failed unexpectedly, twice. The log of prepost tells why."
                )
            elif error.retryable or isinstance(error, DeadlineExceeded):
                log.info("lora_waits_for_prepost", lora=record.lora_id, model=record.model, error=str(error))
                return await self._records.change(record.tenant, record.lora_id, self._released)
            self.failed += 1
            log.info("lora_failed", lora=record.lora_id, code=error.code, error=str(error))
            news = {"state": LoraState.FAILED, "error": error.body()}
        else:
            self.ready += 1
            log.info("lora_ready", lora=record.lora_id, rank=canonical.rank, modules=canonical.modules)
            news = {"state": LoraState.READY, "canonical": canonical, "joins_within": None, "error": None}
        return await self._records.change(
            record.tenant,
            record.lora_id,
            lambda now: now.model_copy(update=news) if now.state is LoraState.VALIDATING else None,
        )

    @asynccontextmanager
    async def _working(self, record: LoraRecord) -> AsyncIterator[None]:
        """Say every few seconds that this instance works on a LoRA."""

        async def renew() -> None:
            while True:
                heed_cancel()
                await asyncio.sleep(RENEWED_S)
                with suppress(LoraNotFound):
                    await self._records.change(record.tenant, record.lora_id, self._worked)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(renew(), name=f"renew-{record.lora_id}")
            try:
                yield
            finally:
                task.cancel()

    def _claimed(self, record: LoraRecord) -> LoraRecord | None:
        """The record with this instance at work on it; None where another one is, or nothing is left to do."""
        others = record.worker not in {None, self._instance} and time.time() - record.worked_s < LOST_S
        return None if others else self._worked(record, worker=self._instance)

    def _worked(self, record: LoraRecord, **changed: object) -> LoraRecord | None:
        """The record with the present time, so that no other instance takes it over."""
        if record.state is not LoraState.VALIDATING:
            return None
        return record.model_copy(update={"worked_s": int(time.time()), **changed})

    def _released(self, record: LoraRecord) -> LoraRecord | None:
        """The record with no instance at work on it, if it was this one."""
        if record.state is not LoraState.VALIDATING or record.worker != self._instance:
            return None
        return record.model_copy(update={"worker": None})
