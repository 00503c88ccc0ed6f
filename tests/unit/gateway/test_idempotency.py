"""Idempotency keys: which are taken, to which job they lead, and what counts as the same edit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire import subjects
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import IdempotencyKeyReused, InvalidField
from giornata.wire.requests import EditParameters
from giornata_gateway.jobs.preparation import HEADER, check_same, fingerprint, job_id_of, read_key
from tests.contract.messages import JOB

PRINTABLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)


@given(PRINTABLE)
def test_printable_keys_are_taken_as_they_are(key: str) -> None:
    assert read_key([key], HEADER) == key


def test_no_header_is_no_key() -> None:
    assert read_key([], HEADER) is None


@pytest.mark.parametrize(
    ("values", "received"),
    [
        ([""], "0 characters"),
        ([" "], "1 characters"),
        (["x" * 256], "256 characters"),
        (["a\tb"], repr("a\tb")),
        (["a\x00b"], repr("a\x00b")),
        (["ключ"], repr("ключ")),
        (["\udcff"], repr("\udcff")),
        (["a", "a"], "2 headers"),
    ],
)
def test_bad_keys_are_refused_by_name(values: list[str], received: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_key(values, HEADER)
    assert (caught.value.field, caught.value.received) == (HEADER, received)


@given(st.sampled_from(["a", "b", "ab", "default"]), PRINTABLE, st.sampled_from(["a", "b", "ab"]), PRINTABLE)
def test_tenant_and_key_lead_to_a_job_of_their_own(tenant: str, key: str, other: str, another: str) -> None:
    job_id = job_id_of(tenant, key)
    assert subjects.token(job_id) == job_id_of(tenant, key)
    assert (job_id == job_id_of(other, another)) == ((tenant, key) == (other, another))


def asked(**changes: Any) -> str:
    files = {"image", "mask", "reference_0", "reference_1", *CONTROL_IMAGES}
    given: dict[str, Any] = {"image": "aa", "mask": "bb"} | {
        name: changes[name] for name in files & changes.keys()
    }
    own = {"template_id", *files}
    fields: dict[str, Any] = {"prompt": "x", "n": 2} | {
        name: value for name, value in changes.items() if name not in own
    }
    pictures = {name: digest for name, digest in given.items() if digest is not None}
    return fingerprint(EditParameters(**fields), pictures, changes.get("template_id"))


def test_fields_at_their_defaults_are_the_same_as_left_out() -> None:
    assert asked(grow_mask=0, size="auto") == asked()


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"prompt": "y"}, "its fields"),
        ({"n": 3}, "its fields"),
        ({"seed": 1}, "its fields"),
        ({"user": "u"}, "its fields"),
        ({"image": "ab"}, "its image or template"),
        ({"image": None, "template_id": "aa"}, "its image or template"),
        ({"mask": None}, "its mask"),
        ({"reference_0": "cc"}, "its references"),
        ({"control_image_0": "cc"}, "its references and its control images"),
        ({"mask": "aa", "image": "bb"}, "its image or template and its mask"),
    ],
)
def test_another_edit_under_the_same_key_is_refused_and_told_by_what_differs(
    changes: dict[str, Any], differs: str
) -> None:
    job = JOB.model_copy(update={"fingerprint": asked()})
    check_same(job, asked())
    with pytest.raises(IdempotencyKeyReused, match=f"differs in {differs} from job_1"):
        check_same(job, asked(**changes))


def test_a_job_of_no_key_is_another() -> None:
    with pytest.raises(IdempotencyKeyReused):
        check_same(JOB.model_copy(update={"fingerprint": None}), asked())


def test_control_images_differ_by_their_order_and_from_references() -> None:
    one, other = (
        {"control_image_0": "cc", "control_image_1": "dd"},
        {"control_image_0": "dd", "control_image_1": "cc"},
    )
    told = [asked(**one), asked(**other), asked(reference_0="cc", reference_1="dd"), asked()]
    assert len(set(told)) == len(told)
    assert asked(**dict(reversed(one.items()))) == asked(**one)
