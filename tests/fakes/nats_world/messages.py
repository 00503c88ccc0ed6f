"""Messages as the server holds and sends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEADER_LINE: Final = b"NATS/1.0"


def status(code: str, text: str = "", **fields: object) -> bytes:
    """The header of a message by which the server says something of its own."""
    lines = [f"NATS/1.0 {code} {text}".rstrip()]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def fields_of(header: bytes) -> dict[str, str]:
    """The fields of a header."""
    lines = header.decode().split("\r\n")[1:] if header else []
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def with_fields(header: bytes, fields: dict[str, object]) -> bytes:
    """A header with more fields."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return (header[:-2] if header else HEADER_LINE + b"\r\n") + lines.encode() + b"\r\n"


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """A message on its way."""

    subject: str
    reply: str
    header: bytes
    data: bytes

    def encoded(self, subscription: str) -> bytes:
        """The bytes that tell it to a subscription."""
        reply = f" {self.reply}" if self.reply else ""
        size = len(self.header) + len(self.data)
        if self.header:
            line = f"HMSG {self.subject} {subscription}{reply} {len(self.header)} {size}\r\n"
        else:
            line = f"MSG {self.subject} {subscription}{reply} {size}\r\n"
        return line.encode() + self.header + self.data + b"\r\n"
