"""The gateway's settings, and what their texts name: networks, hosts, origins, other names of models."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from giornata.config import ServiceConfig
from giornata.wire.requests import MODEL_NAME

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ALIAS: Final = re.compile(rf"({MODEL_NAME})=({MODEL_NAME})")
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,@?#*]+")
_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")


def _parts(text: str) -> list[str]:
    """What stands between commas."""
    return [part for part in map(str.strip, text.split(",")) if part]


def aliases_in(text: str) -> dict[str, str]:
    """Model names by alias, of ``ALIAS=NAME`` with commas between; ValueError where it is not that."""
    aliases: dict[str, str] = {}
    for part in _parts(text):
        found = _ALIAS.fullmatch(part)
        if found is None or found[1] in aliases:
            raise ValueError(f"an alias is written ALIAS=NAME, each alias once, and not {part!r}")
        aliases[found[1]] = found[2]
    return aliases


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`; a name other than localhost may lead anywhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=8)  # each request asks with the same text
def origins_in(text: str) -> frozenset[str]:
    """The origins that are named in `text`, with commas between them; ValueError tells one that is none."""
    origins = frozenset(_parts(text))
    for origin in sorted(origins):
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"an origin is SCHEME://HOST or SCHEME://HOST:PORT without a path, or *, and not {origin!r}"
            )
    return origins


@lru_cache(maxsize=8)
def networks_in(text: str) -> tuple[Network, ...]:
    """The networks that are named in `text`, with commas between them; ValueError names one that is none."""
    return tuple(map(ipaddress.ip_network, _parts(text)))


@lru_cache(maxsize=8)
def hosts_in(text: str) -> frozenset[str]:
    """The hosts that are named in `text`, with commas between them; ValueError tells one that is none."""
    hosts = frozenset(_parts(text.lower()))
    for host in sorted(hosts):
        if not _HOST.fullmatch(host):
            raise ValueError(f"a host is HOST or HOST:PORT, an IPv6 address in brackets, and not {host!r}")
    return hosts


def checked_by(read: Callable[[str], object]) -> Callable[[str], str]:
    """A validator that lets through the texts that `read` reads."""

    def check(text: str) -> str:
        read(text)
        return text

    return check


class GatewayConfig(ServiceConfig):
    """Configuration of the gateway."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 for every interface, where other machines are to reach it.",
    )
    port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="Port to listen on, where another one is wanted; 0 takes a free one, see the log or "
        "port_file.",
    )
    port_file: Path | None = Field(
        None,
        description="File that receives the port once the gateway listens, for a program that starts it with "
        "port 0.",
    )
    public_url: Annotated[str, AfterValidator(lambda url: url.rstrip("/"))] = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="How clients reach this gateway, for links, where its proxy does not tell it; default: as "
        "they asked.",
    )
    trusted_proxies: Annotated[str, AfterValidator(checked_by(networks_in))] = Field(
        "127.0.0.0/8,::1/128",
        description="Networks of proxies, with commas between them, whose X-Forwarded-Proto, Forwarded and "
        "X-Forwarded-Prefix count in links; where yours is on another machine. Empty: of none.",
    )
    api_keys_file: Path | None = Field(
        None,
        validate_default=True,
        description="File of API keys, made by `giornata keys create`; it is read again when it has changed. Default: "
        "open to everyone on this machine but pages of other web sites; needed where host is another address.",
    )
    tenant_in_progress: ClassVar[int] = 0
    """Pictures that a tenant may have in progress at this gateway where the keys' file does not say; 0: as many as
    all may have together."""
    tenant_per_minute: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Pictures that a tenant may ask this gateway for in a minute where the keys' file does not "
        "say; where tenants have paid for a rate. 0: no limit.",
    )
    model_aliases: Annotated[str, AfterValidator(checked_by(aliases_in))] = Field(
        "",
        description="Other names that requests may call models by, with commas between them, for clients that "
        "know these alone: gpt-image-1=NAME. A served model of that name goes first.",
    )
    a1111: bool = Field(
        default=True,
        description="Whether A1111's API is served, too, below /sdapi/v1 and /controlnet; false where nobody "
        "should use it.",
    )
    notice_s: float = Field(
        5.0,
        ge=0,
        le=120,
        description="How long a stopping gateway still takes requests after /readyz has begun to say 503: "
        "longer than a balancer takes to turn elsewhere. Where there is no other gateway it leaves at once.",
    )
    max_concurrent_rows: int = Field(
        64,
        ge=1,
        le=100_000,
        description="Pictures in progress at a time, more get 429; more with many workers.",
    )
    max_file_bytes: int = Field(
        32 << 20,
        ge=1,
        description="Size of an image or mask, larger where pictures are; a whole request may have twice as "
        "much and 8 MiB.",
    )
    max_held_bytes: int = Field(
        512 << 20,
        ge=1 << 20,
        description="Bytes of pictures in memory, uploads and answers each, by the memory of its machine; more "
        "uploads get 429, answers wait.",
    )
    max_streams: ClassVar[int] = 1024
    """Event streams of jobs and of the fleet open at a time; more get 429."""
    max_parts: ClassVar[int] = 64
    """Parts of a multipart request."""
    max_field_bytes: ClassVar[int] = 128 << 10
    """Size of one form field that is not a file."""
    head_s: ClassVar[float] = 10.0
    """Time allowed for sending a request's head."""
    receive_s: ClassVar[float] = 60.0
    """Time allowed for sending a request's body."""
    receive_bytes_per_s: ClassVar[int] = 16 << 10
    """Slowest pace of a request's body, after the seconds that a head may take."""
    idle_s: ClassVar[float] = 75.0
    """How long a connection stays open between two requests; longer than a proxy keeps its own."""
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Connections open at a time, more get 503; more where a proxy opens one for every client, "
        "and fewer than the process may open files.",
    )
    stall_s: ClassVar[float] = 20.0
    """Time a client may take for a mebibyte of its answer before it is cut off, and its machine for a sign of
    life."""
    budget_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Time allowed for an edit whose client waits; longer with a slow model.",
    )
    job_budget_s: float = Field(
        900.0,
        gt=0,
        le=86400,
        description="Time allowed for an asynchronous job; longer where many wait for their turn.",
    )
    submit_window_s: ClassVar[float] = 8.0
    """How long a submission is tried again while no router answers, as in a take-over."""
    template_ttl_s: ClassVar[int] = 7 * 86400
    """How long a registered template is kept that no edit uses."""
    max_templates: ClassVar[int] = 1000
    """Registered templates of one tenant; one more gets 409 until one is deleted or expires."""
    max_template_bytes: ClassVar[int] = 512 << 20
    """Bytes of all tenants' templates in the blob store; they share it, and more gets 409."""
    max_loras: ClassVar[int] = 1000
    """LoRAs of one tenant, uploads among them; one more gets 409."""
    max_pinned_loras: ClassVar[int] = 8
    """LoRAs of one tenant that every host keeps; one more gets 409."""
    lora_receive_s: ClassVar[float] = 3600.0
    """Longest time allowed for sending a LoRA, at the pace of other bodies."""
    webhook_secret_file: Path | None = Field(
        None,
        description="File with the secret from which each tenant's, which signs its webhooks, is made; further lines "
        "are earlier ones, by which they are signed too. Default: no webhooks.",
    )
    webhook_networks: Annotated[str, AfterValidator(checked_by(networks_in))] = Field(
        "",
        description="Networks beside the public addresses to which webhooks may be sent, with commas between them, "
        "such as 10.1.0.0/16; there plain HTTP will do.",
    )
    image_hosts: Annotated[str, AfterValidator(checked_by(hosts_in))] = Field(
        "",
        description="Hosts, with commas between them, from which pictures that a JSON edit names by URL are fetched, "
        "over HTTPS at public addresses, or in webhook_networks; HOST:PORT for another port than the usual one. "
        "Default: none; data URLs are always taken.",
    )
    cors_origins: Annotated[str, AfterValidator(checked_by(origins_in))] = Field(
        "",
        description="Origins whose pages may call this gateway from a browser, with commas between them, such as "
        "https://app.example; * for any, which needs API keys. Default: its own pages alone.",
    )
    webhook_attempts: ClassVar[int] = 8
    """How often a webhook is sent before it is given up."""
    webhook_retry_s: ClassVar[float] = 5.0
    """Pause after a webhook's first failure; each following one is four times as long."""
    heartbeat_s: ClassVar[float] = 15.0
    """Pause between comments on a quiet event stream."""

    @cached_property
    def max_request_bytes(self) -> int:
        """Size of a whole request: an image and a mask of the largest size, and 8 MiB that come with them."""
        return 2 * self.max_file_bytes + (8 << 20)

    @model_validator(mode="after")
    def _lets_any_page_in_with_a_key_alone(self) -> GatewayConfig:
        if "*" in origins_in(self.cors_origins) and self.api_keys_file is None:
            raise ValueError(
                "cors_origins * lets every page of the web call this gateway: it needs api_keys_file"
            )
        return self

    @model_validator(mode="after")
    def _holds_a_request(self) -> GatewayConfig:
        if self.max_held_bytes < self.max_request_bytes:
            raise ValueError(
                f"max_held_bytes must be at least {self.max_request_bytes}, a request with two files of max_file_bytes"
            )
        return self

    @field_validator("api_keys_file")
    @classmethod
    def _strangers_need_a_key(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        host = info.data.get("host", "127.0.0.1")
        if file is None and not is_loopback(host):
            raise ValueError(
                f"other machines reach the host {host!r}, so that API keys are needed: name the file that "
                "`giornata keys create` has made, or listen on 127.0.0.1"
            )
        return file
