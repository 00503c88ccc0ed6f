from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from giornata.config import load
from giornata_gateway.config import GatewayConfig

ANYWHERE = "0.0.0.0"  # noqa: S104 - what is refused


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"max_held_bytes": 2 << 20, "max_request_bytes": 3 << 20}, "max_held_bytes must be at least"),
        ({"host": ANYWHERE}, "other machines reach the host '0.0.0.0', so that API keys are needed"),
        ({"host": "::"}, "API keys are needed"),
        ({"host": ""}, "API keys are needed"),
        ({"host": "gateway.example"}, "API keys are needed"),
        ({"public_url": "edit.example"}, "public_url"),
        ({"cors_origins": "*"}, "needs api_keys_file"),
        ({"cors_origins": "https://a.example/page"}, "not 'https://a.example/page'"),
        ({"cors_origins": "a.example"}, "an origin is SCHEME://HOST"),
        ({"image_hosts": "a.example/b"}, "image_hosts"),
        ({"image_hosts": "https://a.example"}, "image_hosts"),
        ({"image_hosts": "::1"}, "image_hosts"),
        ({"model_aliases": "gpt-image-1"}, "ALIAS=NAME, each alias once, and not 'gpt-image-1'"),
        ({"model_aliases": "a=b,a=c"}, "not 'a=c'"),
        ({"model_aliases": "a=b c"}, "not 'a=b c'"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], mistake: str) -> None:
    with pytest.raises(ValidationError, match=mistake):
        GatewayConfig.model_validate(options)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_alone_needs_no_keys(host: str) -> None:
    assert GatewayConfig.model_validate({"host": host}).api_keys_file is None


def test_a_host_that_others_reach_takes_keys() -> None:
    config = GatewayConfig.model_validate({"host": ANYWHERE, "api_keys_file": "/keys/keys.json"})
    assert config.api_keys_file == Path("/keys/keys.json")


def test_a_start_without_keys_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(GatewayConfig, "gateway", ["--host", ANYWHERE])
    told = capsys.readouterr().err
    assert "GIORNATA_API_KEYS_FILE / --api-keys-file" in told
    assert "giornata keys create" in told


def test_an_address_ends_without_a_slash() -> None:
    assert GatewayConfig.model_validate({"public_url": "https://x/api/"}).public_url == "https://x/api"
