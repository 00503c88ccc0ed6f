"""Computing steps of given rows over one family, and copying to the host what they make."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import UNTRACED, LaneTracer, TraceLane
from giornata.planning.operations import StepWork
from giornata.scheduling.batch import RowKey
from giornata.wire.errors import RowPoisoned
from giornata.wire.workers import StepSample
from giornata_denoiser.blocks.slabs import Device, TransferHandle, WaitTimer
from giornata_denoiser.engine import step_results
from giornata_denoiser.engine.adapters import (
    ControlExecutor,
    ControlLost,
    LowRanks,
    NoControls,
    NoLoras,
    acting_set,
    computes_every_token,
    ready_row,
    with_low_ranks,
    with_residuals,
)
from giornata_denoiser.engine.batch_tensors import BatchAssembler
from giornata_denoiser.engine.denoise_step import (
    StepOutput,
    denoise_step,
    extrapolated_step,
    join_outputs,
    split_rows,
    spread_plan,
)
from giornata_denoiser.engine.loading import Accelerator
from giornata_denoiser.engine.protocol import FailedRow, StepReport
from giornata_denoiser.engine.step_budget import ENTRIES_ON_DEVICE
from giornata_denoiser.engine.step_plan import ReuseOptions, StepPlan, StepPlanner
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, Entry

# What template runs record, on its way from a GPU to host memory: beside the computing, through pinned
# buffers.


BUFFERS: Final = 4
BUFFER_BYTES: Final = 8 << 20


class HostCopy:
    """The locations of entries in host memory as they are recorded."""

    def take(self, entry: Entry) -> Entry:
        """`entry` in host memory; its values are there once :meth:`finish` has returned."""
        return entry

    def finish(self, entries: Sequence[Entry]) -> None:
        """Wait until what :meth:`take` returned is there; raises why one of `entries` never will be."""


class _HostCopyChunk(NamedTuple):
    arrival: TransferHandle
    source: Tensor
    """On the device; held until it has been read, since its memory is the computing stream's."""
    buffer: Tensor
    target: Tensor
    """On the host, as many bytes as the buffer holds."""


class AsyncHostCopy(HostCopy):
    """Moves entries in a thread of its own, by the copy stream of `device` and a ring of buffers, pinned or not.

    `waits` hears how long the engine waits.
    """

    def __init__(self, device: Device, waits: WaitTimer, *, pin: bool) -> None:
        self._device, self._waits, self._pin = device, waits, pin
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hosting")
        self._moving: deque[tuple[Entry, Future[None]]] = deque()
        self._errors: WeakKeyDictionary[Entry, BaseException] = WeakKeyDictionary()
        self._ring: list[Tensor] = []
        self._turn = 0

    def take(self, entry: Entry) -> Entry:
        """See :meth:`HostCopy.take`; waits while too many entries are on the device."""
        moves: list[tuple[Tensor, Tensor]] = []
        hosted = Entry(entry.level, tuple(_hosted(kept, moves) for kept in entry.blocks))
        self._device.produced()
        self._moving.append((hosted, self._thread.submit(self._move, moves)))
        self._wait(ENTRIES_ON_DEVICE - 1)
        return hosted

    def finish(self, entries: Sequence[Entry]) -> None:
        """See :meth:`HostCopy.finish`."""
        self._wait(0)
        for entry in entries:
            if entry in self._errors:
                raise self._errors[entry]

    def _wait(self, left: int) -> None:
        with self._waits.waiting():
            while len(self._moving) > left:
                entry, moved = self._moving.popleft()
                if (error := moved.exception()) is not None:
                    self._errors[entry] = error

    def _move(self, moves: list[tuple[Tensor, Tensor]]) -> None:
        """Fill the second tensor of each pair from the first; both are let go of as soon as that is done."""
        under_way: deque[_HostCopyChunk] = deque()
        with torch.inference_mode():
            while moves:
                for source, target in _pieces(*moves.pop()):
                    if len(under_way) == BUFFERS:
                        _land(under_way.popleft())
                    under_way.append(self._sent(source, target))
            while under_way:
                _land(under_way.popleft())

    def _sent(self, source: Tensor, target: Tensor) -> _HostCopyChunk:
        if not self._ring:
            self._ring = [
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._pin) for _ in range(BUFFERS)
            ]
        buffer = self._ring[self._turn % BUFFERS][: len(source)]
        self._turn += 1
        with self._device.loading() as arrival:
            buffer.copy_(source, non_blocking=True)
        return _HostCopyChunk(arrival, source, buffer, target)


def hosting_for(device: torch.device, waits: WaitTimer) -> HostCopy:
    """Return how entries that are recorded on `device` get to host memory."""
    if device.type != "cuda":
        return HostCopy()
    return AsyncHostCopy(Accelerator(device, budget_bytes=0), waits, pin=True)


def _hosted(kept: CachedBlock, moves: list[tuple[Tensor, Tensor]]) -> CachedBlock:
    """The same on the host, not filled yet; `moves` are to fill it."""

    def moved(source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype)
        moves.append((source.contiguous(), target))
        return target

    return kept.each(moved)


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both, which are contiguous, as bytes, in pieces that fit a buffer."""
    parts = (tensor.view(-1).view(torch.uint8) for tensor in (source, target))
    first, second = (torch.split(part, BUFFER_BYTES) for part in parts)
    return zip(first, second, strict=True)


def _land(piece: _HostCopyChunk) -> None:
    piece.arrival.finish()
    piece.target.copy_(piece.buffer)


# Whether what steps have made is finite: read one step late on a GPU, so that it never waits for the host.
#
# The engine gives a GPU its next step and then reads what the one before has come to. A row that leaves the
# engine, is shown, or teaches others is read at once.


class FiniteCheck:
    """A check that each of some latents, (tokens, channels) each, is finite. A CPU knows at once."""

    late = False
    """Whether :meth:`read` may have to wait for the device."""

    def __init__(self, latents: Sequence[Tensor]) -> None:
        # A sum in float64 is finite if all terms of a smaller dtype are; it takes one kernel a latent.
        self._finite = torch.stack([latent.sum(dtype=torch.float64) for latent in latents]).isfinite()

    def read(self) -> list[bool]:
        """The answer for each latent; waits until all are known."""
        finite: list[bool] = self._finite.tolist()
        return finite


class LateFiniteCheck(FiniteCheck):
    """The verdict of a CUDA device: copied to pinned memory, and read once an event has passed."""

    late = True

    def __init__(self, latents: Sequence[Tensor]) -> None:
        super().__init__(latents)
        self._host = torch.empty(len(latents), dtype=torch.bool, pin_memory=True)
        self._host.copy_(self._finite, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's is not typed
        self._event.record()

    def read(self) -> list[bool]:
        """The answer for each latent; waits for this step, and not for the next one."""
        self._event.synchronize()
        finite: list[bool] = self._host.tolist()
        return finite


Judge = Callable[[Sequence[Tensor]], FiniteCheck]
"""Makes the verdict on a step's latents."""


def judge_for(device: torch.device) -> Judge:
    """Return how verdicts on `device` are made."""
    return LateFiniteCheck if device.type == "cuda" else FiniteCheck


class _UnreadFiniteCheck(NamedTuple):
    before: Row
    """The row as it was before the step."""
    verdict: FiniteCheck
    place: int
    """The row's index in the step."""


class PendingFiniteChecks:
    """The verdicts that are not read yet, by row."""

    def __init__(self) -> None:
        self._unread: dict[RowKey, _UnreadFiniteCheck] = {}

    def postpone(self, rows: Sequence[Row], verdict: FiniteCheck) -> None:
        """The step of `rows`, as they were before it, is judged by `verdict`, which is read later."""
        for place, row in enumerate(rows):
            self._unread[row.key] = _UnreadFiniteCheck(row, verdict, place)

    def poisoned(self, rows: Sequence[Row]) -> dict[RowKey, Row]:
        """Read the open verdicts of `rows`. Returns the rows that are not finite, as they were before the step."""
        found = {}
        for row in rows:
            unread = self._unread.pop(row.key, None)
            if (
                unread is not None
                and unread.before.conditioning is row.conditioning  # else another row of its name
                and not unread.verdict.read()[unread.place]
            ):
                found[row.key] = unread.before
        return found

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for key in self._unread.keys() - keys:
            del self._unread[key]


# Computing steps of given rows over one family: who they are and when they share a step is decided
# elsewhere.
#
# What is kept from step to step serves the next one alone: inputs on the device, slabs, the assembly.


class _InFlightStep(NamedTuple):
    """A step that the device has been given."""

    verdict: FiniteCheck
    work: StepWork
    sample: StepSample | None
    began: float
    assemble_ms: float
    waited_ms: float
    controls_waited_ms: float
    waits_s: float
    """What all steps before it have waited for ControlNets."""


class ModelRunner:
    """Computes steps in the thread that calls it; see :class:`giornata_denoiser.engine.engine.Engine` for its parts.

    `ran_out` hears of rows whose step did not fit into memory together.
    """

    def __init__(
        self,
        family: ModelFamily,
        clock: Callable[[], float],
        preview_map: PreviewMap | None = None,
        *,
        reusing: ReuseOptions | None = None,
        trace: LaneTracer = UNTRACED,
        judge: Judge | None = None,
        low_ranks: LowRanks | None = None,
        controls: ControlExecutor | None = None,
        ran_out: Callable[[Sequence[Row]], object] = lambda _: None,
    ) -> None:
        self.family = family
        self._judge = judge or judge_for(family.device)
        self._checks = PendingFiniteChecks()
        self._given: _InFlightStep | None = None
        """The step that the device may not have ended."""
        self._ended_s, self._ended_waits_s = -math.inf, 0.0
        """When it ended the last one that has been waited for, and how long all had waited for ControlNets by then."""
        self._preview_map = preview_map
        how = reusing or ReuseOptions()
        self._model, self._learns = how.model, how.correction_bits is not None
        self._ran_out = ran_out
        self._clock, self._trace = clock, trace
        self._low_ranks = low_ranks or NoLoras()
        self._controls = controls or NoControls()
        self.placing = BatchAssembler(family)
        self._waits, self._control_waits = WaitTimer(clock), WaitTimer(clock)
        self.hosting = hosting_for(family.device, self._waits)
        self.sources = StepPlanner(family, how, self._waits, trace)
        """What plans the steps' use of templates."""

    def able(self, row: Row) -> Row | None:
        """`row` as it makes its next step; None while it has to wait for its LoRAs, or for its ControlNets."""
        now = ready_row(row, self._low_ranks)
        return None if now is None else self._controls.able(now)

    def retain(self, joined: Collection[RowKey], present: Sequence[Row], *, resting: bool) -> None:
        """Forget all rows but these, and the assembly where the next step has no rows: the engine is `resting`.

        Rows that are `present` have made a step here, or will; those that have `joined` may have a part in the next.
        """
        self.sources.retain(joined)
        self._checks.retain([row.key for row in present])
        self._controls.retain(joined)
        self.placing.retain(joined, resting=resting)

    def rest(self, present: Collection[RowKey]) -> None:
        """Give back what steps have kept: slabs, inputs, assembly. Rows that go on have theirs made again.

        Verdicts on rows that are `present` are still read.
        """
        self._checks.retain(present)
        self._give_back()

    def compute(self, rows: tuple[Row, ...], *, roomy: bool = False) -> StepReport:
        """One step of `rows`; changes nothing but what is kept for the next one. `roomy`: nothing is left to give back.

        A GPU may still compute it: rows that the report calls advanced may then fail in the next one, and its sample is
        of the step before. A row that is done, shown or taught in this step is known to be finite.

        If the step raises, every row is computed alone: the culprit fails, the others do not notice. If memory was out,
        what is kept for rows and of templates is given back before, and later steps take fewer rows.

        Raises:
            torch.AcceleratorError: the device itself is lost, and no row can be blamed.
            Exception: other processes compute the step too, and whatever fails ends the group's.
        """
        began = self._clock()
        try:
            return self.attempt(rows)
        except torch.AcceleratorError:
            raise
        except ControlLost:  # its rows are no longer ready; the others repeat the step
            self._given = None  # how long the step before took cannot be told any more
            return StepReport(began, self._clock())
        except Exception as error:  # a row's edge: the row is answered with it, and the service logs it
            if self.family.group:  # the others would not compute the rows alone
                raise
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            plain = len(rows) == 1 and rows[0].template is None and not rows[0].renewed_every
            if plain and (roomy or not out_of_memory):
                return StepReport(
                    began, self._clock(), failed=(FailedRow(rows[0], step_results.row_error(error)),)
                )
        # Outside of the handler, since the traceback keeps the tensors of the failed step alive.
        if out_of_memory:
            if len(rows) > 1:
                self._ran_out(rows)
            self._give_back()
            self.sources.give_back()
            if self.family.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(rows) == 1:  # what is taken is never the reason of a failure
            alone = rows[0] if plain else rows[0].plain()
            return self.compute((alone,), roomy=out_of_memory)
        parts = [self.compute((row,)) for row in rows]
        return StepReport(
            began,
            self._clock(),
            advanced=tuple(row for part in parts for row in part.advanced),
            failed=tuple(failure for part in parts for failure in part.failed),
            previews=tuple(preview for part in parts for preview in part.previews),
        )

    def attempt(self, rows: tuple[Row, ...]) -> StepReport:
        """One step of `rows` as :meth:`compute` begins it: what it raises blames no row, and nothing is tried again."""
        with self._trace.span(TraceLane.STEP, f"{len(rows)} rows"):
            return self._forward(rows)

    def _give_back(self) -> None:
        self.sources.rest()
        self._controls.retain(())
        self.placing.clear()

    def _forward(self, rows: tuple[Row, ...]) -> StepReport:
        began, waits_s = self._clock(), self._control_waits.total_s
        show, network = self._preview_map, self.family.network
        with torch.inference_mode():
            stepped, plan, assembled = self._made(rows)
            # (height, width, 3) uint8 on the device, of the rows that are shown after this step.
            pictures = [
                None if clean is None or show is None else show(network.unpacked(clean, row.grid))
                for row, clean in zip(rows, stepped.clean, strict=True)
            ]
            verdict = self._judge(stepped.latents)
        entries = self._hosted(rows, plan)
        given = _InFlightStep(
            verdict,
            plan.work,
            plan.sample,
            began,
            (assembled - began) * 1e3,
            self._waits.total_s * 1e3,
            (self._control_waits.total_s - waits_s) * 1e3,
            waits_s,
        )
        shown = bool([picture for picture in pictures if picture is not None])
        leaves = (
            shown or any(plan.learning) or bool([row for row in rows if row.step + 1 >= len(row.track.times)])
        )
        poisoned, sample = self._judged(rows, given, leaves=leaves)
        good = [row.key not in poisoned for row in rows]
        seen = [picture if fine else None for picture, fine in zip(pictures, good, strict=True)]
        return StepReport(
            began,
            self._clock(),
            step_results.advance_rows(rows, plan, stepped, entries, good),
            tuple([FailedRow(row, RowPoisoned()) for row in poisoned.values()]),
            sample,
            step_results.previews(rows, seen) if shown else (),
            step_results.cached_blocks(rows, stepped, self.sources.blocks),
        )

    def _made(self, rows: tuple[Row, ...]) -> tuple[StepOutput, StepPlan, float]:
        """Return what a step makes of `rows`, its plan, and when its forward was assembled."""
        low_ranks = tuple([acting_set(row, self._low_ranks) if row.adapters.loras else None for row in rows])
        if not [row for row in rows if row.cached]:
            return self._computed(rows, low_ranks)
        division = split_rows(rows, learns=self._learns)
        if not division.others:
            return self._computed(rows, low_ranks)
        computed, others = division.of(rows)
        of_computed, of_others = division.of(low_ranks)
        made = self._computed(computed, of_computed) if computed else None
        assembly = self.placing.beside(others, of_others)
        stepped = extrapolated_step(self.family, assembly, others, division.known)
        if made is None:
            return join_outputs(division, None, stepped), spread_plan(division, None), self._clock()
        skipped = self.family.depth * sum(len(row.prompts) for row in others)
        plan = spread_plan(division, made[1].beside(skipped))
        return join_outputs(division, made[0], stepped), plan, made[2]

    def _computed(
        self, rows: tuple[Row, ...], low_ranks: tuple[SequenceLoras | None, ...]
    ) -> tuple[StepOutput, StepPlan, float]:
        """:meth:`_made` of rows that the network computes."""
        assembly = self.placing.of(rows, low_ranks)
        assembled = self._clock()
        plan = self.sources.step(rows)
        self._waits.total_s = 0.0
        uses = plan.uses
        if any(low_ranks):
            uses = with_low_ranks(uses, rows, low_ranks)
        added = self._controls.residuals(rows, computes_every_token(uses, rows), self._control_waits)
        if any(added):
            uses = with_residuals(uses, rows, added)
        stepped = denoise_step(self.family, assembly, rows, uses, self._trace)
        return stepped, plan, assembled

    def _hosted(self, rows: Sequence[Row], plan: StepPlan) -> list[Entry | None]:
        """What the step has left behind of each row, on its way to host memory; that of a row that ends is there."""
        if not [row for row in rows if row.records]:
            return [None] * len(rows)
        entries = [
            None if recorder is None else self.hosting.take(recorder.kept()) for recorder in plan.recording
        ]
        for row, entry in zip(rows, entries, strict=True):
            if row.records is not None and row.step + 1 >= row.steps:
                self.hosting.finish(row.entries if entry is None else (*row.entries, entry))
        return entries

    def _judged(
        self, rows: Sequence[Row], given: _InFlightStep, *, leaves: bool
    ) -> tuple[dict[RowKey, Row], StepSample | None]:
        """Rows that are not finite, as of their last good step, and the sample of the last step that has ended.

        The step that is `given` is judged in the next one, if the device is late and nothing of it leaves now.
        """
        sample = None if self._given is None else self._ended(self._given)
        self._given = None
        poisoned = self._checks.poisoned(rows)
        if given.verdict.late and not leaves:
            self._given = given
            self._checks.postpone(rows, given.verdict)
            return poisoned, sample
        sample = self._ended(given)
        for row, finite in zip(rows, given.verdict.read(), strict=True):
            if not finite:
                poisoned.setdefault(row.key, row)
        return poisoned, sample

    def _ended(self, given: _InFlightStep) -> StepSample | None:
        """The sample of a step, once the device has computed it: that is waited for. None where it computed nothing."""
        given.verdict.read()
        ended = self._clock()
        # The device begins a step when it has ended the one before.
        waits_s = self._control_waits.total_s
        waited_s = waits_s - (given.waits_s if given.began > self._ended_s else self._ended_waits_s)
        step_ms = (ended - max(given.began, self._ended_s) - waited_s) * 1e3
        self._ended_s, self._ended_waits_s = ended, waits_s
        if given.sample is None:
            return None
        if not given.sample.loaded_bytes:  # else part of it was waiting
            self._model.observe_step(given.work, step_ms)
        measured = {
            "assemble_ms": given.assemble_ms,
            "step_ms": step_ms,
            "waited_ms": given.waited_ms,
            "controls_waited_ms": given.controls_waited_ms,
        }
        return given.sample.model_copy(update=measured)
