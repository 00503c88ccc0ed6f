"""Which door is meant, and addresses fit to be shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

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
    """Whether `url` is a web address, as a gateway's is and a NATS server's is not."""
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
    return ",".join(_without_password(url) for url in re.split(r",(?=\w+://)", urls))


def _without_password(url: str) -> str:
    """Everything up to the last ``@`` goes: a password may hold any character."""
    shown = re.sub(r"^(\w+://)?.*@", r"\g<1>***@", url, flags=re.DOTALL)
    return shown.partition("?")[0]
