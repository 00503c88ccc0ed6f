"""What is asked for arrives, on every data path between a denoiser and an instance of another process."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from giornata.control.link import ControlFailed, LinkLate
from giornata.control.link.client import ControlLink
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.links import (
    SHAPES,
    SLAB_BYTES,
    SOON_S,
    STEP_BYTES,
    ask,
    device_of,
    in_thread,
    opened,
    samples,
    took,
)
from tests.fakes.control_instance import FACTORS, TOKENS, Instance
from tests.patience import HUNG_S

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_instance_gets_what_was_asked_and_the_denoiser_every_bit(
    link: ControlLink, served: Instance, path: DataPath, dtype: torch.dtype
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


def test_steps_in_flight_are_answered_in_any_order(link: ControlLink, served: Instance) -> None:
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


def test_a_sample_that_is_late_can_be_had_later(link: ControlLink, served: Instance) -> None:
    with ask(link, torch.zeros(4, 8)) as asked:
        step, given = served.next_step(), samples()
        with pytest.raises(LinkLate, match="sample 1 of row j/1/0"):
            asked.sample(1, SOON_S)
        assert asked.arrived == 0
        for index, sample in enumerate(given):
            served.answer(step, index, sample)
        assert torch.equal(took(asked, 1), given[1])


def test_a_step_that_fails_tells_why_and_keeps_what_came(link: ControlLink, served: Instance) -> None:
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


def test_a_step_that_cannot_fit_or_is_of_no_known_kind_is_refused(link: ControlLink) -> None:
    with pytest.raises(ValueError, match=f"{1 << 20} of latents.*the slab has {SLAB_BYTES}"):
        ask(link, torch.zeros(1 << 12, 1 << 6))
    with pytest.raises(ValueError, match=r"float64.*accepted.*bfloat16"):
        ask(link, torch.zeros(4, 8), torch.float64)
    with pytest.raises(ValueError, match=r"\(8,\)"):
        ask(link, torch.zeros(8))


def test_many_threads_share_a_link_with_room_for_two(path: DataPath, served: Instance) -> None:
    each, threads = 20, 4
    served.begin("serve", each * threads)

    def use(link: ControlLink, number: int) -> None:
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


@pytest.mark.parametrize("made_in", [True, False])
def test_a_link_is_used_in_and_out_of_inference_mode(path: DataPath, served: Instance, made_in: bool) -> None:
    with torch.inference_mode(made_in):
        link = opened(path, served)
    with link:
        for asked_in in (True, False):
            with torch.inference_mode(asked_in), ask(link, torch.ones(4, 8)) as asked:
                step, given = served.next_step(), samples()
                served.answer(step, 0, given[0])
                assert torch.equal(took(asked, 0), given[0])
