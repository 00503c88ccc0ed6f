"""What a proxy says of its client's request, and from whom it counts."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from pydantic import ValidationError

from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.proxies import PublicOrigin, public_origin

LOCAL = GatewayConfig().trusted_proxies
PROTO, PREFIX = "X-Forwarded-Proto", "X-Forwarded-Prefix"


def told(*headers: tuple[str, str], peer: str | None = "127.0.0.1", trusted: str = LOCAL) -> PublicOrigin:
    request = make_mocked_request("GET", "/", CIMultiDict(headers))
    return public_origin(request.clone(remote=peer) if peer else request.clone(remote=""), trusted)


@pytest.mark.parametrize(
    ("headers", "scheme"),
    [
        ([], None),
        ([(PROTO, "https")], "https"),
        ([(PROTO, "HTTPS")], "https"),
        ([(PROTO, "http, https")], "https"),
        ([(PROTO, "javascript"), (PROTO, "https")], "https"),
        ([(PROTO, "https, javascript")], None),
        ([("Forwarded", 'for="[2001:db8::1]:5";proto=https;by=203.0.113.1')], "https"),
        ([("Forwarded", 'for=1.2.3.4;proto=http, for=10.0.0.1; Proto="https"')], "https"),
        ([("Forwarded", "for=1.2.3.4;notproto=https")], None),
        ([("Forwarded", "proto=ftp")], None),
        ([("Forwarded", "proto=http"), (PROTO, "https")], "https"),
    ],
)
def test_the_scheme_is_the_nearest_proxys(headers: list[tuple[str, str]], scheme: str | None) -> None:
    assert told(*headers) == PublicOrigin(scheme, "")


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("/giornata", "/giornata"),
        ("/giornata/", "/giornata"),
        ("/a/b-c_d.e~f", "/a/b-c_d.e~f"),
        ("/client's, /proxy", "/proxy"),
        ("/", ""),
        ("", ""),
        ("giornata", ""),
        ("//evil.example", ""),
        ("/a//b", ""),
        ("/../x", ""),
        ("/a/..", ""),
        ("/a/./b", ""),
        ("/a?b", ""),
        ('/a"><script>', ""),
        ("https://evil.example/", ""),
    ],
)
def test_a_prefix_is_a_path_of_plain_segments(text: str, prefix: str) -> None:
    assert told((PREFIX, text)).prefix == prefix


@pytest.mark.parametrize(
    ("peer", "trusted", "counts"),
    [
        ("127.0.0.1", LOCAL, True),
        ("::1", LOCAL, True),
        ("::ffff:127.0.0.1", LOCAL, True),
        ("10.1.2.3", LOCAL, False),
        ("2001:db8::1", LOCAL, False),
        ("", LOCAL, False),
        ("not an address", LOCAL, False),
        ("127.0.0.1", "", False),
        ("10.1.2.3", "10.0.0.0/8, 2001:db8::/32", True),
        ("2001:db8::1", "10.0.0.0/8, 2001:db8::/32", True),
        ("127.0.0.1", "10.0.0.0/8", False),
    ],
)
def test_only_trusted_networks_count(peer: str, trusted: str, counts: bool) -> None:
    found = told((PROTO, "https"), (PREFIX, "/x"), peer=peer, trusted=trusted)
    assert found == (PublicOrigin("https", "/x") if counts else PublicOrigin())


def test_what_is_no_network_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        GatewayConfig.model_validate({"trusted_proxies": "10.0.0.0/8,nginx"})
