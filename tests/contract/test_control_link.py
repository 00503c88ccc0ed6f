"""One suite for every data path between a denoiser and a ControlNet instance, which is a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.control.link.client import Asked, Link
from giornata.control.link.losses import ControlFailed, LinkLate, LinkLost
from giornata.wire.controlnets import DataPath
from tests.fakes.control_instance import FACTORS, SPAWN, TOKENS, Instance, instance
from tests.patience import HUNG_S

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((12, 40), (5, 24), (1, 7))
"""(tokens, channels) of a step's samples."""
STEP_BYTES = sum(-(-tokens * channels * 4 // 64) * 64 for tokens, channels in ((4, 8), *SHAPES))
"""What such a step takes in float32, with latents (4, 8): places are multiples of 64 bytes."""
SLAB_BYTES = 1 << 20
SOON_S = 0.01


@pytest.fixture(scope="module", params=["unix", "tcp", pytest.param("cuda", marks=NEEDS_CUDA)])
def path(request: pytest.FixtureRequest) -> DataPath:
    return DataPath(request.param)


def device_of(path: DataPath) -> torch.device:
    return torch.device("cuda:0" if path is DataPath.CUDA else "cpu")


@pytest.fixture(scope="module")
def served(path: DataPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with instance(tmp_path_factory.mktemp("link"), str(device_of(path))) as found:
        yield found


@pytest.fixture
def doomed(path: DataPath, tmp_path: Path) -> Iterator[Instance]:
    """An instance for one test, which may end it."""
    with instance(tmp_path, str(device_of(path))) as found:
        yield found


def opened(
    path: DataPath,
    to: Instance,
    token: str = TOKENS[0],
    *,
    slab_bytes: int = SLAB_BYTES,
    room_s: float = HUNG_S,
) -> Link:
    device = device_of(path)
    return Link(path, to.addresses[path], token, slab_bytes=slab_bytes, device=device, room_s=room_s)


@pytest.fixture
def link(path: DataPath, served: Instance) -> Iterator[Link]:
    with opened(path, served) as found:
        yield found


def ask(link: Link, latents: Tensor, dtype: torch.dtype = torch.float32, row: str = "j/1/0") -> Asked:
    tokens, channels = zip(*SHAPES, strict=True)
    return link.ask(
        row=row,
        step=3,
        level=0.625,
        latents=latents,
        tokens=tokens,
        channels=channels,
        dtype=dtype,
        whole=False,
    )


def samples(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def took(asked: Asked, index: int) -> Tensor:
    return asked.sample(index, HUNG_S).cpu()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits, and what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except (LinkLost, LinkLate, ControlFailed, ValueError) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_instance_gets_what_was_asked_and_the_denoiser_every_bit(
    link: Link, served: Instance, path: DataPath, dtype: torch.dtype
) -> None:
    latents = torch.randn(9, 64).to(dtype)
    with ask(link, latents.to(device_of(path)), dtype) as asked:
        step = served.next_step()
        assert (step.token, step.row, step.step, step.level, step.whole) == (
            TOKENS[0],
            "j/1/0",
            3,
            0.625,
            False,
        )
        assert (step.shapes, step.dtype) == (SHAPES, str(dtype).removeprefix("torch."))
        assert torch.equal(step.latents, latents)
        given = samples(dtype)
        for index, sample in enumerate(given):
            served.answer(step, index, sample)
        for index, sample in enumerate(given):
            found = took(asked, index)
            assert found.dtype is dtype
            assert torch.equal(found, sample)
        assert asked.arrived == len(given)


def test_steps_in_flight_are_answered_in_any_order(link: Link, served: Instance) -> None:
    with contextlib.ExitStack() as stack:
        flying = [stack.enter_context(ask(link, torch.full((4, 8), float(n)), row=f"{n}")) for n in range(3)]
        steps = [served.next_step() for _ in flying]
        given = [samples() for _ in flying]
        for index, number in [(2, 1), (0, 2), (1, 0), (0, 1), (2, 2), (0, 0), (1, 1), (1, 2), (2, 0)]:
            assert steps[number].row == str(number)
            assert steps[number].latents[0, 0] == number
            served.answer(steps[number], index, given[number][index])
        for asked, expected in zip(flying, given, strict=True):
            for index, sample in enumerate(expected):
                assert torch.equal(took(asked, index), sample)


def test_who_waits_before_a_sample_comes_gets_it(link: Link, served: Instance) -> None:
    with ask(link, torch.zeros(4, 8)) as asked, ThreadPoolExecutor(len(SHAPES)) as pool:
        waiting = [pool.submit(took, asked, index) for index in range(len(SHAPES))]
        step, given = served.next_step(), samples()
        assert not any(each.done() for each in waiting)
        for index in (1, 2, 0):
            served.answer(step, index, given[index])
            assert torch.equal(waiting[index].result(HUNG_S), given[index])


def test_a_sample_that_is_late_can_be_had_later(link: Link, served: Instance) -> None:
    with ask(link, torch.zeros(4, 8)) as asked:
        step, given = served.next_step(), samples()
        with pytest.raises(LinkLate, match="sample 1 of row j/1/0"):
            asked.sample(1, SOON_S)
        assert asked.arrived == 0
        for index, sample in enumerate(given):
            served.answer(step, index, sample)
        assert torch.equal(took(asked, 1), given[1])


def test_a_step_that_fails_tells_why_and_keeps_what_came(link: Link, served: Instance) -> None:
    with ask(link, torch.zeros(4, 8)) as asked:
        step, given = served.next_step(), samples()
        served.answer(step, 1, given[1])
        thread, raised = in_thread(lambda: asked.sample(0, HUNG_S))
        served.call("fail", step.number, "control_not_open", "row j/1/0 is not open")
        thread.join(HUNG_S)
        (failure,) = raised
        assert isinstance(failure, ControlFailed)
        assert (failure.code, failure.message) == ("control_not_open", "row j/1/0 is not open")
        assert torch.equal(took(asked, 1), given[1])
        assert served.call("gone", step.number)
        served.answer(step, 0, given[0])  # is dropped
    assert not link.lost


def test_a_step_without_room_waits_until_another_has_gone(path: DataPath, served: Instance) -> None:
    with (
        opened(path, served, slab_bytes=STEP_BYTES) as link,
        ask(link, torch.zeros(4, 8)) as first,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(ask, link, torch.ones(4, 8))
        step = served.next_step()
        for index, sample in enumerate(samples()):
            served.answer(step, index, sample)
        took(first, len(SHAPES) - 1)
        assert not waiting.done()
        first.release()
        with waiting.result(HUNG_S) as second:
            step, given = served.next_step(), samples()
            assert step.latents[0, 0] == 1
            served.answer(step, 0, given[0])
            assert torch.equal(took(second, 0), given[0])


def test_a_step_that_gets_no_room_in_time_is_late(path: DataPath, served: Instance) -> None:
    with opened(path, served, slab_bytes=STEP_BYTES, room_s=SOON_S) as link, ask(link, torch.zeros(4, 8)):
        served.next_step()
        with pytest.raises(LinkLate, match=f"no room for a step of {STEP_BYTES} bytes"):
            ask(link, torch.zeros(4, 8))


def test_a_step_that_cannot_fit_or_is_of_no_known_kind_is_refused(link: Link) -> None:
    with pytest.raises(ValueError, match=f"{1 << 20} of latents.*the slab has {SLAB_BYTES}"):
        ask(link, torch.zeros(1 << 12, 1 << 6))
    with pytest.raises(ValueError, match=r"float64.*accepted.*bfloat16"):
        ask(link, torch.zeros(4, 8), torch.float64)
    with pytest.raises(ValueError, match=r"\(8,\)"):
        ask(link, torch.zeros(8))


def test_a_released_step_is_not_written_to(path: DataPath, served: Instance) -> None:
    """Its place serves the next step as soon as the instance has let go of it."""
    with opened(path, served, slab_bytes=STEP_BYTES) as link:
        asked = ask(link, torch.zeros(4, 8))
        old = served.next_step()
        served.answer(old, 0, samples()[0])
        thread, raised = in_thread(lambda: asked.sample(1, HUNG_S))
        asked.release()
        asked.release()
        thread.join(HUNG_S)
        assert [type(each) for each in raised] == [ValueError]
        with pytest.raises(ValueError, match="released"):
            asked.sample(0, HUNG_S)
        with ask(link, torch.ones(4, 8)) as after:
            new, given = served.next_step(), samples()
            assert served.call("gone", old.number)
            assert not served.call("gone", new.number)
            served.answer(new, 1, given[1])
            served.answer(old, 1, torch.full(SHAPES[1], 7.0))
            served.answer(new, 0, given[0])
            for index in (1, 0):
                assert torch.equal(took(after, index), given[index])


def test_an_instance_that_is_killed_is_lost_and_nothing_hangs(path: DataPath, doomed: Instance) -> None:
    with opened(path, doomed) as link, ask(link, torch.zeros(4, 8)) as asked:
        step, given = doomed.next_step(), samples()
        doomed.answer(step, 0, given[0])
        took(asked, 0)
        thread, raised = in_thread(lambda: asked.sample(1, HUNG_S))
        doomed.kill()
        thread.join(HUNG_S)
        assert [type(each) for each in raised] == [LinkLost]
        assert link.lost
        assert torch.equal(took(asked, 0), given[0])
        with pytest.raises(LinkLost):
            ask(link, torch.zeros(4, 8))
        with pytest.raises(LinkLost):
            opened(path, doomed)


def test_an_instance_that_stops_is_lost(path: DataPath, doomed: Instance) -> None:
    with opened(path, doomed) as link, ask(link, torch.zeros(4, 8)) as asked:
        doomed.next_step()
        doomed.stop()
        with pytest.raises(LinkLost):
            asked.sample(0, HUNG_S)


def _ask_and_hang(path: DataPath, address: str, ready: Any) -> None:
    link = Link(path, address, TOKENS[0], slab_bytes=SLAB_BYTES, device=device_of(path))
    ask(link, torch.zeros(4, 8))
    ready.send(None)
    signal.pause()


def test_a_denoiser_that_is_killed_leaves_nothing_in_the_instance(path: DataPath, doomed: Instance) -> None:
    mine, others = SPAWN.Pipe()
    process = SPAWN.Process(target=_ask_and_hang, args=(path, doomed.addresses[path], others))
    process.start()
    others.close()
    try:
        assert mine.poll(HUNG_S)
        mine.recv()
        step = doomed.next_step()
        assert doomed.call("mapped") == (path is DataPath.UNIX)
        os.kill(process.pid or 0, signal.SIGKILL)
    finally:
        process.kill()
        process.join(HUNG_S)
        mine.close()
    doomed.call("join")
    doomed.answer(step, 0, samples()[0])  # is dropped
    assert doomed.call("gone", step.number)
    doomed.call("forget")
    assert doomed.call("mapped") == 0
    with opened(path, doomed) as link, ask(link, torch.zeros(4, 8)) as asked:
        step, given = doomed.next_step(), samples()
        doomed.answer(step, 0, given[0])
        assert torch.equal(took(asked, 0), given[0])


def test_closing_wakes_those_who_wait(path: DataPath, served: Instance) -> None:
    with opened(path, served, slab_bytes=STEP_BYTES) as link:
        asked = ask(link, torch.zeros(4, 8))
        step, given = served.next_step(), samples()
        served.answer(step, 2, given[2])
        came = asked.sample(2, HUNG_S)
        waiting = [
            in_thread(lambda: asked.sample(0, HUNG_S)),
            in_thread(lambda: ask(link, torch.zeros(4, 8))),
        ]
    for thread, raised in waiting:
        thread.join(HUNG_S)
        assert [type(each) for each in raised] == [LinkLost]
    asked.release()
    link.close()
    assert torch.equal(came.cpu(), given[2])


def _use(path: DataPath, served: Instance) -> None:
    with opened(path, served) as link, ask(link, torch.zeros(4, 8)) as asked:
        served.answer(served.next_step(), 0, samples()[0])
        took(asked, 0)


def test_a_link_that_was_closed_leaves_no_thread_and_no_file(path: DataPath, served: Instance) -> None:
    _use(path, served)
    threads, files = set(threading.enumerate()), open_files()
    _use(path, served)
    assert set(threading.enumerate()) == threads
    assert open_files() == files


def test_a_wrong_token_opens_nothing_and_disturbs_nobody(
    link: Link, served: Instance, path: DataPath
) -> None:
    for token in ("", "first-toke", "first-token ", "second"):
        with pytest.raises(LinkLost) as refused:
            opened(path, served, token)
        assert "does not open" in str(refused.value)
    with ask(link, torch.zeros(4, 8)) as asked:
        step, given = served.next_step(), samples()
        served.answer(step, 0, given[0])
        assert torch.equal(took(asked, 0), given[0])


def test_nobody_listens(path: DataPath, tmp_path: Path) -> None:
    address = "127.0.0.1:1" if path is DataPath.TCP else str(tmp_path / "none.sock")
    with pytest.raises(LinkLost, match="can be reached"):
        Link(path, address, TOKENS[0], slab_bytes=STEP_BYTES, device=device_of(path))


def test_two_links_at_once(path: DataPath, served: Instance) -> None:
    with opened(path, served) as one, opened(path, served, TOKENS[1]) as two:
        with ask(one, torch.zeros(4, 8)) as first, ask(two, torch.ones(4, 8)) as second:
            steps = {step.token: step for step in (served.next_step(), served.next_step())}
            given = [samples(), samples()]
            for token, some in zip(TOKENS, given, strict=True):
                served.answer(steps[token], 0, some[0])
            assert torch.equal(took(first, 0), given[0][0])
            assert torch.equal(took(second, 0), given[1][0])
            one.close()
            served.answer(steps[TOKENS[1]], 1, given[1][1])
            assert torch.equal(took(second, 1), given[1][1])
        assert (one.lost, two.lost) == (True, False)


def test_many_threads_share_a_link_with_room_for_two(path: DataPath, served: Instance) -> None:
    each, threads = 20, 4
    served.begin("serve", each * threads)

    def use(link: Link, number: int) -> None:
        for turn in range(each):
            value = float(number * each + turn)
            with ask(link, torch.full((4, 8), value)) as asked:
                for index, shape in enumerate(SHAPES):
                    expected = torch.full(shape, value * FACTORS[index])
                    assert torch.equal(took(asked, index), expected)

    with (
        opened(path, served, slab_bytes=2 * STEP_BYTES) as link,
        ThreadPoolExecutor(threads) as pool,
    ):
        for done in [pool.submit(use, link, number) for number in range(threads)]:
            done.result(HUNG_S)
    served.finish()
