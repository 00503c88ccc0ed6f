"""The file of the secrets from which tenants' are made."""

from __future__ import annotations

from pathlib import Path

from giornata.wire.errors import ServiceUnavailable
from giornata_gateway.webhooks.rules.signing import LEAST_BYTES


def read_secrets(path: Path | None) -> tuple[bytes, ...]:
    """The secrets in a file, one a line, the present one first; none without a file.

    ServiceUnavailable, which quotes nothing, where it cannot be read, or one is too short.
    """
    if path is None:
        return ()
    try:
        secrets = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise ServiceUnavailable(
            f"The secret of webhooks cannot be read from {path}: {error.strerror}."
        ) from None
    if not secrets or min(map(len, secrets)) < LEAST_BYTES:
        raise ServiceUnavailable(
            f"The secret of webhooks in {path} is missing or too short.",
            accepted=f"a line of {LEAST_BYTES} characters or more, such as `openssl rand -base64 32` prints",
        )
    return secrets
