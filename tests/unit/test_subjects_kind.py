"""The name of a subject's kind, in spans: it holds no id."""

from __future__ import annotations

import pytest

from giornata.wire import subjects


@pytest.mark.parametrize(
    ("subject", "kind"),
    [
        (subjects.EDIT, "edit"),
        (subjects.EDIT_CANCEL, "edit cancel"),
        ("giornata.worker.w1.run", "worker run"),
        ("giornata.prepost.encode.flux", "prepost encode"),
    ],
)
def test_the_kind_of_a_subject_of_any_length(subject: str, kind: str) -> None:
    assert subjects.kind_of(subject) == kind
