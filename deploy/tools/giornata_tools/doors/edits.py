"""What the command line asks of Giornata and what it is told, alike at both doors. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from giornata.logs import visible
from giornata.wire.errors import ErrorBody, Unauthorized, from_body

KEY_OPTION: Final = "--api-key KEY, or GIORNATA_API_KEY in the environment; `giornata keys create` makes keys"


@dataclass(frozen=True)
class EditCall:
    """An edit, or a generation, to hand in."""

    image: bytes | None
    """None of a generation."""
    mask: bytes | None
    parameters: Mapping[str, object]
    """Fields of :class:`~giornata.wire.requests.EditParameters`, or of a generation's, that were given."""
    references: tuple[bytes, ...] = ()
    """Other pictures that the model looks at."""
    control_images: tuple[bytes, ...] = ()
    """What ControlNets see, as the parameters count them."""


@dataclass(frozen=True)
class EditProgress:
    """A job entered a state, or its picture `index` finished a step."""

    state: str
    attempt: int
    index: int = 0
    step: int = 0
    """Steps computed; 0 for a state."""
    steps: int = 0


@dataclass(frozen=True)
class Preview:
    """The picture `index` so far: small, to be scaled up to `box`."""

    index: int
    number: int
    """0 for the picture's first one."""
    step: int
    box: tuple[int, ...]
    """Left, top, width and height of the part that it covers, in pixels of the output."""
    suffix: str
    """Ending of a file of its format."""
    data: bytes


@dataclass(frozen=True)
class PaintedPicture:
    """One finished picture."""

    index: int
    seed: int
    data: bytes


@dataclass(frozen=True)
class PictureFailure:
    """Why one of several pictures is missing."""

    sentence: str
    code: str | None = None
    index: int | None = None


@dataclass(frozen=True)
class EditOutcome:
    """What became of an order: at least one picture."""

    job_id: str
    size: str
    """WIDTHxHEIGHT of the pictures."""
    pictures: tuple[PaintedPicture, ...]
    failures: tuple[PictureFailure, ...] = ()


Tell = Callable[[EditProgress | Preview], None]
"""Called with what is told while an edit runs."""


class EditClient(Protocol):
    """A way to hand in an edit or a generation."""

    async def edit(self, order: EditCall, tell: Tell) -> EditOutcome:
        """Carry out `order`; when cancelled, cancel the job and raise :class:`EditStopped`.

        Raises:
            Refused: it was not accepted, or failed as a whole.
            Stopped: it was cancelled.
        """
        ...


class RequestRefused(Exception):
    """Giornata answered with an error, or not at all; the body has its code and its sentence."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(sentence(body))
        self.body = body


class ServerUnreachable(RequestRefused):
    """No server listens at the address."""


class EditStopped(Exception):
    """The edit was given up; the text says what became of the job."""


def sentence(body: ErrorBody) -> str:
    """Tell an error to a person: what happened, what was received and is accepted, when to come again, and the code."""
    if body.code == Unauthorized.code:
        body = body.model_copy(update={"accepted": KEY_OPTION})
    again = "" if body.retry_after_s is None else f" Try again in {body.retry_after_s:g} s."
    return visible(f"{from_body(body)}{again} [{body.code}]", "\n")


@dataclass
class StepCount:
    """How far an edit is, over all of its pictures; a new attempt at one begins where its first step says."""

    pictures: int
    state: str = "sending"
    total: int = 0
    """Steps of all pictures; 0 until the first one is known."""
    _last: dict[int, EditProgress] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Steps computed."""
        return sum(told.step for told in self._last.values())

    def hear(self, told: EditProgress) -> None:
        """Take in one message."""
        self.state = told.state
        last = self._last.get(told.index, told)
        if told.steps and told.attempt >= last.attempt:
            self._last[told.index] = told
            self.total = told.steps * self.pictures
