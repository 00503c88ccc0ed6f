"""What becomes of steps when either side lets go, ends, or is refused; on every data path."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from giornata.control.link import LinkLost
from giornata.control.link.client import ControlLink
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.links import (
    SHAPES,
    SLAB_BYTES,
    STEP_BYTES,
    ask,
    device_of,
    in_thread,
    open_files,
    opened,
    samples,
    took,
)
from tests.fakes.control_instance import TOKENS, Instance, context_of
from tests.patience import HUNG_S


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


def _ask_and_hang(path: DataPath, address: str, ready: Any) -> None:
    link = ControlLink(path, address, TOKENS[0], slab_bytes=SLAB_BYTES, device=device_of(path))
    ask(link, torch.zeros(4, 8))
    ready.send(None)
    signal.pause()


def test_a_denoiser_that_is_killed_leaves_nothing_in_the_instance(path: DataPath, doomed: Instance) -> None:
    context = context_of(device_of(path).type)
    mine, others = context.Pipe()
    process = context.Process(target=_ask_and_hang, args=(path, doomed.addresses[path], others))
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
    link: ControlLink, served: Instance, path: DataPath
) -> None:
    for token in ("", "first-toke", "first-token ", "second"):
        with pytest.raises(LinkLost) as refused:
            opened(path, served, token)
        assert "does not open" in str(refused.value)
    with ask(link, torch.zeros(4, 8)) as asked:
        step, given = served.next_step(), samples()
        served.answer(step, 0, given[0])
        assert torch.equal(took(asked, 0), given[0])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:http", ""])
def test_an_address_that_leads_nowhere_is_a_loss(address: str) -> None:
    with pytest.raises(LinkLost, match="can be reached"):
        ControlLink(DataPath.TCP, address, TOKENS[0], slab_bytes=STEP_BYTES, device=torch.device("cpu"))
