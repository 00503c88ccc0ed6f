"""The error tree: stable codes, one class per code, nothing lost on the way."""

from __future__ import annotations

import pickle

import pytest

from giornata.wire import codec
from giornata.wire.errors import (
    BY_CODE,
    ErrorBody,
    Failed,
    GiornataError,
    InvalidField,
    MaskSizeMismatch,
    from_body,
)

CODES = {
    "attempts_exhausted",
    "bad_request",
    "batch_queue_full",
    "blob_store_full",
    "concurrency_limit_exceeded",
    "cross_site",
    "deadline_exceeded",
    "error",
    "failed",
    "idempotency_key_reused",
    "image_timeout",
    "image_unreadable",
    "input_lost",
    "interactive_queue_full",
    "intermediate_lost",
    "internal_error",
    "invalid_field",
    "job_cancelled",
    "malformed_message",
    "job_not_finished",
    "job_not_found",
    "mask_empty",
    "mask_rejected",
    "mask_size_mismatch",
    "model_not_found",
    "not_permitted",
    "not_supported",
    "overloaded",
    "payload_too_large",
    "queue_full",
    "rate_limit_exceeded",
    "result_expired",
    "row_poisoned",
    "schema_mismatch",
    "service_unavailable",
    "size_mismatch",
    "store_full",
    "template_limit",
    "template_mismatch",
    "template_not_found",
    "tenant_queue_full",
    "too_many_pixels",
    "too_many_requests",
    "unauthorized",
    "unknown_field",
    "unsupported_image_format",
}


def test_codes_are_stable() -> None:
    assert set(BY_CODE) >= CODES, "a code that clients know was renamed or removed"


def test_every_error_has_a_code_and_a_sentence_of_its_own() -> None:
    def tree(kind: type[GiornataError]) -> list[type[GiornataError]]:
        return [kind] + [leaf for child in kind.__subclasses__() for leaf in tree(child)]

    kinds = tree(GiornataError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert kind().message.endswith("."), kind
        assert 400 <= kind.status <= 599


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.code)
def test_an_error_survives_the_wire_and_the_image_processes(kind: type[GiornataError]) -> None:
    error = kind("what happened", field="mask", received=3, accepted="4", retry_after_s=1.5)
    for back in (from_body(error.body()), pickle.loads(pickle.dumps(error))):  # noqa: S301 - what multiprocessing does
        assert type(back) is kind
        assert back.body() == error.body()


def test_a_code_of_a_newer_version_is_still_an_error() -> None:
    error = from_body(ErrorBody(code="moon_phase", message="The moon is wrong."))
    assert type(error) is Failed
    assert str(error) == "The moon is wrong."


def test_the_text_says_what_was_received_and_what_is_accepted() -> None:
    error = MaskSizeMismatch(received="10x20", accepted="20x10")
    assert str(error) == "The mask's aspect ratio differs from the image's. Received: 10x20. Accepted: 20x10."


def test_no_error_outgrows_a_message_whatever_it_is_about() -> None:
    huge = "x" * 1_000_000
    error = InvalidField(huge, field=huge, received=huge, accepted=huge)
    assert len(codec.encode(error.body())) < 10_000
    assert len(error.received or "") == 200
