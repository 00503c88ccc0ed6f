"""The studio page at ``/`` and the API's document at ``/docs``: files of this package, served as they are.

All files are read once, when the gateway starts. Each answer has an ETag of its bytes and is to be asked for again
(``no-cache``), so that a browser never mixes the files of two versions, and pays only a 304 for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Final

import swagger_ui
from aiohttp import web

CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
"""By suffix; a file with another one is not served."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing comes from elsewhere, nothing is inline, and no text becomes markup."""
DOCS_POLICY: Final = POLICY.partition("; require-trusted-types-for")[0]
"""Swagger UI writes markup, which it cleans itself."""

SWAGGER: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "LICENSE")
"""What ``/docs`` takes from the package swagger-ui-py, which carries Swagger UI (Apache-2.0)."""


@dataclass(frozen=True)
class Asset:
    """One file as it is answered."""

    body: bytes
    content_type: str
    etag: str


ASSETS: Final = web.AppKey("assets", Mapping[str, Asset])


def load_assets() -> Mapping[str, Asset]:
    """Every file of ``static/`` by its path there, and Swagger UI's below ``swagger/``."""
    found = {path: _asset(file) for path, file in _walk(files("giornata_gateway") / "static", "")}
    swagger = files(swagger_ui) / "static"
    found |= {f"swagger/{name}": _asset(swagger / name) for name in SWAGGER}
    return MappingProxyType(found)


async def studio(request: web.Request) -> web.Response:
    """``GET /``: the page on which a person edits."""
    return _answer(request, "index.html", POLICY)


async def docs(request: web.Request) -> web.Response:
    """``GET /docs``: the OpenAPI document as a page."""
    return _answer(request, "docs.html", DOCS_POLICY)


async def asset(request: web.Request) -> web.Response:
    """``GET /studio/{path}``: what the two pages are made of."""
    return _answer(request, request.match_info["path"], POLICY)


def _answer(request: web.Request, path: str, policy: str) -> web.Response:
    found = request.app[ASSETS].get(path)
    if found is None:
        raise web.HTTPNotFound
    headers = {
        "ETag": f'"{found.etag}"',
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if any(tag.value in {found.etag, "*"} for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers=headers | {"Content-Type": found.content_type})


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _walk(item, f"{prefix}{item.name}/")
        elif _suffix(item) in CONTENT_TYPES:
            yield f"{prefix}{item.name}", item


def _asset(file: Traversable) -> Asset:
    body = file.read_bytes()
    content_type = CONTENT_TYPES.get(_suffix(file), "text/plain; charset=utf-8")
    return Asset(body, content_type, hashlib.sha256(body).hexdigest()[:32])


def _suffix(file: Traversable) -> str:
    return file.name[file.name.rfind(".") :] if "." in file.name else ""
