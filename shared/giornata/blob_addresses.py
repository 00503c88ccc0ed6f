"""The addresses of blobs, as they are configured: read here without opening a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

FORM: Final = "s3://bucket/prefix?endpoint=https://host:port&region=name"


@dataclass(frozen=True)
class S3Address:
    """A place in an object store. Credentials are not part of it."""

    bucket: str
    prefix: str = ""
    """Before every key, without slashes at its ends."""
    endpoint: str | None = None
    """``http://`` or ``https://``, host and port; None for what the environment names, or Amazon's own."""
    region: str | None = None


def s3_address(url: str) -> S3Address:
    """The parts of an address; ValueError names the mistake and not the value."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise ValueError(f"an address of an object store is {FORM}")
    if "@" in parts.netloc:
        raise ValueError(
            "credentials belong into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or into a file"
        )
    asked = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    unknown = sorted(asked.keys() - {"endpoint", "region"})
    if unknown:
        raise ValueError(f"after the ? come endpoint and region, not {', '.join(unknown)}")
    endpoint = asked.get("endpoint")
    if endpoint is not None:
        _check_endpoint(endpoint)
    prefix = parts.path.strip("/")
    if any(part in {"", ".", ".."} for part in prefix.split("/") if prefix):
        raise ValueError("the prefix has a part that is empty, . or ..")
    return S3Address(parts.netloc, prefix, endpoint, asked.get("region"))


def _check_endpoint(endpoint: str) -> None:
    found = urlsplit(endpoint)
    if found.scheme not in {"http", "https"} or not found.hostname or found.path.strip("/") or found.query:
        raise ValueError("the endpoint is http:// or https://, a host and a port")
    if "@" in found.netloc:
        raise ValueError("credentials do not belong into the endpoint")
    found.port  # noqa: B018 - reading it checks it
