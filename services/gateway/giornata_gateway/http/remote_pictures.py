"""Pictures that a JSON body names by URL: data URLs, and addresses of hosts that the operator allows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
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
from giornata_gateway.webhooks.sending import guarded_session

FETCH_S: Final = 15.0
"""Longest time for one picture, from the look-up of its host to its last byte."""
CHUNK_BYTES: Final = 64 << 10
DATA: Final = "a data URL: data:image/png;base64,…"


@dataclass(frozen=True)
class PictureFetcher:
    """Reads the pictures of one request; `grow` counts the bytes of those that are fetched."""

    config: GatewayConfig
    grow: Grow

    async def picture(self, source: PictureSource, field: str) -> bytes:
        """The file of a picture.

        Raises:
            InvalidField: it is named by `file_id` or not at all, by a URL that is not allowed, or it does not come.
            PayloadTooLarge: it is larger than a file of a form may be.
        """
        url = source.image_url or ""
        if source.file_id is not None or not url:
            raise InvalidField(
                "This server keeps no files of OpenAI's Files API."
                if source.file_id
                else "A picture has no URL.",
                field=f"{field}.file_id" if source.file_id else f"{field}.image_url",
                received=source.file_id or "nothing",
                accepted=f"image_url with {DATA}",
            )
        if url.startswith("data:"):
            return await asyncio.to_thread(picture, url, field)
        data = await self._fetched(self._allowed(url, field), field)
        check_filled(data, field)
        return data

    def _allowed(self, url: str, field: str) -> str:
        hosts = self.config.image_hosts_allowed
        if not hosts or urlsplit_host(url) not in hosts:
            raise InvalidField(
                "Pictures are not fetched from this address.",
                field=field,
                received=url,
                accepted=DATA + (f", or an address of {', '.join(sorted(hosts))}" if hosts else ""),
            )
        return check_url(
            url, networks_in(self.config.webhook_networks), field, "A picture cannot be fetched there."
        )

    async def _fetched(self, url: str, field: str) -> bytes:
        """The body of a good answer; each address that the host's name has is looked at as it is connected to."""
        networks, plain = networks_in(self.config.webhook_networks), url.startswith("http:")
        data, limit = bytearray(), self.config.max_file_bytes
        try:
            async with (
                guarded_session(networks, plain=plain, total_s=FETCH_S) as http,
                http.get(url, allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    raise _not_fetched(field, url, f"status {answer.status}")
                async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                    if len(data) + len(chunk) > limit:
                        raise too_large(f"The picture at {url}", limit, field)
                    self.grow(len(chunk))
                    data += chunk
        except TimeoutError as error:
            raise _not_fetched(field, url, f"not whole in {FETCH_S:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _not_fetched(field, url, type(error).__name__) from error
        return bytes(data)


def urlsplit_host(url: str) -> str | None:
    """The host that a URL names, in lower case; None where it names none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _not_fetched(field: str, url: str, why: str) -> InvalidField:
    return InvalidField(
        "A picture could not be fetched.",
        field=field,
        received=f"{url}: {why}",
        accepted="an address that answers 200",
    )
