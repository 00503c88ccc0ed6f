"""Which LoRAs a job may use, and what it keeps of them."""

from __future__ import annotations

from typing import Any

import pytest

from giornata.wire.adapters import AskedLora, LoraUse, LoraWait
from giornata.wire.errors import GiornataError, LoraUnreadable
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, StoredFile
from giornata_gateway.intake.rules.lists import with_lists
from giornata_gateway.intake.rules.loras import use_of
from tests.fakes.fleet import CARD

ID = f"lora_{'a' * 32}"
READY = LoraRecord(
    lora_id=ID,
    tenant="alice",
    created_s=0,
    state=LoraState.READY,
    model=CARD.name,
    canonical=CanonicalLora(
        file=StoredFile(sha256="c" * 64, size_bytes=1234),
        model_digest=CARD.digest,
        rank=16,
        modules=40,
        text_modules=3,
        weights=500,
    ),
)


def test_a_job_keeps_what_rows_and_prepost_need() -> None:
    assert use_of(AskedLora(id=ID, scale=0.5), READY, CARD, LoraWait.EXACT) == LoraUse(
        lora_id=ID,
        sha256="c" * 64,
        size_bytes=1234,
        rank=16,
        modules=40,
        text_modules=3,
        weights=500,
        scale=0.5,
    )


@pytest.mark.parametrize(
    ("wait", "allowed", "within"),
    [
        (LoraWait.BOUNDED, 0.25, 0.25),
        (LoraWait.BOUNDED, None, 0.0),
        (LoraWait.EXACT, 0.25, 0.0),
    ],
)
def test_rows_begin_without_it_where_the_request_and_the_record_allow_that(
    wait: LoraWait, allowed: float | None, within: float
) -> None:
    record = READY.model_copy(update={"joins_within": allowed})
    assert use_of(AskedLora(id=ID), record, CARD, wait).joins_within == within


@pytest.mark.parametrize(("scale", "within"), [(0.0, 0.25), (1.0, 0.25), (1.01, 0.0), (-0.5, 0.0)])
def test_a_lora_that_acts_more_strongly_than_its_profile_knows_is_waited_for(
    scale: float, within: float
) -> None:
    record = READY.model_copy(update={"joins_within": 0.25})
    assert use_of(AskedLora(id=ID, scale=scale), record, CARD, LoraWait.BOUNDED).joins_within == within


def test_a_request_may_tell_the_step() -> None:
    record = READY.model_copy(update={"joins_within": 0.25})
    for share in (0.0, 0.5):
        use = use_of(AskedLora(id=ID, scale=2.0), record, CARD, LoraWait.EXACT, share)
        assert use.joins_within == share


@pytest.mark.parametrize(
    ("changed", "code", "told"),
    [
        ({"state": LoraState.VALIDATING, "canonical": None}, "lora_not_ready", "validating"),
        ({"state": LoraState.UPLOADING, "canonical": None, "model": None}, "lora_not_ready", "uploading"),
        (
            {"state": LoraState.FAILED, "canonical": None, "error": LoraUnreadable("It ends early.").body()},
            "lora_not_ready",
            "It ends early. ",
        ),
        ({"model": "other"}, "lora_mismatch", f"for the model other, and the request for {CARD.name}"),
    ],
)
def test_a_lora_that_cannot_act_is_refused(changed: dict[str, Any], code: str, told: str) -> None:
    with pytest.raises(GiornataError) as raised:
        use_of(AskedLora(id=ID), READY.model_copy(update=changed), CARD, LoraWait.EXACT)
    assert (raised.value.code, raised.value.field) == (code, "loras")
    assert told in str(raised.value)


def test_a_lora_of_another_checkpoint_of_the_same_name_is_refused() -> None:
    with pytest.raises(GiornataError, match="another checkpoint") as raised:
        use_of(AskedLora(id=ID), READY, CARD.model_copy(update={"digest": "e" * 64}), LoraWait.EXACT)
    assert raised.value.code == "lora_mismatch"
    assert "e" * 12 in str(raised.value.accepted)


def test_lists_of_a_form_are_json() -> None:
    written = {"prompt": "[1]", "loras": f'[{{"id": "{ID}", "scale": 0.5}}]'}
    assert with_lists(written) == {"prompt": "[1]", "loras": [{"id": ID, "scale": 0.5}]}
    assert with_lists({"loras": [{"id": ID}]}) == {"loras": [{"id": ID}]}
    assert with_lists({"prompt": "x"}) == {"prompt": "x"}


@pytest.mark.parametrize("text", ["", "lora_x", "[", "[NaN]", "[" * 100_000, "{'id': 1}"])
def test_lists_that_are_no_json_are_refused(text: str) -> None:
    with pytest.raises(GiornataError, match="loras is not JSON") as raised:
        with_lists({"loras": text})
    assert raised.value.field == "loras"
    assert len(str(raised.value)) < 500
