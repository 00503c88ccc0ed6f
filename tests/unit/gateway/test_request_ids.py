"""Ids of requests."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from giornata_gateway.http.server import REQUEST_ID, _counted


async def test_a_request_has_its_id_though_its_client_has_left() -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response()

    protocol = Mock()
    request = make_mocked_request("GET", "/v1/models", protocol=protocol)
    protocol.transport = None
    with pytest.raises(ConnectionAbortedError):
        await _counted(request, answer)
    assert request[REQUEST_ID].startswith("req_")
