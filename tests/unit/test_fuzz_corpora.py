"""What fuzzers have found stays mended: every kept input is read, or refused with an error that can be told."""

from __future__ import annotations

import pytest

from giornata.wire import codec
from giornata.wire.errors import UnknownField
from tests.fuzz.seeds import CORPORA, seeds
from tests.fuzz.targets import TARGETS

KEPT_BYTES = 1 << 20


@pytest.mark.filterwarnings("ignore")  # libraries warn of what they refuse
@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    inputs = sorted((CORPORA / name).iterdir())
    assert inputs
    for path in inputs:
        try:
            TARGETS[name](path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path} breaks it") from error


def test_corpora_are_small_and_begin_with_good_inputs() -> None:
    assert {path.name for path in CORPORA.iterdir()} == TARGETS.keys() == seeds().keys()
    assert sum(path.stat().st_size for path in CORPORA.rglob("*")) < KEPT_BYTES


def test_what_is_no_unicode_can_be_told() -> None:
    name = b"n\xac".decode(errors="surrogateescape")
    body = UnknownField(f"Unknown field: {name}.", field=name, received=name, accepted=name).body()
    assert body.received == "n\\udcac"
    assert codec.encode(body)
    assert body.model_dump_json()
