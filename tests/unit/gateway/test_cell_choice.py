"""Which cells a tenant's edits go to."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from giornata_gateway.cells.choice import CHOICES, SHORTER_MS, by_key, by_wait, of_tenant

NAMES = st.text("abcxyz-019", min_size=1, max_size=8)
CELLS = st.lists(NAMES, unique=True, max_size=8)


@given(NAMES, CELLS, st.randoms())
def test_a_tenant_has_the_same_two_cells_at_every_gateway(
    tenant: str, cells: list[str], chance: object
) -> None:
    heard = list(cells)
    chance.shuffle(heard)  # type: ignore[attr-defined]
    own = of_tenant(tenant, cells)
    assert own == of_tenant(tenant, heard)
    assert len(set(own)) == len(own) == min(CHOICES, len(cells))


@given(NAMES, CELLS, NAMES)
def test_a_cell_that_goes_moves_only_its_tenants(tenant: str, cells: list[str], gone: str) -> None:
    own, left = of_tenant(tenant, cells), [cell for cell in cells if cell != gone]
    kept = [cell for cell in own if cell != gone]
    assert of_tenant(tenant, left)[: len(kept)] == kept


def test_tenants_spread_over_the_cells() -> None:
    cells = [f"cell-{number}" for number in range(4)]
    first = Counter(of_tenant(f"tenant-{number}", cells)[0] for number in range(2000))
    assert min(first.values()) > 400


@given(NAMES, st.dictionaries(NAMES, st.none() | st.floats(0, 1e6), max_size=6))
def test_the_first_cell_is_left_only_for_a_clearly_shorter_wait(
    tenant: str, waits: dict[str, float | None]
) -> None:
    own, best = of_tenant(tenant, waits), by_wait(tenant, waits)
    assert sorted(own) == sorted(best)
    if len(own) == CHOICES:
        first, other = (waits[cell] or 0.0 for cell in own)
        assert (best == own) is (first - other <= SHORTER_MS or other + SHORTER_MS >= first)


@given(NAMES, NAMES, CELLS)
def test_a_key_leads_to_one_of_the_tenants_cells(tenant: str, job_id: str, cells: list[str]) -> None:
    found = by_key(tenant, job_id, cells)
    assert len(found) == min(1, len(cells))
    assert set(found) <= set(of_tenant(tenant, cells))
    assert found == by_key(tenant, job_id, cells[::-1])
