"""Who computes a row's ControlNets, which ControlNets fit a network, and rows that are opened at instances."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from structlog.testing import capture_logs

from giornata.bus.bus import Bus
from giornata.control.layout import ControlMismatch
from giornata.control.link import ControlFailed, slabs
from giornata.control.link.client import ControlLink
from giornata.control.link.server import Listener
from giornata.wire.adapters import ControlKind, ControlWork
from giornata.wire.controlnets import (
    CloseControl,
    CloseControlReply,
    ControlState,
    DataPath,
    DeviceMemory,
    OpenControl,
    OpenControlReply,
    StepRefusal,
)
from giornata.wire.errors import ControlNetUnavailable
from giornata.wire.messages import RunRequest
from giornata.wire.workers import ServiceState
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.controls import sessions as module
from giornata_denoiser.controls.controlnets import (
    ResidualTiming,
    RowWork,
    choose_executor,
    exposed_ms,
    residual_timing,
)
from giornata_denoiser.controls.residuals import ControlNetTarget, OpenControls, control_target, open_controls
from giornata_denoiser.controls.sessions import (
    ControlClientInfo,
    ControlNetInstances,
    ControlNetSessionManager,
    DataPathPool,
    able_instances,
    best_instance,
)
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.contract.messages import MESSAGES
from tests.fakes import tiny_driven, tiny_flux_control, tiny_sd3_control, tiny_unet_control
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.controls.test_remote import BEHIND, CPU, NET, NETWORK, controlled_row
from tests.unit.scheduling.test_adapters import instance

# Who computes a row's ControlNets.


NETS = frozenset({"a" * 64, "b" * 64})


def here(**changed: object) -> ControlState:
    """This process."""
    known = {"capacity_rows": 0, "machine": "m1", "device": "cuda", "threads": 1, "cores": (0, 1)}
    return ControlState.model_validate(known | changed)


HERE = here()
ROW = RowWork(
    network_ms=100,
    local_ms=60,
    work=30e9,
    moved_bytes=20_000_000,
    due=(ResidualTiming(0.1, 0.01), ResidualTiming(1.0, 0.9)),
)
"""An instance at 2 ms for 1e9 multiplications takes 60 ms, and 4 ms to move samples on one host."""
UNET = replace(ROW, due=residual_timing(ControlKind.UNET, [tuple(range(13))]))


def told(name: str, **control: object) -> ServiceState:
    known = {"capacity_rows": 4, "machine": "m1", "device": "cuda:1", "threads": 1, "work_ms": 2.0}
    return instance(name, NETS, control=ControlState.model_validate(known | control))


def test_a_step_waits_for_the_sum_that_comes_latest_after_it_is_read() -> None:
    assert exposed_ms(ROW, told("c"), HERE) == pytest.approx(6.4 - 1)
    late = exposed_ms(ROW, told("c", pending_ms=80), HERE)
    assert late == pytest.approx(86.4 - 1), "others come first"
    slow = exposed_ms(ROW, told("c", work_ms=5.0), HERE)
    assert slow == pytest.approx(154 - 90), "the last one is read behind nine tenths of the network"
    assert exposed_ms(replace(ROW, due=(ResidualTiming(0.1, 0.5),)), told("c"), HERE) == 0


def test_a_unet_waits_before_its_decoder() -> None:
    assert exposed_ms(UNET, told("c"), HERE) == pytest.approx(14)
    assert exposed_ms(replace(UNET, network_ms=200), told("c"), HERE) == 0


def test_sums_are_made_with_all_samples_before_them_and_read_behind_their_block() -> None:
    two, one = (0, 0, 1, 2), (0, 0, 0, None)
    assert residual_timing(ControlKind.FLUX, [two, one]) == (
        ResidualTiming(2 / 4, 1 / 4),
        ResidualTiming(3 / 4, 3 / 4),
        ResidualTiming(4 / 4, 4 / 4),
    )
    nothing: tuple[None, ...] = (None,) * 4
    assert residual_timing(ControlKind.FLUX, [two, nothing]) == residual_timing(ControlKind.FLUX, [two])


@pytest.mark.parametrize(
    ("process", "control"),
    [
        (here(device="cuda:1"), {}),
        (
            here(device="cpu", threads=2, cores=(0, 1, 2)),
            {"device": "cpu", "threads": 2, "cores": (0, 1, 2)},
        ),
        (here(device="cpu", cores=(0,)), {"device": "cpu", "cores": (0,)}),
        (here(device="cpu", cores=(0,)), {"device": "cpu"}),
    ],
)
def test_nothing_is_computed_meanwhile_on_one_device_or_too_few_cores(
    process: ControlState, control: dict[str, object]
) -> None:
    assert exposed_ms(ROW, told("c", **control), process) == pytest.approx(64)
    assert choose_executor(ROW, [told("c", **control)], NETS, process, ControlNetExecutor.AUTO) is None
    assert (
        choose_executor(ROW, [told("c", work_ms=0.1, **control)], NETS, process, ControlNetExecutor.AUTO)
        is None
    )
    assert choose_executor(ROW, [told("c", **control)], NETS, process, ControlNetExecutor.SERVICE) is not None


def test_an_instance_that_has_computed_nothing_yet_is_asked_where_its_work_would_hide() -> None:
    new = told("c", work_ms=None)
    assert exposed_ms(ROW, new, HERE) == exposed_ms(ROW, told("c"), HERE), "as fast as this process: 60 ms"
    assert choose_executor(ROW, [new], NETS, HERE, ControlNetExecutor.AUTO) is not None
    assert choose_executor(ROW, [new], NETS, here(device="cuda:1"), ControlNetExecutor.AUTO) is None


def test_cores_of_their_own_are_enough() -> None:
    alone = here(device="cpu", cores=(0,))
    assert exposed_ms(ROW, told("c", device="cpu", cores=(1,)), alone) == pytest.approx(6.4 - 1)


def test_another_host_moves_samples_more_slowly() -> None:
    far = told("c", machine="m2")
    assert exposed_ms(replace(ROW, due=(ResidualTiming(1.0, 0.0),)), far, HERE) == pytest.approx(80)


def test_what_is_not_here_is_asked_for() -> None:
    elsewhere = replace(ROW, local_ms=math.inf)
    for executor in ControlNetExecutor:
        assert choose_executor(elsewhere, [told("c", work_ms=900.0)], NETS, HERE, executor) is not None
    assert choose_executor(elsewhere, [], NETS, HERE, ControlNetExecutor.AUTO) is None
    assert choose_executor(ROW, [told("c")], NETS, HERE, ControlNetExecutor.LOCAL) is None


def test_the_best_instance_shares_memory_then_has_the_weights_then_has_the_least_to_do() -> None:
    states = [
        told("a", machine="m2", resident=tuple(NETS)),
        told("b", pending_ms=1.0),
        told("c", resident=tuple(NETS), pending_ms=9.0),
        told("d", resident=tuple(NETS), pending_ms=5.0),
    ]
    found = present(best_instance(states, NETS, "m1"))
    assert found.instance == "d"


@given(rows=st.integers(0, 5), has=st.frozensets(st.sampled_from(sorted(NETS))), excluded=st.booleans())
def test_an_instance_is_able_with_room_and_all_nets(rows: int, has: frozenset[str], excluded: bool) -> None:
    state = instance("c", has, control=ControlState(capacity_rows=4, rows=rows))
    found = able_instances([state], NETS, {"c"} if excluded else ())
    assert bool(found) == (rows < 4 and has == NETS and not excluded)


# A denoiser refuses ControlNets that do not fit its network when it starts, and says what differs.


PIXELS: Mapping[str, int] = {"flux": 16, "sd3": 16, "sd": 32, "xl": 16}
"""A token's, a side: a latent's pixel is eight of Flux and SD3, and four of these UNets, which have no autoencoder."""
XLABS: dict[str, Any] = {"conditioning_embedding_channels": tiny_flux.LATENT // 4, "patch_size": 2}


@cache
def network(name: str) -> ControlNetTarget:
    of: Any = tiny_unet.network(name, fill=name == "xl") if name in tiny_unet.SHAPES else None
    if of is None:
        of = (tiny_flux.family() if name == "flux" else tiny_driven.family(name)).network
    return present(control_target(of, PIXELS[name]))


def net(name: str, options: Mapping[str, Any]) -> Any:
    if name == "flux":
        return tiny_flux_control.net(**options)
    if name == "sd3":
        return tiny_sd3_control.net(tiny_driven.transformer("sd3").config, **options)
    return tiny_unet_control.net(name, **options)


def opened(folder: Path, of: str, kind: str, **options: Any) -> Any:
    net(kind, options).save_pretrained(folder / "edges")
    (found,) = open_controls(
        str(folder / "edges"), network(of), dtype=torch.float32, device=torch.device("cpu")
    ).values()
    return found


@pytest.mark.parametrize(
    ("of", "options"),
    [("flux", XLABS), ("sd3", {"depth": 4}), ("sd", {}), ("xl", {})],
)
def test_one_that_fits_is_opened_with_its_work(of: str, options: dict[str, Any], tmp_path: Path) -> None:
    """UNets that see a mask take those that do not."""
    work = opened(tmp_path, of, of, **options).card.work
    assert isinstance(work, ControlWork)
    assert work.image > 0
    assert work.shared == (of == "flux")


@pytest.mark.parametrize(
    ("of", "kind", "options", "told"),
    [
        ("flux", "flux", XLABS | {"patch_size": 1}, "pixels of a token 8, and the model's 16"),
        ("flux", "flux", {"doubles": 3}, "double blocks 3, and the model's 2"),
        ("flux", "flux", {"pooled_projection_dim": 12}, "width of pooled text 12"),
        ("sd", "sd", {"scaled": 8}, "pixels of a token 64, and the model's 32"),
        ("xl", "sd", {}, "width of pooled text None, and the model's 20"),
        ("sd", "sd", {"in_channels": 9}, "channels of latents 225, and the model's 256"),
        ("sd", "sd", {"cross_attention_dim": 32}, "width of text 32, and the model's 24"),
        ("sd", "sd", {"layers_per_block": 2}, "skip connections"),
        ("xl", "xl", {"projection_class_embeddings_input_dim": 60}, "width of pooled text 12"),
        ("sd3", "sd3", {"attention_head_dim": 32, "caption_projection_dim": 64}, "width of blocks 64"),
        ("sd3", "sd3", {"joint_attention_dim": 12}, "width of text 12"),
        ("sd3", "sd3", {"depth": 5}, "blocks 5, and the model's 4"),
        ("sd3", "sd3", {"in_channels": 8}, "channels of latents 32, and the model's 64"),
        ("sd3", "flux", {}, "is one of flux, and the model is of sd3"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    of: str, kind: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ControlMismatch, match=told):
        opened(tmp_path, of, kind, **options)


# Rows that are opened at instances, opened again when they are lost, and closed whatever happens
# meanwhile.


SLAB_BYTES = 1 << 20
REQUEST = next(message for message in MESSAGES if isinstance(message, RunRequest))
OPENED = controlled_row("j")
TOLD_OF_PATHS = {"controlnet_path_refused", "controlnet_linked"}


@dataclass
class Wire:
    """Instances' endpoints, each of which answers as a test says."""

    addresses: dict[DataPath, str]
    open: set[str] = field(default_factory=set)
    """Names of instances that have the row."""
    told: list[str] = field(default_factory=list)
    """What was asked of instances, in order of the answers."""
    heard: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    opens: asyncio.Event = field(default_factory=asyncio.Event)
    closes: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, subject: str, asked: BaseModel, _reply: type, _deadline: object) -> BaseModel:
        name = subject.split(".")[-2]
        self.heard.release()
        if isinstance(asked, CloseControl):
            await self.closes.wait()
            self._note(f"close {name}")
            self.open.discard(name)
            return CloseControlReply(was_open=True)
        assert isinstance(asked, OpenControl)
        self.open.add(name)
        await self.opens.wait()
        path = next((path for path in asked.paths if path in self.addresses), None)
        if path is None:
            raise ControlNetUnavailable
        self._note(f"open {name}")
        return OpenControlReply(path=path, address=self.addresses[path], token="t" * 8, behind=(BEHIND,))

    def _note(self, what: str) -> None:
        self.told.append(what)
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(HUNG_S):
            while len(self.told) < count:
                self.news.clear()
                await self.news.wait()


@dataclass
class Bench:
    wire: Wire
    instances: ControlNetInstances
    sessions: ControlNetSessionManager
    opened: OpenControls[ControlLink]
    resumed: asyncio.Queue[str]

    async def asked(self) -> None:
        """Until the row's instance can be asked."""
        await asyncio.wait_for(self.resumed.get(), HUNG_S)
        assert self.opened.has(OPENED.key)

    def lose(self, reason: Exception) -> None:
        self.opened.drop(OPENED.key)
        self.sessions.lost(OPENED.key, reason)


@asynccontextmanager
async def bench(
    folder: Path,
    paths: Sequence[DataPath] = (DataPath.UNIX,),
    device: torch.device = CPU,
) -> AsyncIterator[Bench]:
    unix = folder / "s"
    wire = Wire({DataPath.UNIX: str(unix)})
    wire.opens.set()
    wire.closes.set()
    instances, links, resumed = ControlNetInstances(), DataPathPool(SLAB_BYTES, CPU), asyncio.Queue[str]()
    asking = ControlClientInfo(NETWORK.base, "d", "m1", tuple(paths), torch.float32)
    with Listener(lambda _: True, lambda _: None, unix=unix, tcp=None, device=device):
        async with asyncio.TaskGroup() as tasks:
            sessions = ControlNetSessionManager(
                cast("Bus", wire),
                instances,
                links,
                asking,
                open_s=HUNG_S,
                resume=lambda job_id, _: resumed.put_nowait(job_id),
                tasks=tasks,
            )
            sessions.opened = OpenControls()
            yield Bench(wire, instances, sessions, sessions.opened, resumed)
        assert {each.free_bytes for each in links.made} <= {SLAB_BYTES}, "rows that have ended take no room"
        assert not wire.open, "instances that had the row are told that it has ended"
        assert not sessions.opened.has(OPENED.key)
        await links.close()


def tell_of(made: Bench, name: str) -> None:
    made.instances.hear(instance(name, frozenset({NET.digest})))


async def test_a_row_whose_attempt_ends_while_it_is_opened_is_closed(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        tell_of(made, "c1")
        made.wire.opens.clear()
        async with asyncio.timeout(HUNG_S), made.sessions.held(REQUEST, [OPENED], fall_back=False):
            await made.wire.heard.acquire()
        await made.wire.until(1)
    assert made.wire.told == ["close c1"]
    assert not made.wire.open


async def test_a_row_is_opened_again_when_its_instance_has_closed_it(tmp_path: Path) -> None:
    """The other way round, the row that has just been opened would be closed."""
    async with bench(tmp_path) as made:
        tell_of(made, "c1")
        async with made.sessions.held(REQUEST, [OPENED], fall_back=False):
            await made.asked()
            made.wire.closes.clear()
            made.lose(ControlFailed(StepRefusal.ROW_UNKNOWN, "it was idle"))
            async with asyncio.timeout(HUNG_S):
                for _ in range(2):
                    await made.wire.heard.acquire()
            for _ in range(20):
                await asyncio.sleep(0)
            assert made.wire.told == ["open c1"], "it is not opened before it is closed"
            made.wire.closes.set()
            await made.asked()
            assert made.wire.open == {"c1"}
    assert made.wire.told == ["open c1", "close c1", "open c1", "close c1"]


async def test_a_row_that_has_been_open_is_not_told_that_its_controlnets_do_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOLD_S", 0.0)
    async with bench(tmp_path) as made:
        tell_of(made, "c1")
        async with made.sessions.held(REQUEST, [OPENED], fall_back=False) as failed:
            await made.asked()
            made.sessions.open_s = 0.1  # from now on: a busy machine would not have opened the row in time
            made.instances.hear(instance("c1", frozenset()))
            made.lose(ConnectionError("it is silent"))
            with pytest.raises(ControlNetUnavailable):
                await asyncio.wait_for(failed, HUNG_S)


async def test_a_data_path_that_cannot_be_had_gives_way_to_the_next_best(tmp_path: Path) -> None:
    paths = (DataPath.CUDA, DataPath.UNIX, DataPath.TCP)
    async with bench(tmp_path, paths) as made:
        made.wire.addresses = {DataPath.CUDA: str(tmp_path / "nobody"), **made.wire.addresses}
        tell_of(made, "c1")
        async with made.sessions.held(REQUEST, [OPENED], fall_back=False):
            await made.asked()
    assert made.wire.told == ["open c1", "open c1", "close c1"]


async def test_device_memory_that_cannot_be_opened_gives_way_to_the_socket_for_good_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between containers without a common IPC namespace: each sees the device, and none the other's handles."""

    def shared(size_bytes: int, _device: torch.device) -> slabs.SharedSlab:
        made = DeviceMemory(
            device="GPU-1",
            handle=b"h",
            offset_bytes=0,
            counter=b"c",
            counter_offset=0,
            event=b"",
            event_sync=False,
        )
        return slabs.SharedSlab(torch.zeros(size_bytes, dtype=torch.uint8), device_memory=made)

    def refused(*_told: object) -> object:
        tried.append("opened")
        raise RuntimeError("CUDA error: invalid resource handle")

    tried: list[str] = []
    monkeypatch.setitem(slabs._MAKING, DataPath.CUDA, shared)
    monkeypatch.setattr(slabs.SharedSlab, "left", lambda _: None)
    monkeypatch.setattr(slabs, "_unique", lambda _: "GPU-1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refused)
    with capture_logs() as logs:
        async with bench(tmp_path, (DataPath.CUDA, DataPath.UNIX), device=torch.device("cuda:0")) as made:
            made.wire.addresses[DataPath.CUDA] = made.wire.addresses[DataPath.UNIX]
            tell_of(made, "c1")
            for _ in range(2):
                async with made.sessions.held(REQUEST, [OPENED], fall_back=False):
                    await made.asked()
    told_of = [
        (log["event"], log.get("path") or log["next"]) for log in logs if log["event"] in TOLD_OF_PATHS
    ]
    assert told_of == [("controlnet_path_refused", DataPath.UNIX), ("controlnet_linked", DataPath.UNIX)]
    reasons = [log.get("reason", "") + log.get("error", "") for log in logs]
    assert any("no data path over cuda to" in reason for reason in reasons)
    assert any("the device memory cannot be opened: CUDA error" in reason for reason in reasons)
    assert tried == ["opened"], "the second row takes the path that there is"
