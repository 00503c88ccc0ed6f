"""NATS, the blob store and the gateway, as far as they can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import nats.errors
import nats.js.errors
import redis.asyncio
import redis.exceptions
from nats.js import JetStreamContext

from giornata.blobs import S3Blobs
from giornata.bus import bus
from giornata.bus.connection import RefusedError
from giornata.wire.errors import GiornataError
from giornata_tools.cli.doctor.finding import DoctorFinding, fail, ok, warn
from giornata_tools.doors.addresses import nats_urls, without_password
from giornata_tools.doors.edits import RequestRefused, ServerUnreachable
from giornata_tools.doors.http_door import open_http

ASK_S: Final = 5
PAYLOAD_BYTES: Final = 8 << 20
"""Pictures of the NATS door travel in messages of up to this size."""


async def nats_server(url: str | None) -> DoctorFinding:
    """NATS answers, keeps streams and takes large messages."""
    if url is None:
        return ok("none is named; `giornata up` starts its own")
    place = without_password(url)
    try:
        nats_urls(url)
    except ValueError as error:
        return fail(str(error), "Mend GIORNATA_NATS_URL.")
    try:
        async with bus.connect(url, "doctor", timeout_s=ASK_S) as connected:
            limit = connected.client.max_payload
            kept = await _jetstream(connected.jetstream)
    except (nats.js.errors.Error, nats.errors.Error) as error:
        return fail(
            f"The server at {place} has no JetStream: {type(error).__name__}.",
            "Switch it on: `jetstream {}` in its configuration, see deploy/nats.conf.",
        )
    except GiornataError:
        return fail(
            f"No server lets us in at {place}.",
            "Is GIORNATA_NATS_URL right, with user and password? Without it `giornata up` starts a server of its own.",
        )
    if limit < PAYLOAD_BYTES:
        return fail(
            f"max_payload of the server at {place} is {limit} bytes; pictures take up to {PAYLOAD_BYTES}.",
            "Set `max_payload: 8MB` in its configuration, see deploy/nats.conf.",
        )
    return ok(f"{place}, {kept}, max_payload {limit >> 20} MiB")


async def _jetstream(jetstream: JetStreamContext) -> str:
    try:
        await jetstream.account_info()
    except RefusedError:  # a server of `giornata up` answers so to a client without a password
        return "which lets us in as an application"
    return "JetStream"


async def blob_store(url: str | None) -> DoctorFinding:
    """The store answers; a Redis-protocol server evicts nothing and appends to disk."""
    if url is None:
        return ok("none is named; `giornata up` starts its own")
    place = without_password(url)
    if url.startswith("s3://"):
        return await _object_store(url, place)
    try:
        client = redis.asyncio.from_url(url, socket_timeout=ASK_S, socket_connect_timeout=ASK_S)
    except ValueError:
        return fail(
            f"{place} is no address.", "GIORNATA_BLOBS_URL starts with redis://, rediss://, unix:// or s3://."
        )
    try:
        await client.ping()
        info = {**await client.info("memory"), **await client.info("persistence")}
    except redis.exceptions.RedisError as error:
        if redis.exceptions.AuthenticationError in {type(error), type(error.__cause__)}:  # it comes wrapped
            return fail(
                f"The server at {place} does not let us in.", "Put user and password into GIORNATA_BLOBS_URL."
            )
        return fail(
            f"The server at {place} does not answer: {type(error).__name__}.",
            "Is GIORNATA_BLOBS_URL right? Without it `giornata up` starts a server of its own.",
        )
    finally:
        await client.aclose()
    return judge_blob_store(place, str(info.get("maxmemory_policy")), appends=bool(info.get("aof_enabled")))


async def _object_store(url: str, place: str) -> DoctorFinding:
    try:
        async with S3Blobs.open(url, timeout_s=ASK_S):
            return ok(f"{place} lets us in")
    except ValueError as error:
        return fail(f"{place} is no address.", f"Mend GIORNATA_BLOBS_URL: {error}.")
    except GiornataError as error:
        return fail(
            f"{place}: {error}", "See GIORNATA_BLOBS_URL and the variables AWS_*; docs/stores.md says more."
        )


def judge_blob_store(place: str, policy: str, *, appends: bool) -> DoctorFinding:
    """The verdict on a server that answers."""
    if policy != "noeviction":
        return fail(
            f"The server at {place} evicts ({policy}): inputs of accepted jobs may vanish.",
            "Set `maxmemory-policy noeviction`; when it is full, new edits are then refused.",
        )
    if not appends:
        return warn(
            f"The server at {place} does not append to disk: a restart loses the inputs of accepted jobs.",
            "Set `appendonly yes`.",
        )
    return ok(f"{place}, no eviction, appends to disk")


async def gateway(url: str, *, named: bool) -> DoctorFinding:
    """An edit would be carried out now; without a gateway, a problem only if one was `named`."""
    place = without_password(url)
    try:
        async with open_http(url, None) as door:
            status, told = await door.get("/readyz")
    except ServerUnreachable:
        trouble = fail if named else warn
        return trouble(f"No gateway answers at {place}.", "Run `giornata up`, or name one with --url.")
    except RequestRefused as error:
        return fail(error.body.message, "Name the right one with --url.")
    if status != 200:
        if full := told.get("storage_full"):
            return fail(
                f"The gateway at {place} refuses edits with storage_full: {'; '.join(map(str, full.values()))}",
                "Make room on the disk of that store; see docs/nats-servers.md.",
            )
        missing = ", ".join(str(one) for one in told.get("missing", ())) or "unknown"
        return fail(
            f"The gateway at {place} answers, but not ready: {missing}.",
            "See its logs, and `giornata status`.",
        )
    return judge_gateway(place, told)


def judge_gateway(place: str, told: Mapping[str, Any]) -> DoctorFinding:
    """The verdict on a gateway that is ready, by what it tells."""
    if full := ", ".join(str(one) for one in told.get("nearly_full", ())):
        return warn(
            f"The gateway at {place} is ready, but JetStream's room is nearly used up: {full}.",
            "Edits are refused with store_full when job records have none left. Raise GIORNATA_NATS_STORE_BYTES, or "
            "lower GIORNATA_RESULT_TTL_S; see docs/nats-servers.md.",
        )
    return ok(f"{place} is ready and serves {', '.join(str(one) for one in told.get('models', ()))}")
