"""Decisions with all that they came from, as lines of JSON, so that a simulator can repeat a live pool's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pydantic import ConfigDict, TypeAdapter

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow, SharedStepTime
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule


@dataclass(frozen=True, slots=True)
class RecordedStepTime:
    """A step time that the rule was told about rows that might share a step."""

    rows: tuple[int, ...]
    """Their keys."""
    degree: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision. Keys of rows are their places in `rows`, and no row has a size: `answers` are what sizes told."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    devices: int
    """That the pool has when none is lost."""
    switches: ReplanningOptions
    now_s: float
    rows: tuple[PoolRow, ...]
    free: frozenset[int]
    answers: tuple[RecordedStepTime, ...]
    decision: PoolDecision

    def replayed(self) -> PoolDecision:
        """Return what the rule decides now, which is `decision` unless the rule has changed.

        It may then ask about rows that have no answer here; those share no step.
        """
        answers = {(answer.rows, answer.degree): answer.seconds for answer in self.answers}

        def together(rows: Sequence[PoolRow], degree: int) -> float | None:
            return answers.get((tuple(_number(row.key) for row in rows), degree))

        return ReplanningRule(self.devices, self.switches, together=together).decide(
            self.now_s, self.rows, self.free
        )


_RECORDING: Final = TypeAdapter(DecisionRecord)


def as_json(recording: DecisionRecord) -> bytes:
    """One line."""
    return _RECORDING.dump_json(recording)


def from_json(line: bytes) -> DecisionRecord:
    """The recording of a line.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return _RECORDING.validate_json(line)


def _number(key: Hashable) -> int:
    """The place of a recorded row.

    Raises:
        TypeError: it is not a recorded row's key.
    """
    if not isinstance(key, int):
        raise TypeError(f"rows of a recording have their places as keys; received {key!r}")
    return key


class RecordedRule:
    """:class:`ReplanningRule`, a :class:`~giornata.scheduling.degrees.pool.PoolRule`, that records its decisions.

    Args:
        record: is called with each decision that is made.
        devices: see :class:`ReplanningRule`, as of the other arguments.
        switches: see there.
        together: see there.
    """

    def __init__(
        self,
        record: Callable[[DecisionRecord], None],
        devices: int,
        switches: ReplanningOptions | None = None,
        *,
        together: SharedStepTime | None = None,
    ) -> None:
        self._record, self._devices, self._switches = record, devices, switches or ReplanningOptions()
        self._together = together
        self._rule = ReplanningRule(
            devices, self._switches, together=None if together is None else self._answer
        )
        self._asked: Sequence[PoolRow] = ()
        self._answers: list[RecordedStepTime] = []

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`~giornata.scheduling.degrees.pool.PoolRule`."""
        self._asked, self._answers = rows, []
        numbered = tuple(replace(row, key=number, size=None) for number, row in enumerate(rows))
        decision = self._rule.decide(now_s, numbered, free)
        self._record(
            DecisionRecord(
                devices=self._devices,
                switches=self._switches,
                now_s=now_s,
                rows=numbered,
                free=frozenset(free),
                answers=tuple(self._answers),
                decision=decision,
            )
        )
        begins = (
            replace(begin, rows=tuple(rows[_number(key)].key for key in begin.rows))
            for begin in decision.begins
        )
        return replace(decision, begins=tuple(begins))

    def _answer(self, rows: Sequence[PoolRow], degree: int) -> float | None:
        numbers = tuple(_number(row.key) for row in rows)
        seconds = (
            self._together([self._asked[number] for number in numbers], degree) if self._together else None
        )
        self._answers.append(RecordedStepTime(numbers, degree, seconds))
        return seconds
