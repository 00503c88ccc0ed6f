"""Steps over the real data path: the samples are those that the same nets make in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from giornata.control.layout import sum_residuals
from giornata.control.link import ControlFailed
from giornata.runtime import usable_cores
from giornata.wire.controlnets import DataPath
from giornata.wire.values import CellMap
from tests.integration.controlnet.bench import Bench, samples, shapes
from tests.patience import HUNG_S

LIVE = (1, 2, 6, 11)
CELLS = CellMap(height=3, width=4, bits=bytes([0b01100010, 0b00010000]))


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("path", [DataPath.UNIX, DataPath.TCP])
async def test_samples_are_those_of_one_process(bench: Bench, path: DataPath) -> None:
    async with bench.service(control_address="127.0.0.1:0") as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges", scale=0.7), paths=(path,))
        assert row.opened.path is path
        assert row.opened.behind == (bench.nets["edges"].behind(row.request.base),)
        for step in (0, 3):
            expected = row.expected(bench.nets, step)
            assert_same(samples(denoiser.step(row, step, shapes(expected)), len(expected)), expected)
        assert await denoiser.close(row)
        assert not await denoiser.close(row)


async def test_rows_of_several_denoisers_share_a_forward(bench: Bench) -> None:
    async with bench.service() as running:
        first, second = bench.denoiser(running), bench.denoiser(running)
        held = await first.open(bench.use("edges"))
        rows = [await first.open(bench.use("edges")), await second.open(bench.use("edges"), acting=[(1, 4)])]
        expected = [rows[0].expected(bench.nets, 0), rows[1].expected(bench.nets, 2)]
        running.gate.hold()
        blocking = first.step(held, 1, shapes(expected[0]))
        assert running.gate.began.acquire(timeout=HUNG_S)
        asked = [
            first.step(rows[0], 0, shapes(expected[0])),
            second.step(rows[1], 2, shapes(expected[1])),
        ]
        first.reach(rows[0])
        second.reach(rows[1])
        running.gate.permits.release(100)
        samples(blocking, len(expected[0]))
        for one, other in zip(asked, expected, strict=True):
            assert_same(samples(one, len(other)), other)
        state = await running.told(lambda told: told.steps_total == 3)
    assert running.gate.forwards == [("edges", 1), ("edges", 2)]
    assert state.late_total == 0
    assert state.work_ms is not None
    assert state.cores == usable_cores()


async def test_samples_return_as_they_are_computed(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        expected = row.expected(bench.nets, 0)
        running.gate.each = threading.Semaphore(0)
        with denoiser.step(row, 0, shapes(expected)) as asked:
            for index, each in enumerate(expected):
                torch.testing.assert_close(asked.sample(index, HUNG_S), each, atol=1e-6, rtol=0)
                assert asked.arrived == index + 1, "the next one has not been computed"
                running.gate.each.release()
        assert len(expected) == 3


async def test_two_nets_are_summed_where_they_act(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        uses = (bench.use("edges", scale=0.5), bench.use("depth"), bench.use("pose", scale=0.0))
        row = await denoiser.open(*uses, acting=[(0, 3), (2, 4), (0, 4)])
        assert row.opened.behind[2] == (None,) * 5, "a net of scale 0 adds nothing, and is not loaded"
        counts = []
        for step in range(4):
            expected = row.expected(bench.nets, step)
            acts = [nth for nth, (first, end) in enumerate(row.request.acting[:2]) if first <= step < end]
            assert len(expected) == len(sum_residuals([row.opened.behind[nth] for nth in acts]).parts)
            assert_same(samples(denoiser.step(row, step, shapes(expected)), len(expected)), expected)
            counts.append(len(running.gate.forwards))
        state = await running.told(lambda told: told.steps_total == 4)
    assert [name for name, _ in running.gate.forwards] == ["edges", "edges", "edges", "depth", "depth"]
    digests = {bench.nets[name].card.digest for name in ("edges", "depth")}
    assert set(state.resident) == digests


async def test_live_tokens_alone_return_where_a_step_is_not_whole(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"), computed=CELLS)
        expected = row.expected(bench.nets, 1, LIVE)
        assert expected[0].shape[0] == len(LIVE)
        assert_same(samples(denoiser.step(row, 1, shapes(expected), whole=False), len(expected)), expected)
        whole = row.expected(bench.nets, 1)
        assert_same(samples(denoiser.step(row, 1, shapes(whole)), len(whole)), whole)


async def test_a_step_that_is_none_of_the_row_is_refused(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser, other = bench.denoiser(running), bench.denoiser(running)
        row, own = (
            await denoiser.open(bench.use("edges"), acting=[(0, 2)]),
            await other.open(bench.use("edges")),
        )
        right = shapes(row.expected(bench.nets, 0))
        refusals = {
            "level": denoiser.step(row, 0, right, level=999.0),
            "step": denoiser.step(row, 7, right),
            "latents": denoiser.step(row, 0, right, latents=torch.zeros(11, 64)),
            "samples": denoiser.step(row, 0, [(3, 64)]),
            "nothing acts": denoiser.step(row, 3, right),
        }
        for what, asked in refusals.items():
            with pytest.raises(ControlFailed) as raised, asked:
                asked.sample(0, HUNG_S)
            assert raised.value.code == "controlnet_step_mismatch", what
        samples(other.step(own, 0, right), len(right))
        strange = denoiser.step(row, 0, right, key="job.1.0"), other.step(row, 0, right)
        for asked in strange:  # of no row, and of another denoiser's
            with pytest.raises(ControlFailed) as raised, asked:
                asked.sample(0, HUNG_S)
            assert raised.value.code == "controlnet_row_unknown"


async def test_the_culprit_of_a_forward_fails_alone(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        rows = [await denoiser.open(bench.use("edges")) for _ in range(3)]
        expected = [row.expected(bench.nets, 0) for row in rows]
        right = shapes(expected[0])
        running.gate.hold()
        blocking = denoiser.step(rows[0], 1, right)
        assert running.gate.began.acquire(timeout=HUNG_S)
        asked = [denoiser.step(rows[0], 0, right), denoiser.step(rows[2], 0, right)]
        poisoned = denoiser.step(rows[1], 0, right, latents=torch.full((12, 64), torch.nan))
        denoiser.reach(rows[0])
        with capture_logs():  # to render the traceback takes seconds
            running.gate.permits.release(100)
            samples(blocking, len(right))
            assert_same(samples(asked[0], len(right)), expected[0])
            assert_same(samples(asked[1], len(right)), expected[2])
            with pytest.raises(ControlFailed) as raised, poisoned:
                poisoned.sample(0, HUNG_S)
        assert raised.value.code == "row_poisoned"


async def test_steps_that_nobody_waits_for_are_not_computed(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        right = shapes(row.expected(bench.nets, 0))
        running.gate.hold()
        blocking = denoiser.step(row, 0, right)
        assert running.gate.began.acquire(timeout=HUNG_S)
        denoiser.step(row, 1, right).release()
        later = denoiser.step(row, 2, right)
        denoiser.reach(row)
        running.gate.permits.release(100)
        samples(blocking, len(right))
        samples(later, len(right))
        state = await running.told(lambda told: told.steps_total == 2)
    assert state.late_total == 1
    assert len(running.gate.forwards) == 2
