"""Garbage on every subject that an application may publish to is an error that is counted, and the service lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
import pytest
from structlog.testing import capture_logs

from giornata.bus import bus
from giornata.bus.connection import barrier
from giornata.wire import codec, subjects
from giornata.wire.messages import CancelMessage, EditMessage, GenerateMessage, MaskMessage, MaskParameters
from giornata.wire.requests import EditParameters, GenerationParameters
from giornata.wire.subjects import NatsRole, rights
from tests.integration.gateway_fakes import Stage
from tests.patience import HUNG_S

WHOLE: dict[str, bytes] = {
    subjects.EDIT: codec.encode(EditMessage(parameters=EditParameters(prompt="x"), image=b"picture")),
    subjects.GENERATE: codec.encode(GenerateMessage(parameters=GenerationParameters(prompt="x"))),
    subjects.MASK: codec.encode(MaskMessage(parameters=MaskParameters(prompt="x"), image=b"picture")),
    subjects.EDIT_CANCEL: codec.encode(CancelMessage(job_id="job_x")),
}
"""A good message for every subject."""


ODD: Final[Sequence[object]] = (
    None, True, -1, 2**63, -(2**63), 1e308, float("nan"), "", "\x00" * 9, b"\xff", [], [[]], {}, {"a": {}}
)  # fmt: skip
"""Values that no field has."""


def deep(depth: int) -> bytes:
    """A list in a list in a list …"""
    return b"\x91" * depth + b"\x01"


def garbage(subject: str) -> dict[str, bytes]:
    """Messages that are none, by what is wrong with them."""
    whole = WHOLE[subject]
    fields: dict[str, Any] = msgpack.unpackb(whole)
    pack = msgpack.packb
    wrong = {
        "nothing": b"",
        "one byte": b"\xc1",
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
        "no map": pack([1, 2, 3]),
        "a promise of four billion names": b"\xdf\xff\xff\xff\xff\xa1a\x01",
        "a promise of four billion bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
        "too deep": deep(100_000),
        "deep in a field": pack(fields | {"parameters": None})[:-1] + deep(100_000),
        "as deep as msgpack lets": b"\x82\xa6schema\x01\xaaparameters" + deep(500),
        "names that are no text": pack({1: 2, b"x": 3}, use_bin_type=True),
        "the same name twice": b"\x82\xa6schema\x01\xa6schema\x02",
        "an extension": pack(fields | {"parameters": msgpack.ExtType(5, b"x" * 100)}),
        "a moment": pack(fields | {"remaining_ms": msgpack.Timestamp(2**33, 1)}),
        "no schema": pack({name: value for name, value in fields.items() if name != "schema"}),
        "schema of tomorrow": pack(fields | {"schema": 2**63}),
        "schema of yesterday": pack(fields | {"schema": -1}),
        "schema as text": pack(fields | {"schema": "1"}),
        "huge": pack(fields | {"reference": [b"x" * (7 << 20)], "job_id": "x"}),
        "huge text": pack(fields | {"api_key": "k" * (2 << 20), "job_id": "j" * (2 << 20)}),
        "no UTF-8": whole.replace(b"prompt", b"\xff\xfe\xfd\xfc\xfb\xfa").replace(
            b"job_x", b"\xff\xfe\xfd\xfc\xfb"
        ),
        "surrogates": whole.replace(b"\xa1x", b"\xa3\xed\xa0\x80").replace(b"\xa5job_x", b"\xa3\xed\xa0\x80"),
        "twice": whole + whole,
    }
    wrong |= {f"cut at {size}": whole[:size] for size in range(1, len(whole))}
    for name in fields.keys() - {"schema"}:
        for odd in ODD:
            wrong[f"{name} = {str(odd)[:20]!r} {type(odd).__name__}"] = pack(fields | {name: odd})
    return wrong


def test_every_subject_of_an_application_is_here() -> None:
    assert set(rights(NatsRole.APPLICATION).publish) == WHOLE.keys()


@pytest.mark.parametrize("subject", sorted(WHOLE))
async def test_garbage_is_answered_with_an_error_and_the_door_stays_open(
    stage: Stage, nats_url: str, subject: str
) -> None:
    messages = garbage(subject)
    with capture_logs() as logs:
        heard = await sent(nats_url, subject, messages)
        async with bus.connect(nats_url, "honest") as connected:
            reply = await connected.client.request(subjects.EDIT, WHOLE[subjects.EDIT], timeout=HUNG_S)
    assert "pictures" in codec.unpack(reply.data)
    assert (await stage.edit()).status == 200
    answers = {name: codec.unpack(data) for name, data in heard.items()}
    unexpected = {name: answer for name, answer in answers.items() if answer.get("code") == "internal_error"}
    assert not unexpected
    assert not [entry for entry in logs if entry["event"] == "handler_failed"]
    refused = [name for name, answer in answers.items() if "code" in answer]
    assert len(refused) > len(messages) // 2
    assert all(len(heard[name]) < 4000 for name in refused), "an error repeats little of its message"
    told = (await stage.get("/metrics")).text
    counted = sum(
        float(line.rpartition(" ")[2])
        for line in told.splitlines()
        if line.startswith("giornata_requests_total") and f'route="{subject}"' in line
    )
    # what asks for an answer is counted before its answer; one that asks nowhere may still be carried out
    assert counted >= 2 * len(messages), "what cannot be read, or be answered, is counted too"


async def sent(nats_url: str, subject: str, messages: Mapping[str, bytes]) -> dict[str, bytes]:
    """Send every message thrice: without an address for the answer, with one, and with one that is no inbox's.

    All answers, by the message's name.
    """
    heard: dict[str, bytes] = {}
    names, whole = list(messages), asyncio.Event()

    async def hear(message: Any) -> None:
        heard[names[int(message.subject.rpartition(".")[2])]] = message.data
        if len(heard) == len(messages):
            whole.set()

    async with bus.connect(nats_url, "garbage") as connected:
        await connected.client.subscribe("_INBOX.garbage.*", cb=hear)
        await barrier(connected.client)
        for number, name in enumerate(names):
            for reply in ("", f"_INBOX.garbage.{number}", "giornata.jobs.batch"):
                await connected.client.publish(subject, messages[name], reply=reply)
            await connected.client.flush(HUNG_S)
        await asyncio.wait_for(whole.wait(), HUNG_S)
    return heard
