"""Pictures that a JSON body names by URL: data URLs, and addresses of hosts that the operator allows."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from giornata.wire.errors import InvalidField
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.uploads import too_large
from giornata_gateway.intake.limits import Grow
from giornata_gateway.intake.rules.forms import PictureSource, check_filled
from giornata_gateway.intake.rules.written import picture
from giornata_gateway.webhooks.rules.addresses import check_url, networks_in
from giornata_gateway.webhooks.sending import guarded_session, told

CHUNK_BYTES: Final = 64 << 10


async def read_source(config: GatewayConfig, grow: Grow, source: PictureSource, field: str) -> bytes:
    """The file of a picture; `grow` counts its bytes where they are fetched.

    Raises:
        InvalidField: it has no URL, one that is not allowed, or one from which it does not come whole.
        PayloadTooLarge: it is larger than a file of a form may be.
    """
    url = source.image_url or ""
    if url.startswith("data:") and source.file_id is None:
        return await asyncio.to_thread(picture, url, field)
    hosts = {host.strip().lower() for host in config.image_hosts.split(",")} - {""}
    accepted = ", or a URL at ".join(
        ["image_url with a data URL", *([", ".join(sorted(hosts))] if hosts else [])]
    )
    networks = networks_in(config.webhook_networks)
    if url:
        check_url(url, networks, field, "A picture cannot be fetched from there.")
    if source.file_id is not None or urlsplit(url).hostname not in hosts:
        why = (
            "There are no files of OpenAI's Files API here."
            if source.file_id
            else "No picture is fetched from there."
        )
        raise InvalidField(
            why, field=field, received=source.file_id or url or "no image_url", accepted=accepted
        )
    data = bytearray()
    try:
        async with (
            grow.receiving(),
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


def _not_fetched(why: str, url: str, field: str) -> InvalidField:
    return InvalidField(f"A picture could not be fetched: {why}.", field=field, received=url)
