"""Values that messages are made of: the bitmap of cells."""

from __future__ import annotations

import json

import msgpack
import pytest
from pydantic import ValidationError

from giornata.wire import codec
from giornata.wire.jobs import Inspection
from giornata.wire.values import CellMap
from tests.contract.messages import INSPECTION

CELLS = CellMap(height=3, width=4, bits=b"\x84\x20")


def test_a_bitmap_counts_its_cells() -> None:
    assert CELLS.count == 3
    assert CellMap(height=1, width=8, bits=b"\x00").count == 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bits": b"\x84"}, "3x4 cells take 2 bytes, not 1"),
        ({"bits": b"\x84\x20\x00"}, "3x4 cells take 2 bytes, not 3"),
        ({"bits": b"\x84\x21"}, "a bit after the last cell is set"),
        ({"height": 0, "bits": b""}, "greater than or equal to 1"),
    ],
)
def test_a_bitmap_that_does_not_hold_every_cell_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        CellMap.model_validate({"height": 3, "width": 4, **fields})


def test_a_compute_set_travels_by_grain() -> None:
    inspection = INSPECTION.model_copy(
        update={"compute_set": {1: CELLS, 2: CellMap(height=1, width=1, bits=b"\x80")}}
    )
    data = codec.encode(inspection)
    assert set(codec.unpack(data)["compute_set"]) == {"1", "2"}
    assert codec.decode(Inspection, data) == inspection
    assert Inspection.model_validate(json.loads(inspection.model_dump_json())) == inspection


def test_an_inspection_from_before_compute_sets_is_understood() -> None:
    fields = codec.unpack(codec.encode(INSPECTION))
    fields.pop("compute_set", None)
    assert codec.decode(Inspection, msgpack.packb(fields)).compute_set is None
