"""Idempotency keys: the same tenant and key lead to the same job, and only for the same edit."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import IdempotencyKeyReused, InvalidField
from giornata.wire.jobs import Job
from giornata.wire.requests import EditParameters

HEADER: Final = "Idempotency-Key"
"""Header of HTTP requests (draft-ietf-httpapi-idempotency-key-header-07)."""
REPEATED: Final = "Idempotent-Replayed"
"""Header of an answer about an earlier request's job."""
MAX_CHARACTERS: Final = 255

_PARTS: Final = ("its fields", "its image or template", "its mask", "its references", "its control images")


def read_key(values: Sequence[str], header: str) -> str | None:
    """The key in a request's headers of that name; None without one, InvalidField where it cannot be used."""
    if not values:
        return None
    [key, *others] = values
    printable = key.isascii() and key.isprintable()
    if others or not printable or not key.strip() or len(key) > MAX_CHARACTERS:
        shown = f"{len(values)} headers" if others else f"{len(key)} characters" if printable else repr(key)
        raise InvalidField(
            "The idempotency key cannot be used.",
            field=header,
            received=shown,
            accepted=f"one key of 1 to {MAX_CHARACTERS} printable ASCII characters, best a random UUID",
        )
    return key


def job_id_of(tenant: str, key: str) -> str:
    """The job of a tenant's key, the same at every gateway; other tenants' keys lead elsewhere."""
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).digest()  # a tenant's name holds no zero byte
    return f"job_{base64.urlsafe_b64encode(digest[:24]).decode()}"


def fingerprint(parameters: EditParameters, pictures: Mapping[str, str], template_id: str | None) -> str:
    """Return what a request asks for, as digests: fields, image or template, mask, references and control images.

    `parameters` are as the request gives them, before any default of the model: a field that is left out counts as its
    default. `pictures` are sha-256 by name. How the answer travels is not part of it.
    """
    controls = [pictures[name] for name in CONTROL_IMAGES if name in pictures]
    others = {"image", "mask", *CONTROL_IMAGES}
    references = [digest for name, digest in pictures.items() if name not in others]
    lists = (references, controls) if controls else (references,) if references else ()
    parts = (
        parameters.model_dump(mode="json", exclude_defaults=True),
        [pictures.get("image"), template_id],
        pictures.get("mask"),
        *lists,
    )
    texts = (json.dumps(part, sort_keys=True, separators=(",", ":")) for part in parts)
    return ".".join(hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts)


def check_same(job: Job, asked: str) -> None:
    """Check that the job under a key is the edit that is asked for now; IdempotencyKeyReused says what differs."""
    known = (job.fingerprint or "").split(".")
    given = asked.split(".")
    if known == given:
        return
    differing = [part for part, one, other in zip_longest(_PARTS, known, given) if one != other]
    raise IdempotencyKeyReused(
        received=f"an edit that differs in {' and '.join(differing or _PARTS)} from {job.job_id}",
        accepted="the same edit again, or a new key",
    )
