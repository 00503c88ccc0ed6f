"""Templates at the doors: forms, pages, queries."""

from __future__ import annotations

import pytest

from giornata.wire.errors import BadRequest, InvalidField, RowPoisoned, UnknownField
from giornata.wire.templates import TemplateRecord
from giornata_gateway.http.requests import check_query, number_of
from giornata_gateway.http.resources import MAX_WAIT_MS
from giornata_gateway.rules.forms import RequestBody, read_template_form
from giornata_gateway.views.resources import TemplateList, page, template_view
from tests.contract.messages import TEMPLATE


def record(number: int) -> TemplateRecord:
    return TEMPLATE.model_copy(update={"template_id": f"template_{number}"})


def test_a_registration_has_an_image_a_model_and_a_size() -> None:
    form = read_template_form(RequestBody((("model", "tiny"), ("size", "128x96")), b"x", None))
    assert (form.model, form.size) == ("tiny", "128x96")
    assert read_template_form(RequestBody((), b"x", None)).size == "auto"
    with pytest.raises(InvalidField, match="its edits bring masks") as refused:
        read_template_form(RequestBody((), b"x", b"mask"))
    assert refused.value.field == "mask"
    with pytest.raises(InvalidField) as refused:
        read_template_form(RequestBody((), b"x", None, control_images=(b"c",)))
    assert refused.value.field == "control_image_0"
    with pytest.raises(UnknownField, match="prompt"):
        read_template_form(RequestBody((("prompt", "x"),), b"x", None))
    with pytest.raises(InvalidField, match="twice"):
        read_template_form(RequestBody((("size", "auto"), ("size", "auto")), b"x", None))
    with pytest.raises(InvalidField) as refused:
        read_template_form(RequestBody((("size", "large"),), b"x", None))
    assert refused.value.field == "size"
    with pytest.raises(InvalidField) as refused:
        _ = RequestBody((), None, None).picture
    assert refused.value.field == "image"


def test_a_template_is_told_without_its_tenant() -> None:
    view = template_view(TEMPLATE).model_dump(mode="json")
    assert (view["id"], view["state"], view["bytes"], view["error"]["code"]) == (
        "template_1", "recording", 512, "row_poisoned",
    )  # fmt: skip
    assert "tenant" not in view
    assert template_view(TEMPLATE.model_copy(update={"error": None})).error is None
    assert RowPoisoned.code == view["error"]["code"]


def listed(records: list[TemplateRecord], after: str | None) -> TemplateList:
    return page(TemplateList, template_view, records, "template_id", limit=2, after=after)


def test_pages_follow_each_other_to_the_end() -> None:
    records = [record(number) for number in range(5)]
    first = listed(records, None)
    assert ([view.id for view in first.data], first.has_more) == (["template_0", "template_1"], True)
    second = listed(records, "template_1")
    assert ([view.id for view in second.data], second.has_more) == (["template_2", "template_3"], True)
    last = listed(records, "template_3")
    assert ([view.id for view in last.data], last.has_more) == (["template_4"], False)
    with pytest.raises(InvalidField, match="after"):
        listed(records, "template_9")


@pytest.mark.parametrize(
    "text", ["", "-1", "x", "101", "1e3", "\u0663", "9" * 40, "1" * 5000, "0" * 5000 + "1", "0000000001"]
)
def test_a_query_takes_whole_numbers_within_limits(text: str) -> None:
    with pytest.raises(InvalidField, match="1 to 100"):
        number_of({"limit": text}, "limit", 20, 100, least=1)
    if len(text) > 9:
        with pytest.raises(InvalidField, match="0 to 60000"):
            number_of({"wait_ms": text}, "wait_ms", 0, MAX_WAIT_MS)


def test_a_query_is_read_by_name() -> None:
    assert number_of({"limit": "7"}, "limit", 20, 100) == 7
    assert number_of({}, "limit", 20, 100) == 20
    check_query(["limit"], "limit", "after")
    with pytest.raises(BadRequest, match="page"):
        check_query(["page"], "limit")
