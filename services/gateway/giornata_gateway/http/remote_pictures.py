"""Pictures that a JSON body names by URL: data URLs, and addresses of hosts that the operator allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from giornata.wire.errors import InvalidField
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.uploads import too_large
from giornata_gateway.intake.limits import ByteReservation
from giornata_gateway.intake.rules.forms import NamedSource, PictureSource, check_filled
from giornata_gateway.intake.rules.written import picture
from giornata_gateway.webhooks.rules.addresses import check_url, hosts_in, names_of, networks_in
from giornata_gateway.webhooks.sending import guarded_session, told

CHUNK_BYTES: Final = 64 << 10
FETCHED_AT_ONCE: Final = 4
"""Pictures of one request."""
FETCH_S: Final = 30.0
"""Until all pictures of a request are there, each within :data:`~giornata_gateway.webhooks.sending.ATTEMPT_S`."""


def check_sources(config: GatewayConfig, sources: Sequence[NamedSource]) -> bool:
    """Whether some picture has to be fetched; InvalidField where one has no URL, or one that is not allowed."""
    hosts, networks = hosts_in(config.image_hosts), networks_in(config.webhook_networks)
    accepted = ", or a URL at ".join(["image_url with a data URL", *filter(None, [", ".join(sorted(hosts))])])
    for field, source in sources:
        url, received = source.image_url or "", source.file_id or source.image_url or "no image_url"
        if source.file_id is not None:
            why = "There are no files of OpenAI's Files API here."
            raise InvalidField(why, field=field, received=received, accepted=accepted)
        if _is_data(source):
            continue
        if hosts.isdisjoint(names_of(url)):
            why = "No picture is fetched from there."
            raise InvalidField(why, field=field, received=received, accepted=accepted)
        check_url(url, networks, field, "A picture cannot be fetched from there.")
    return not all(_is_data(source) for _, source in sources)


async def read_sources(
    config: GatewayConfig, grow: ByteReservation, sources: Sequence[NamedSource]
) -> list[bytes]:
    """The files of pictures that are allowed, in their order; `grow` counts the bytes of those that are fetched.

    Raises:
        InvalidField: a picture does not come whole, or not all come in time.
        PayloadTooLarge: one is larger than a file of a form may be.
    """
    slots = asyncio.Semaphore(FETCHED_AT_ONCE)

    async def read(field: str, source: PictureSource) -> bytes:
        url = source.image_url or ""
        if _is_data(source):
            return await asyncio.to_thread(picture, url, field)
        async with slots:
            return await _fetched(config, grow, url, field)

    try:
        async with grow.receiving(), asyncio.timeout(FETCH_S), asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(read(*source)) for source in sources]
    except TimeoutError as error:
        why, received = f"The pictures could not be fetched in {FETCH_S:g} s.", f"{len(sources)} pictures"
        raise InvalidField(why, field=sources[0][0], received=received) from error
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return [one.result() for one in reading]


async def _fetched(config: GatewayConfig, grow: ByteReservation, url: str, field: str) -> bytes:
    networks, data = networks_in(config.webhook_networks), bytearray()
    try:
        async with (
            guarded_session(networks, plain=urlsplit(url).scheme == "http") as http,
            http.get(url, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise _not_fetched(f"status {answer.status}", url, field)
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                if len(data) + len(chunk) > config.max_file_bytes:
                    raise too_large(f"The picture at {url}", config.max_file_bytes, field)
                grow(len(chunk))
                data += chunk
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _not_fetched(told(error), url, field) from error
    check_filled(data, field)
    return bytes(data)


def _is_data(source: PictureSource) -> bool:
    return (source.image_url or "").startswith("data:")


def _not_fetched(why: str, url: str, field: str) -> InvalidField:
    return InvalidField(f"A picture could not be fetched: {why}.", field=field, received=url)
