"""Many edits at a time, kept in step with the faults: neither runs ahead of the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from giornata.client import Client
from giornata_lab.rehearsals.chaos.doors import RestClient, carry_over_nats
from giornata_lab.rehearsals.chaos.edits import ChaosEdit, Door, EditVariant, Outcome, Pixels, flaw
from giornata_lab.rehearsals.chaos.look import Records
from giornata_lab.rehearsals.chaos.plan import AT_ONCE

BUDGET_S: Final = 300.0
"""Budget of a job, from its acceptance on: longer than any outage here."""
LIMIT_S: Final = BUDGET_S + 60.0
"""After this its client gives an edit up, which no fault excuses."""


class Pace:
    """How many edits have been begun and ended, and how many may be begun: so that there is load for every fault."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._allowed = 0
        self._news = asyncio.Condition()

    @property
    def in_progress(self) -> int:
        """Edits."""
        return self.begun - self.ended

    async def allow(self, edits: int) -> None:
        """So many may be begun in all."""
        async with self._news:
            self._allowed = max(self._allowed, edits)
            self._news.notify_all()

    async def begin(self) -> None:
        """Wait until one more may be begun."""
        async with self._news:
            await self._news.wait_for(lambda: self.begun < self._allowed)
            self.begun += 1
            self._news.notify_all()

    async def end(self) -> None:
        """One has ended."""
        async with self._news:
            self.ended += 1
            self._news.notify_all()

    async def reached(self, edits: int, in_progress: int) -> None:
        """Wait until so many have been begun, and of all no more than `in_progress` have not ended."""
        async with self._news:
            await self._news.wait_for(lambda: self.begun >= edits and self.in_progress <= in_progress)


class Load:
    """Carries edits through both doors.

    Args:
        variants: what is asked for.
        rest: client of the REST door.
        nats: client of the NATS door.
        records: of all jobs.
    """

    def __init__(
        self, variants: Sequence[EditVariant], rest: RestClient, nats: Client, records: Records
    ) -> None:
        self._variants = variants
        self._rest = rest
        self._nats = nats
        self._records = records
        self._references: dict[int, list[Pixels]] = {}
        """By variant, of those that are to come out alike."""
        self.pace = Pace()
        self.outcomes: list[Outcome] = []

    def refer(self, outcome: Outcome, painted: list[Pixels]) -> None:
        """From now on pictures of a reproducible variant are to be like these."""
        if self._variants[outcome.edit.variant].reproducible:
            self._references[outcome.edit.variant] = painted

    async def carry_out(self, edits: Sequence[ChaosEdit]) -> None:
        """Every edit to its end, :data:`AT_ONCE` at a time, as :attr:`pace` allows."""
        waiting = iter(edits)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._work(waiting))

    async def _work(self, waiting: Iterator[ChaosEdit]) -> None:
        for edit in waiting:
            await self.pace.begin()
            self.outcomes.append(await self.carry(edit))
            await self.pace.end()

    async def carry(self, edit: ChaosEdit) -> Outcome:
        """One edit to its end, or to the end of its client's patience."""
        outcome = Outcome(edit)
        variant = self._variants[edit.variant]
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._carry(variant, outcome)
        except TimeoutError:
            outcome.gave_up = "its end" if outcome.accepted else "its acceptance"
        outcome.latency_s = time.monotonic() - began_s
        references = self._references.get(edit.variant, [])
        for picture, reference in zip_longest(outcome.pictures, references[: len(outcome.pictures)]):
            wrong = await asyncio.to_thread(flaw, variant, picture, reference)
            outcome.flaws += [wrong] if wrong else []
        if outcome.record and outcome.record.pictures != len(outcome.pictures):
            outcome.flaws.append(f"{len(outcome.pictures)} pictures of {outcome.record.pictures} were got")
        return outcome

    async def _carry(self, variant: EditVariant, outcome: Outcome) -> None:
        if outcome.edit.door is Door.NATS:
            await carry_over_nats(self._nats, self._records, variant, outcome, BUDGET_S)
        else:
            await self._rest.carry(variant, outcome)
            outcome.record = await self._records.of(outcome.edit.job_id)
        if not outcome.pictures:  # over NATS, where the answer was lost and the record told the end
            await self._rest.fetch(outcome)
