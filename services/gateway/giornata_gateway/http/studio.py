"""The studio page at ``/`` and the API's document at ``/docs``: files of this package, served as they are.

All files are read once, when the gateway starts. Each answer has an ETag of its bytes and is not cached
(``no-cache``), so that a browser never mixes the files of two versions, at the price of a 304.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

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
"""Content types by suffix; a file with another suffix is not served."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing comes from elsewhere, nothing is inline, and no text becomes markup."""
DOCS_POLICY: Final = POLICY.partition("; require-trusted-types-for")[0]
"""Swagger UI writes markup, which it cleans itself."""

SWAGGER: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "LICENSE")
"""The files of Swagger UI (Apache-2.0) in the package swagger-ui-py that ``/docs`` shows."""


class Asset(NamedTuple):
    """One file as it is answered."""

    body: bytes
    content_type: str
    etag: str


ASSETS: Final = web.AppKey("assets", Mapping[str, Asset])


def load_assets() -> Mapping[str, Asset]:
    """Every file of ``static/`` by its path there, and Swagger UI's below ``swagger/``."""
    static = Path(str(files("giornata_gateway"))) / "static"
    swagger = Path(str(files(swagger_ui))) / "static"
    paths = {path.relative_to(static).as_posix(): path for path in static.rglob("*")}
    served = {name: path for name, path in paths.items() if path.suffix in CONTENT_TYPES}
    served |= {f"swagger/{name}": swagger / name for name in SWAGGER}
    return {name: _asset(path) for name, path in served.items()}


async def studio(request: web.Request) -> web.Response:
    """``GET /``: the page on which a person edits."""
    return _answer(request, "index.html", POLICY)


async def docs(request: web.Request) -> web.Response:
    """``GET /docs``: the OpenAPI document as a page."""
    return _answer(request, "docs.html", DOCS_POLICY)


async def asset(request: web.Request) -> web.Response:
    """``GET /studio/{path}``: what the two pages are made of."""
    return _answer(request, request.match_info["path"], POLICY)


PAGES: Final = (web.get("/", studio), web.get("/docs", docs), web.get("/studio/{path:.+}", asset))


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


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    content_type = CONTENT_TYPES.get(path.suffix, "text/plain; charset=utf-8")
    return Asset(body, content_type, hashlib.sha256(body).hexdigest()[:32])
