"""The command line's orders and their outcomes, alike over HTTP and NATS. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import urlsplit

from giornata.logs import escape_controls
from giornata.wire.errors import ErrorBody, Unauthorized, from_body
from giornata.wire.jobs import Box
from giornata.wire.values import WireModel

# Which door is meant, and addresses fit to be shown. Pure.


LOCAL_GATEWAY: Final = "http://127.0.0.1:8000"
"""Where ``giornata up`` listens."""
LOCAL_NATS: Final = "nats://127.0.0.1:4222"
NATS_VARIABLE: Final = "GIORNATA_NATS_URL"


def gateway_url(url: str) -> str:
    """`url` without a closing slash.

    Raises:
        ValueError: it is no web address.
    """
    if not is_web(url):
        raise ValueError(f"{without_password(url)} is not the address of a gateway, such as {LOCAL_GATEWAY}.")
    return url.rstrip("/")


def nats_urls(urls: str) -> str:
    """`urls`, one or several with commas between them, unchanged.

    Raises:
        ValueError: one of them is no address of a NATS server.
    """
    for url in urls.split(","):
        if not _is_address(url.strip(), {"nats", "tls", "ws", "wss"}):
            raise ValueError(
                f"{without_password(url)} is not the address of a NATS server, such as nats://127.0.0.1:4222."
            )
    return urls


def is_web(url: str) -> bool:
    """Return whether `url` is a web address, as a gateway's is and a NATS server's is not."""
    return _is_address(url, {"http", "https"})


def _is_address(url: str, schemes: Collection[str]) -> bool:
    try:
        place = urlsplit(url)
        place.port  # noqa: B018 - reading it checks it
    except ValueError:
        return False
    return place.scheme in schemes and bool(place.hostname)


def choose_door(url: str | None, nats_url: str | None, typed: Collection[str] = ()) -> str:
    """The address that was asked for: what was `typed` goes before the environment, and the gateway before NATS.

    Raises:
        ValueError: both were typed, or the address is none.
    """
    if {"url", "nats_url"} <= set(typed):
        raise ValueError("--url and --nats name two doors; give one.")
    if nats_url and ("nats_url" in typed or not url):
        return nats_urls(nats_url)
    return gateway_url(url or LOCAL_GATEWAY)


def without_password(urls: str) -> str:
    """One address, or several with commas between them, without user, password, token and query."""
    each = re.split(r",(?=\w+://)", urls)
    # up to the last @: a password may hold any character
    shown = (re.sub(r"^(\w+://)?.*@", r"\g<1>***@", url, flags=re.DOTALL) for url in each)
    return ",".join(url.partition("?")[0] for url in shown)


# What the command line asks of Giornata and what it is told, alike at both doors. Pure.


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


class EditProgress(WireModel):
    """A job entered a state, or its picture `index` finished a step."""

    job_id: str
    state: str
    attempt: int
    index: int = 0
    step: int = 0
    """Steps computed; 0 for a state."""
    steps: int = 0


class Preview(WireModel):
    """The picture `index` so far: small, to be scaled up to `box`."""

    index: int
    partial_image_index: int
    """0 for the picture's first one."""
    step: int
    box: Box
    """The part that it covers, in pixels of the output."""
    format: str
    image: bytes
    """A file of that format."""


class PaintedPicture(WireModel):
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
    """The result of an order: at least one picture."""

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
    return escape_controls(f"{from_body(body)}{again} [{body.code}]", "\n")


@dataclass
class StepCount:
    """The progress of an edit over all of its pictures; a new attempt at one begins where its first step says."""

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
