"""What a listener knows of a host tier: any loss, doubling and order of its messages ends in the truth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.host_tiers import KEPT, HostTiers
from giornata.wire.loras import HostTier, TierChange, TierSnapshot

DIGESTS = tuple(f"{number:064x}" for number in range(6))
CHANGES = st.lists(st.tuples(st.sampled_from(DIGESTS), st.none() | st.integers(1, 9)), max_size=30)


def told(number: int, *changes: TierChange, epoch: int = 1) -> HostTier:
    return HostTier(name="h", epoch=epoch, number=number, changes=changes, budget_bytes=100, used_bytes=0)


def numbered(changes: list[tuple[str, int | None]]) -> list[TierChange]:
    return [
        TierChange(number=number, sha256=digest, size_bytes=size)
        for number, (digest, size) in enumerate(changes, start=1)
    ]


def truth(changes: list[TierChange]) -> dict[str, int]:
    held: dict[str, int] = {}
    for change in changes:
        if change.size_bytes is None:
            held.pop(change.sha256, None)
        else:
            held[change.sha256] = change.size_bytes
    return held


def snapshot(changes: list[TierChange], epoch: int = 1) -> TierSnapshot:
    return TierSnapshot.of("h", epoch, len(changes), truth(changes).items())


@given(CHANGES, st.integers(1, 4))
def test_without_a_loss_changes_alone_tell_the_truth(
    changes: list[tuple[str, int | None]], some: int
) -> None:
    tiers, every = HostTiers(), numbered(changes)
    for first in range(0, len(every), some):
        part = every[first : first + some]
        tiers.observe("i", told(part[-1].number, *part))
        assert tiers.held("h") == truth(every[: first + some])
        assert not tiers.gaps()


@given(CHANGES, st.data())
def test_any_loss_doubling_and_order_ends_in_the_truth_after_a_snapshot(
    changes: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    tiers, every = HostTiers(), numbered(changes)
    messages = [told(change.number, change) for change in every]
    heard = data.draw(st.lists(st.sampled_from(messages), max_size=60)) if messages else []
    early = data.draw(st.integers(0, len(every)))
    for place, message in enumerate(heard):
        tiers.observe("i", message)
        if place == len(heard) // 2:
            tiers.snapshot("i", snapshot(every[:early]))
    tiers.observe("i", told(len(every)))
    if tiers.gaps():
        assert tiers.gaps() == {"h": "i"}
        tiers.snapshot("i", snapshot(every))
    assert tiers.held("h") == truth(every)
    assert not tiers.gaps()


def test_a_restarted_tier_begins_anew_and_its_forerunner_is_passed_over() -> None:
    tiers = HostTiers()
    (first,) = numbered([(DIGESTS[0], 1)])
    (second,) = numbered([(DIGESTS[1], 2)])
    tiers.observe("old", told(1, first, epoch=1))
    tiers.observe("new", told(1, second, epoch=2))
    tiers.observe("old", told(1, first, epoch=1))
    tiers.snapshot("old", snapshot([first], epoch=1))
    assert tiers.held("h") == {DIGESTS[1]: 2}


def test_what_is_forgotten_holds_nothing() -> None:
    tiers = HostTiers()
    tiers.observe("i", told(1, *numbered([(DIGESTS[0], 1)])))
    assert tiers.has("h", DIGESTS[0])
    tiers.forget("i")
    assert not tiers.has("h", DIGESTS[0])
    assert tiers.names() == ()
    assert not tiers.has(None, DIGESTS[0])


def test_changes_that_wait_are_bounded() -> None:
    tiers = HostTiers()
    for number in range(2, KEPT + 100):
        tiers.observe("i", told(number, TierChange(number=number, sha256=DIGESTS[0], size_bytes=1)))
    assert len(tiers._known["h"].early) == KEPT
    assert tiers.gaps() == {"h": "i"}
