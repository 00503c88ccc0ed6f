"""API keys as they are stored: their hashes, their tenants and users of NATS, and the limits of tenants. Pure.

A key is random and long, so that its SHA-256 hash gives nothing away and needs no salt: 256 bits cannot be guessed.
``giornata keys`` writes the file, gateways read it; a key or password itself is in no file and in no log.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)

from giornata.wire.subjects import NatsRole, application_user, inbox

DEFAULT_TENANT: Final = "default"
"""Owner of everything where no API keys are asked for."""
PREFIX: Final = "gio_"
"""Every key begins with it, so that secret scanners find a key in the wrong place."""
KEY_BYTES: Final = 32
ID_CHARACTERS: Final = 12
"""Characters of a key's hash that name the key to people."""
MAX_WEIGHT: Final = 1000.0


def _not_a_job(name: str) -> str:
    """A tenant's name. That of a job would hide it where blobs begin with either."""
    if re.fullmatch(r"job_[\w-]{24}", name, re.ASCII):
        raise ValueError("a tenant is not named as jobs are, job_ and 24 characters")
    return name


Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$"), AfterValidator(_not_a_job)]


class KeysFileError(ValueError):
    """A file is not one of API keys, or lacks a key or tenant; the text says what and where."""


class _KeysFileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class TenantLimits(_KeysFileModel):
    """A tenant's limits at one gateway; None: the limit of every tenant, from the gateway's configuration."""

    in_progress: int | None = Field(None, ge=0, le=1_000_000)
    """Pictures in progress at a time; 0: no limit."""
    per_minute: int | None = Field(None, ge=0, le=1_000_000)
    """Pictures asked for in a minute; 0: no limit."""
    weight: float | None = Field(None, gt=0, le=MAX_WEIGHT)
    """Share of the tenant where tenants compete; default 1."""
    operator: bool | None = None
    """An operator sees hosts, instances and the load of others; default no."""


class NatsUser(_KeysFileModel):
    """The user of NATS with which an application logs in."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """The application's."""
    bcrypt: Annotated[str, StringConstraints(pattern=r"^\$2b\$[0-9]{2}\$[./A-Za-z0-9]{53}$")]
    """Hash of its password, as NATS servers compare it."""


class ApiKey(_KeysFileModel):
    """One key, as its hash."""

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    tenant: Tenant
    created: Annotated[datetime, PlainSerializer(lambda moment: moment.isoformat(timespec="seconds"))]
    nats: NatsUser | None = None
    """None for a key of the HTTP door alone, or of servers that ask for no password."""

    @property
    def key_id(self) -> str:
        """Names the key to people; too short to be matched against."""
        return self.sha256[:ID_CHARACTERS]

    @property
    def user(self) -> str:
        """The user of NATS that asks with this key."""
        return NatsRole.APPLICATION if self.nats is None else application_user(self.nats.name)

    @property
    def inbox(self) -> str:
        """Prefix of the subjects to which answers to this key may go."""
        return inbox(self.user)


class KeysFile(_KeysFileModel):
    """All keys and all limits of a deployment."""

    version: Literal[1] = 1
    keys: Annotated[tuple[ApiKey, ...], FailFast()] = ()
    tenants: dict[Tenant, TenantLimits] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _once_each(self) -> KeysFile:
        counts = Counter(key.sha256 for key in self.keys)
        if len(counts) < len(self.keys):
            twice = min(key for key, count in counts.items() if count > 1)
            raise ValueError(f"the key {twice[:ID_CHARACTERS]} is there twice")
        if len(self.passwords) < sum(key.nats is not None for key in self.keys):
            raise ValueError("an application is there twice")
        return self

    @property
    def passwords(self) -> dict[str, str]:
        """Hashes of the passwords of all applications, by their users of NATS."""
        return {key.user: key.nats.bcrypt for key in self.keys if key.nats is not None}


def hash_of(key: str) -> str:
    """The hash that is stored and compared. A header need not be UTF-8."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def parse(text: str | bytes) -> KeysFile:
    """The keys in a file's content; the KeysFileError names the place and the mistake, and quotes nothing."""
    try:
        return KeysFile.model_validate_json(text)
    except ValidationError as error:
        # The cause would quote the file.
        raise KeysFileError(f"not a file of API keys: {_mistakes(error)}") from None


def render(file: KeysFile) -> str:
    """The content of a file with these keys."""
    return file.model_dump_json(indent=2, exclude_none=True) + "\n"


def with_key(
    file: KeysFile, key: str, tenant: str, created: datetime, nats: NatsUser | None = None
) -> KeysFile:
    """`file` and a new key; KeysFileError if this is no name of a tenant, or the application is known already."""
    try:
        added = ApiKey(sha256=hash_of(key), tenant=tenant, created=created, nats=nats)
    except ValidationError as error:
        raise KeysFileError(_mistakes(error)) from None
    if nats is not None and added.user in file.passwords:
        raise KeysFileError(
            f"the application {nats.name} is there already; take another name, or revoke it first"
        )
    return file.model_copy(update={"keys": (*file.keys, added)})


def without_key(file: KeysFile, key_id: str) -> tuple[KeysFile, ApiKey]:
    """`file` without the key of the user `key_id`, or the one whose hash begins so; KeysFileError unless it is one key.

    The tenant keeps its limits.
    """
    by_user = [key for key in file.keys if key.nats is not None and key.user == key_id]
    found = by_user or [key for key in file.keys if key_id and key.sha256.startswith(key_id)]
    if len(found) != 1:
        raise KeysFileError(f"{len(found) or 'no'} keys begin with {key_id!r}; exactly one must")
    return file.model_copy(update={"keys": tuple(key for key in file.keys if key != found[0])}), found[0]


def with_limits(file: KeysFile, tenant: str, changes: TenantLimits) -> KeysFile:
    """`file` with the limits of a tenant that `changes` names; KeysFileError if this is no name of a tenant."""
    known = file.tenants.get(tenant, TenantLimits())
    limits = known.model_copy(update=changes.model_dump(exclude_none=True))
    if limits == TenantLimits():
        return file
    try:
        return KeysFile(keys=file.keys, tenants=file.tenants | {tenant: limits})
    except ValidationError as error:
        raise KeysFileError(_mistakes(error)) from None


_NAMES: Final = {name for part in (KeysFile, ApiKey, NatsUser, TenantLimits) for name in part.model_fields}


def _mistakes(error: ValidationError) -> str:
    return "; ".join(map(_mistake, error.errors(include_input=False)))


def _mistake(detail: Mapping[str, Any]) -> str:
    """One mistake. An unknown name is not shown: an operator who mixed up the columns wrote a key there."""
    known = [str(part) for part in detail["loc"] if isinstance(part, int) or part in _NAMES]
    text = "there is a field of another name" if detail["type"] == "extra_forbidden" else detail["msg"]
    return f"{'.'.join(known)}: {text}" if known else text
