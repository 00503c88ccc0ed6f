"""Step-level continuous batching, as a plain object: rows that wait, rows that run, and rows that join next.

Rows join at the next step and leave after their last; nothing here computes or waits. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar


@dataclass(frozen=True)
class RowKey:
    """Names one row of one attempt at a job."""

    job_id: str
    attempt: int
    index: int


class SchedulableRow(Protocol):
    """A row as the batch needs to know it."""

    @property
    def key(self) -> RowKey:
        """Its name."""

    @property
    def tokens(self) -> int:
        """Tokens it adds to a step: text and image, of all its sequences."""

    @property
    def background(self) -> bool:
        """No job waits for it: it joins a step that has room left, and is left out of one that has none."""


@dataclass(frozen=True)
class Capacity:
    """The most that one step may compute."""

    rows: int
    tokens: int
    """Text and image tokens of all sequences of a step."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 1:
            raise ValueError(f"capacity needs at least one row and one token, received {self}")


PATIENCE: Final = 8
"""Steps that may pass over background rows in a row."""


class BatchingMode(StrEnum):
    """The moments at which queued rows may join."""

    STEP = "step"
    """At every step: continuous batching."""
    REQUEST = "request"
    """When all running rows have left: the batching of whole requests that continuous batching is measured against."""


M = TypeVar("M", bound=SchedulableRow)


class RowBatch(Generic[M]):
    """Rows of one worker: first come, first served.

    A row that is larger than the whole capacity is not refused for ever: it runs alone. A row that waits for an input
    keeps its place in the order and lets others pass; so does a running row that is paused. Background rows yield: one
    of them shares a step while no row could join and it fits, or there is no other; where there is no such step for
    long, every so often one beside the others, which a saturated worker needs most: what it records makes all lighter.

    `fits` tells whether rows, in order of joining, may share a step as far as `capacity` does not say; asked of more
    rows it never becomes true again.
    """

    def __init__(
        self,
        capacity: Capacity,
        fits: Callable[[Sequence[M]], bool] = lambda _: True,
        joining: BatchingMode = BatchingMode.STEP,
    ) -> None:
        self.capacity = capacity
        self._fits, self._joining_when = fits, joining
        self._waiting: dict[RowKey, M] = {}
        self._running: dict[RowKey, M] = {}
        self._background: dict[RowKey, M] = {}
        self._unready: set[RowKey] = set()
        self._places: dict[RowKey, int] = {}
        """Counts the rows of edits that have joined, by the order in which they first did."""
        self._joined = 0
        self._passed_over = 0

    @property
    def waiting(self) -> tuple[M, ...]:
        """Rows that have not joined yet, ready or not, in order of arrival."""
        return tuple(self._waiting.values())

    @property
    def running(self) -> tuple[M, ...]:
        """Rows that have joined, in that order; background rows are not among them."""
        return tuple(self._running.values())

    @property
    def background(self) -> tuple[M, ...]:
        """Background rows, begun or not, in order of arrival."""
        return tuple(self._background.values())

    @property
    def keys(self) -> tuple[RowKey, ...]:
        """The keys of all rows."""
        return (*self._running, *self._waiting, *self._background)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._background)

    def __contains__(self, key: object) -> bool:
        return key in self._running or key in self._waiting or key in self._background

    def submit(self, members: Iterable[M], *, ready: bool = True) -> None:
        """Let rows wait for the next step; or, where they are not `ready`, for :meth:`make_ready`.

        Raises:
            ValueError: a row with this key is here already.
        """
        for member in members:
            if member.key in self:
                raise ValueError(f"row {member.key} is in the batch already")
            (self._background if member.background else self._waiting)[member.key] = member
            if not ready:
                self._unready.add(member.key)

    def make_ready(self, key: RowKey) -> None:
        """The inputs of a row are here; it joins before the rows that came after it. It may have left already."""
        self._unready.discard(key)

    @property
    def able(self) -> bool:
        """Return whether a step has rows: some row is not waiting for an input."""
        return any(key not in self._unready for key in self.keys)

    def pause(self, keys: Iterable[RowKey]) -> int:
        """Let rows wait for :meth:`make_ready` and leave steps to others; returns how many did not wait for it before.

        A running row goes on from its step, before all rows that have not joined yet.
        """
        paused = {key for key in keys if key in self} - self._unready
        self._unready |= paused
        self._set_aside({key: row for key, row in self._running.items() if key in paused})
        return len(paused)

    def change(self, *members: M) -> None:
        """Take each of `members` for the row of its key; a row that has left stays away."""
        for rows in self._all():
            rows |= {member.key: member for member in members if rows and member.key in rows}

    def admit(self) -> tuple[M, ...]:
        """Let waiting rows join, in order and while they fit, and return the rows of the next step."""
        if self._waiting and (self._joining_when is BatchingMode.STEP or not self._running):
            for member in list(self._joining(self._ready(self._waiting))):
                del self._waiting[member.key]
                self._running[member.key] = member
                self._joined += 1
                self._places.setdefault(member.key, self._joined)
            self._running = self._in_order(self._running)
        background = self._ready(self._background) if self._background else []
        alone = bool(background) and not self._ready(self._waiting)
        beside = tuple(islice(self._joining(background), 1)) if alone else ()
        self._passed_over = 0 if beside or not background else self._passed_over + 1
        if self._passed_over > PATIENCE:
            self._passed_over = 0
            every = (*self.running, background[0])
            beside = every[-1:] if self._fits(every) else ()
        return (*self.running, *beside)

    def set_aside(self) -> tuple[M, ...]:
        """Let running rows that no longer fit wait again, before all others; return them.

        The first ones go on, at least one of them. A row that is set aside goes on from its step.
        """
        running = list(self._running.values())
        stay = 1
        while stay < len(running) and self._fits(running[: stay + 1]):
            stay += 1
        self._set_aside({member.key: member for member in running[stay:]})
        return tuple(running[stay:])

    def settle(self, advanced: Iterable[M], left: Iterable[RowKey]) -> None:
        """Take in a step's results: the rows as they are now, and the keys of the rows that have left.

        Rows that were cancelled while the step ran are no longer here and stay away.
        """
        self.change(*advanced)
        for key in left:
            self._forget(key)

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[M, ...]:
        """Drop a job's rows, waiting and running, of one attempt or all; return them as of the last step."""
        gone = [
            member
            for rows in self._all()
            for member in rows.values()
            if member.key.job_id == job_id and attempt in (None, member.key.attempt)
        ]
        for member in gone:
            self._forget(member.key)
        return tuple(gone)

    def take_all(self) -> tuple[M, ...]:
        """Drop every row; return all but the background rows, running ones first, as of the last step."""
        gone = (*self._running.values(), *self._waiting.values())
        self._unready.clear()
        self._places.clear()
        for rows in self._all():
            rows.clear()
        return gone

    def _forget(self, key: RowKey) -> None:
        self._unready.discard(key)
        self._places.pop(key, None)
        for rows in self._all():
            rows.pop(key, None)

    def _set_aside(self, rows: dict[RowKey, M]) -> None:
        """Let running rows wait, in their order among those that have run before."""
        for key in rows:
            del self._running[key]
        begun = {key: row for key, row in self._waiting.items() if key in self._places}
        self._waiting = self._in_order(begun | rows) | self._waiting

    def _in_order(self, rows: Mapping[RowKey, M]) -> dict[RowKey, M]:
        """`rows`, which have joined, in the order in which they first did."""
        return dict(sorted(rows.items(), key=lambda item: self._places[item[0]]))

    def _all(self) -> tuple[dict[RowKey, M], ...]:
        return self._running, self._waiting, self._background

    def _ready(self, rows: Mapping[RowKey, M]) -> list[M]:
        return [member for key, member in rows.items() if key not in self._unready]

    def _joining(self, queue: Iterable[M]) -> Iterable[M]:
        """The rows at the head of `queue` that fit beside the running ones. None overtakes another."""
        sharing = list(self._running.values())
        tokens = sum(member.tokens for member in sharing)
        for member in islice(queue, max(0, self.capacity.rows - len(sharing))):
            tokens += member.tokens
            sharing.append(member)
            if len(sharing) > 1 and (tokens > self.capacity.tokens or not self._fits(sharing)):
                return
            yield member
