"""What the nodes ask of a gateway over HTTP: edits, generations, masks from words and lists.

The gateway and its key are those of the environment (`GIORNATA_URL`, `GIORNATA_API_KEY`), not of the workflow: ComfyUI
writes a workflow into every picture that it saves, and a stranger's must not name where a key is sent.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Final

import requests

DEFAULT_URL: Final = "http://127.0.0.1:8000"
CONNECT_S: Final = 10.0
SILENT_S: Final = 60.0
"""Longest silence of an event stream; a gateway says every few seconds that it is there."""
LIST_S: Final = 2.0
"""How long a list is waited for: ComfyUI's page waits too."""
FRESH_S: Final = 2.0
"""How long a list serves: ComfyUI asks for a node's inputs many times when it shows or checks one."""
LOOK_S: Final = 0.2
"""How often ComfyUI's button to stop is looked at: it sets a flag, and nothing can wait for that."""
PIECE_BYTES: Final = 1 << 20
"""As a gateway writes a large event; a smaller one is read as it comes."""
AT_ONCE: Final = 8
"""Requests of one node at a time."""
TRIES: Final = 20
"""How often a request is sent that meets 429."""
PREVIEWS: Final = 4
STREAM: Final = {"stream": True, "progress": True}
FIELDS: Final = {"steps": "num_inference_steps", "batch_size": "n"}
"""Inputs of nodes → fields of a request, where they differ."""
ADVICE: Final = {
    "mask_empty": "Paint on the mask, or connect another one: 1 is repainted.",
    "unauthorized": "Set GIORNATA_API_KEY for ComfyUI's process to a key of this gateway, and start ComfyUI again.",
}
"""What helps, by code, where the error's own words are those of the API."""
_lists: dict[str, tuple[float, list[dict[str, Any]]]] = {}


class EditError(RuntimeError):
    """The gateway has not done what a node asked for."""


@dataclass(frozen=True)
class GatewayRequest:
    """One edit or generation: the fields of its request, and its PNG files by field."""

    task: str
    """`edits` or `generations`."""
    fields: Mapping[str, Any]
    files: Sequence[tuple[str, bytes]] = ()

    @property
    def body(self) -> dict[str, Any]:
        """Return what carries it: a form for an edit, JSON for a generation."""
        fields = {**self.fields, **STREAM, "partial_images": PREVIEWS, "output_format": "png"}
        if self.task == "edits":
            data = {name: one if isinstance(one, str) else json.dumps(one) for name, one in fields.items()}
            return {"data": data, "files": [(name, (f"{name}.png", png)) for name, png in self.files]}
        for name, png in self.files:
            text = base64.b64encode(png).decode()
            fields[name] = [*fields.get(name, ()), text] if name == "reference" else text
        return {"json": fields}


@dataclass(frozen=True)
class PictureProgress:
    """News of one picture of an order; that of `index` -1 is only of the order's job."""

    order: int
    index: int
    job_id: str
    share: float
    """Share of its steps that are done."""
    preview: bytes | None = None
    """A small JPEG."""


def url() -> str:
    """The gateway's address."""
    return os.environ.get("GIORNATA_URL", DEFAULT_URL).rstrip("/")


def listed(path: str) -> list[dict[str, Any]]:
    """Return what the gateway lists at `path`; what it listed before where it does not answer now."""
    told_at, last = _lists.get(path, (-FRESH_S, []))
    if time.monotonic() - told_at >= FRESH_S:
        with suppress(EditError, ValueError, KeyError), _asked("GET", path, timeout=LIST_S) as answer:
            last = answer.json()["data"]
        _lists[path] = time.monotonic(), last
    return last


def mask(image: bytes, fields: Mapping[str, Any]) -> bytes:
    """The mask of what words name in a picture, as PNG, white where they name something; EditError says why not."""
    with _asked(
        "POST", "masks", data={**fields, "response_format": "image"}, files={"image": image}
    ) as answer:
        _check(answer)
        return answer.content


def pictures(
    orders: Sequence[GatewayRequest], report: Callable[[PictureProgress | None], None]
) -> list[bytes]:
    """The pictures of all orders, in order; a few orders are asked for at a time.

    `report` is called in the caller's thread, with None now and then, and may raise to cancel all orders.

    Raises:
        EditError: the gateway is not reached, or refuses an order; says why. The other orders are cancelled.
    """
    news: SimpleQueue[PictureProgress | Future[list[bytes]]] = SimpleQueue()
    stop, jobs = Event(), dict[int, str]()
    pool = ThreadPoolExecutor(AT_ONCE, "giornata")
    try:
        asked = [pool.submit(_made, order, number, news, stop) for number, order in enumerate(orders)]
        for future in asked:
            future.add_done_callback(news.put)
        unfinished = len(asked)
        while unfinished:
            try:
                item = news.get(timeout=LOOK_S)
            except Empty:
                report(None)
                continue
            if isinstance(item, PictureProgress):
                jobs[item.order] = item.job_id
                report(item)
            else:
                item.result()
                unfinished -= 1
        return [picture for future in asked for picture in future.result()]
    except BaseException:
        stop.set()
        for job_id in jobs.values():
            with suppress(EditError), _asked("DELETE", f"jobs/{job_id}", timeout=LIST_S):
                pass
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _made(order: GatewayRequest, number: int, news: SimpleQueue[Any], stop: Event) -> list[bytes]:
    """The pictures of one order; `stop` ends it at its next event, which cancels it at the gateway."""
    for tries_left in reversed(range(TRIES)):
        with _asked("POST", f"images/{order.task}", stream=True, **order.body) as answer:
            busy = answer.status_code == requests.codes.too_many_requests
            if not (busy and tries_left) or stop.wait(float(answer.headers.get("Retry-After", "1"))):
                return _streamed(answer, number, news, stop)
    raise AssertionError("the last try returns")


def _streamed(answer: requests.Response, number: int, news: SimpleQueue[Any], stop: Event) -> list[bytes]:
    _check(answer)
    made: dict[int, bytes] = {}
    for line in answer.iter_lines(chunk_size=PIECE_BYTES):
        if stop.is_set():
            break
        if not line.startswith(b"data: "):
            continue  # a comment, which says that the gateway is there
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise EditError(_sentence(event["error"]))
        index = -1 if event.get("index") is None else event["index"]
        picture = base64.b64decode(event.get("b64_json") or "")
        if event["type"].endswith(".completed"):
            made[index] = picture
        share = 1.0 if index in made else event["step"] / event["steps"] if event.get("step") else 0.0
        preview = picture if event["type"].endswith(".partial_image") else None
        news.put(PictureProgress(number, index, event["job_id"], share, preview))
    if not made:
        raise EditError("The gateway ended its answer without a picture.")
    return [made[index] for index in sorted(made)]


@contextmanager
def _asked(method: str, path: str, **options: Any) -> Iterator[requests.Response]:
    """An answer, open while inside; EditError where the gateway falls silent."""
    key = os.environ.get("GIORNATA_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = options.pop("timeout", (CONNECT_S, SILENT_S))
    try:
        with requests.request(
            method, f"{url()}/v1/{path}", headers=headers, timeout=timeout, **options
        ) as answer:
            yield answer
    except requests.RequestException as error:
        raise EditError(
            f"The gateway at {url()} does not answer. Is GIORNATA_URL right? ({error})"
        ) from error


def _check(answer: requests.Response) -> None:
    if not answer.ok:
        try:
            raise EditError(_sentence(answer.json()["error"]))
        except (ValueError, KeyError, TypeError):
            raise EditError(
                f"The gateway at {url()} answered with HTTP status {answer.status_code}."
            ) from None


def _sentence(error: Mapping[str, Any]) -> str:
    """An error in words for who built the workflow."""
    message = str(error["message"])
    if error.get("code") in ADVICE:
        return f"{message} {ADVICE[error['code']]}"
    name = next((own for own, named in FIELDS.items() if named == error.get("param")), error.get("param"))
    received = f" The input {name} was: {error['received']}." if name and error.get("received") else ""
    return message + received + (f" Accepted: {error['accepted']}." if error.get("accepted") else "")
