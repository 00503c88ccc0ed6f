"""The credentials of an object store that lie in the file which Amazon's own tools read."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from giornata.wire.errors import ServiceUnavailable

_FIELDS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def from_file(environment: Mapping[str, str]) -> dict[str, str]:
    """What ``AWS_SHARED_CREDENTIALS_FILE`` holds for ``AWS_PROFILE``; nothing where no file is named.

    Variables that hold a key themselves win.

    Raises:
        ServiceUnavailable: the file cannot be read, or has no such profile.
    """
    path = environment.get("AWS_SHARED_CREDENTIALS_FILE")
    if not path or environment.get("AWS_ACCESS_KEY_ID"):
        return {}
    profile = environment.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(Path(path).read_text(encoding="utf-8"))
        section = parser[profile]
    except OSError as error:
        message = f"AWS_SHARED_CREDENTIALS_FILE cannot be read: {error.strerror}."
        raise ServiceUnavailable(message, received=path) from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        # without its cause, which may show a line of the file
        message = "AWS_SHARED_CREDENTIALS_FILE is no file of credentials, or lacks the profile."
        raise ServiceUnavailable(message, received=f"{path}, profile {profile}") from None
    return {name: section[field] for field, name in _FIELDS.items() if field in section}
