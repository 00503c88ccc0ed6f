from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from giornata_gateway.config import GatewayConfig


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"max_held_bytes": 2 << 20, "max_request_bytes": 3 << 20}, "at least max_request_bytes"),
        ({"api_keys": json.dumps({"short": "alice"})}, "8 characters"),
        ({"api_keys": json.dumps({"sk-alice-123": "a/b"})}, "a tenant must match"),
        ({"public_url": "edit.example"}, "public_url"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], mistake: str) -> None:
    with pytest.raises(ValidationError, match=mistake):
        GatewayConfig.model_validate(options)


def test_keys_are_not_shown() -> None:
    config = GatewayConfig.model_validate({"api_keys": json.dumps({"sk-alice-123": "alice"})})
    assert "sk-alice-123" not in repr(config)
    assert config.api_keys.get_secret_value() == {"sk-alice-123": "alice"}


def test_an_address_ends_without_a_slash() -> None:
    assert GatewayConfig.model_validate({"public_url": "https://x/api/"}).public_url == "https://x/api"
