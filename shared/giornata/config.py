"""Configuration: one frozen object per service, from environment variables and flags, checked as a whole.

``GIORNATA_NATS_URL=... python -m giornata_router --nats-url ...``: a flag wins over the environment, the environment
over the default. One report names every mistake. A service extends :class:`ServiceConfig` by its own fields.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from giornata.wire.subjects import LEAST_STORE_BYTES, STORE_BYTES

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


ENV_PREFIX = "GIORNATA_"


def new_instance(name: str) -> str:
    """An instance name that is unique per process start and legal in a subject."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:32]
    return f"{name}-{host}-{secrets.token_hex(3)}"


class ServiceConfig(BaseSettings):
    """Settings that every service has."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
        env_ignore_empty=True,
    )

    nats_url: str = Field(
        "nats://127.0.0.1:4222",
        description="NATS server(s), comma-separated; where they are on other machines or form a cluster.",
    )
    nats_password_file: Path | None = Field(
        None,
        description="File with the password of this service's NATS user, which has the service's name; where "
        "NATS has users.",
    )
    blobs_url: str = Field(
        "redis://127.0.0.1:6379",
        description="Blob store, where it is elsewhere: redis://, rediss:// or unix:///path of a "
        "Redis-protocol server, or s3://bucket/prefix?endpoint=…&region=… of an object store.",
    )
    instance: str = Field(
        "",
        description="Name of this instance, where logs and status should have one of your own; default: unique "
        "per start.",
        pattern=r"^[A-Za-z0-9_-]{0,96}$",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level logged; `debug` to follow a fault."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="`console` for people; `json` where a machine collects the lines."
    )
    traces_url: str | None = Field(
        None,
        description="Collector that takes spans by OTLP over HTTP, such as http://collector:4318, where edits "
        "are to be traced; default none.",
    )
    traces_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the edits that are traced, less where there are many; a caller's traceparent "
        "decides for its own.",
    )
    telemetry_hz: float = Field(
        4.0,
        ge=1,
        le=20,
        description="How often this instance tells its state; less where a router has hundreds of workers.",
    )
    drain_s: float = Field(
        20.0,
        ge=0,
        le=600,
        description="How long a stopping service finishes what it has begun; as long as its longest edit, "
        "within the time that its supervisor grants.",
    )
    replicas: Annotated[Literal[1, 3, 5], BeforeValidator(int)] = Field(
        1, description="JetStream replicas; 3 in a cluster of three servers."
    )
    nats_store_bytes: int = Field(
        STORE_BYTES,
        ge=LEAST_STORE_BYTES,
        description="Bytes of the NATS servers' file store that the streams reserve together, the same for "
        "every service; by the size of these disks.",
    )
    result_ttl_s: int = Field(
        3600,
        ge=1,
        le=7 * 86400,
        description="How long inputs and results are kept; longer where clients fetch late, shorter where the "
        "blob store is small.",
    )

    @field_validator("nats_url", "blobs_url", "traces_url")
    @classmethod
    def _is_address(cls, value: str | None, info: ValidationInfo) -> str | None:
        """The error names the mistake and not the value: an address may hold a password."""
        if not value:
            return None
        schemes = _SCHEMES[str(info.field_name)]
        for part in value.split(",") if info.field_name == "nats_url" else [value]:
            scheme, separator, rest = part.strip().partition("://")
            if not separator or scheme not in schemes or not rest:
                raise ValueError(f"an address starts with {', '.join(f'{s}://' for s in schemes)}")
            try:
                urlsplit(part.strip()).port  # noqa: B018 - reading it checks it
            except ValueError as error:
                raise ValueError("the port is not a number from 0 to 65535") from error
        if value.startswith("s3://"):
            s3_address(value)
        return value

    @field_validator("nats_password_file")
    @classmethod
    def _is_the_only_password(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        addresses = str(info.data.get("nats_url", ""))
        if value is not None and any(urlsplit(part.strip()).username for part in addresses.split(",")):
            raise ValueError("the NATS address holds a user already; name one of the two")
        return value


_SCHEMES: Final = {
    "nats_url": ("nats", "tls", "ws", "wss"),
    "blobs_url": ("redis", "rediss", "unix", "s3"),
    "traces_url": ("http", "https"),
}

_GONE: Final = {
    **dict.fromkeys(("template_memory_mb", "template_first_mb", "lora_memory_mb"), "cache_memory_mb"),
    **dict.fromkeys(("template_device_mb", "lora_device_mb"), "cache_device_mb"),
    **dict.fromkeys(("template_disk_mb", "lora_disk_mb", "lora_host_mb"), "cache_disk_mb"),
    **dict.fromkeys(("template_folder", "lora_cache_folder"), "cache_folder"),
    "trace_file": "trace_folder",
    **dict.fromkeys(("queue_limit_interactive", "queue_limit_batch"), "queue_limit"),
    "max_request_bytes": "max_file_bytes",
    "control_advertise": "control_address",
    **dict.fromkeys(("adapter_plan", "line", "lora_host_name", "max_wait_s", "placement", "planner")),
    **dict.fromkeys(("batch_caps", "control_renew_steps", "control_stale")),
    "cell": None,  # an instance of another cell must not join the fleet of the cell that is left
}
"""Settings of earlier versions, each with the one that took its place, if any; one that is given is refused."""

C = TypeVar("C", bound=ServiceConfig)


def load(kind: type[C], service: str, argv: Sequence[str] | None = None) -> C:
    """The configuration of `service`, or exit with status 2 and a report of every mistake.

    `service` names the program in ``--help`` and the instance by default. Flags are the process's, unless given.
    """
    flags = sys.argv[1:] if argv is None else argv
    refused = [n for n in sorted(constants(kind) | _GONE.keys()) if os.environ.get(ENV_PREFIX + n.upper())]
    for name in refused:
        successor = _GONE.get(name)
        instead = f"{ENV_PREFIX}{successor.upper()} took its place" if successor else "but fixed"
        sys.stderr.write(f"giornata-{service}: {ENV_PREFIX}{name.upper()}: no setting, {instead}\n")
    if refused:
        raise SystemExit(2)
    try:
        config = kind(_cli_parse_args=list(flags), _cli_prog_name=f"giornata-{service}")
    except ValidationError as error:
        mistakes = "".join(f"  {_mistake(detail)}\n" for detail in error.errors(include_url=False))
        sys.stderr.write(f"giornata-{service}: {error.error_count()} configuration mistake(s)\n{mistakes}")
        raise SystemExit(2) from None
    return config if config.instance else config.model_copy(update={"instance": new_instance(service)})


def constants(kind: type[ServiceConfig]) -> set[str]:
    """Return what is fixed in a configuration, and no operator sets."""
    return {name for name in kind.__class_vars__ if not name.startswith(("_", "model_"))}


def _mistake(detail: Mapping[str, Any]) -> str:
    """One mistake, with the value received unless it may carry a secret."""
    name = str(detail["loc"][0]) if detail["loc"] else "configuration"
    secret = any(word in name for word in ("url", "key", "token", "password", "secret"))
    shown = "" if secret else f" (received {str(detail['input'])[:80]!r})"
    return f"{ENV_PREFIX}{name.upper()} / --{name.replace('_', '-')}: {detail['msg']}{shown}"
