"""How the record of a registered template changes, and which edits it is for."""

from __future__ import annotations

import pytest

from giornata.wire import templates
from giornata.wire.errors import RowPoisoned, TemplateMismatch
from giornata.wire.requests import EditParameters
from giornata.wire.templates import TemplateRecord, TemplateState, template_id
from tests.contract.messages import CARD, INSPECTION, REF

REGISTERED = TemplateRecord(
    template_id="template_1",
    tenant="alice",
    model="tiny",
    model_digest="dd",
    size="128x96",
    image=REF,
    created_s=1000,
    expires_s=2000,
)
FAILURE = RowPoisoned().body()


def test_the_same_picture_is_the_same_template_for_one_tenant_model_and_size() -> None:
    ids = {
        template_id("alice", CARD, "auto", "ab"),
        template_id("bob", CARD, "auto", "ab"),
        template_id("alice", CARD.model_copy(update={"digest": "other"}), "auto", "ab"),
        template_id("alice", CARD, "128x96", "ab"),
        template_id("alice", CARD, "auto", "cd"),
    }
    assert len(ids) == 5
    assert template_id("alice", CARD, "auto", "ab") in ids


def test_a_template_is_recorded_by_one_worker_and_tells_how_that_ends() -> None:
    asked = templates.recording(REGISTERED, "d1", INSPECTION)
    assert (asked.state, asked.worker, asked.width, asked.height) == (TemplateState.RECORDING, "d1", 64, 48)
    assert not asked.state.settled
    done = templates.ready(asked, "d1", "tt", 512)
    assert (done.state.settled, done.size_bytes, done.error) == (True, 512, None)
    lost = templates.failed(asked, "d1", FAILURE)
    assert lost is not None
    assert (lost.state, lost.error) == (TemplateState.FAILED, FAILURE)
    assert templates.ready(lost, "d2", "tt", 512).error is None


def test_a_failure_undoes_neither_a_recording_nor_another_workers_try() -> None:
    asked = templates.recording(REGISTERED, "d2", INSPECTION)
    assert templates.failed(asked, "d1", FAILURE) is None
    assert templates.failed(templates.ready(asked, "d2", "tt", 512), "d2", FAILURE) is None


def test_registering_again_renews_and_forgets_a_failure() -> None:
    lost = templates.failed(templates.recording(REGISTERED, "d1", INSPECTION), "d1", FAILURE)
    assert lost is not None
    again = templates.registered_again(lost, REF, 9000)
    assert (again.state, again.error, again.expires_s) == (TemplateState.REGISTERED, None, 9000)
    assert again.created_s == REGISTERED.created_s
    done = templates.ready(REGISTERED, "d1", "tt", 512)
    assert templates.registered_again(done, REF, 9000).state is TemplateState.READY


def test_a_use_renews_what_has_lived_a_tenth_of_its_life() -> None:
    assert templates.renewed(REGISTERED, 1000, 1000) is None
    assert templates.renewed(REGISTERED, 1099, 1000) is None
    after = templates.renewed(REGISTERED, 1101, 1000)
    assert after is not None
    assert after.expires_s == 2101


def test_an_edit_has_its_templates_model_and_size() -> None:
    asked = EditParameters(prompt="x")
    assert templates.applied(REGISTERED, asked) == EditParameters(prompt="x", model="tiny", size="128x96")
    same = EditParameters(prompt="x", model="tiny", size="128x96")
    assert templates.applied(REGISTERED, same) == same


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [("model", "other", "tiny"), ("size", "256x192", "128x96"), ("padding_mask_crop", 8, "whole picture")],
)
def test_an_edit_that_asks_for_something_else_is_refused_by_name(
    field: str, value: object, accepted: str
) -> None:
    asked = EditParameters.model_validate({"prompt": "x", field: value})
    with pytest.raises(TemplateMismatch, match=accepted) as refused:
        templates.applied(REGISTERED, asked)
    assert (refused.value.field, refused.value.received) == (field, str(value))
