"""What telemetry tells of workers: in the fleet's summary, and for the plan of placement."""

from __future__ import annotations

import pytest

from giornata.residency.use_based import HostTiers
from giornata.wire.loras import CanonicalLora, HostTier, LoraRecord, LoraState, StoredFile, TierChange
from giornata.wire.workers import (
    ServiceName,
    ServiceState,
)
from giornata_router.fleet_reports import SAMPLES_S, WINDOW_S, StepRates, coarse, report, summary
from giornata_router.lora_placement import REGISTERED_S, LoraCatalogue, observed
from tests.fakes.fleet import STEP
from tests.present import present
from tests.unit.scheduling.test_placement import row, telling, worker


def counted(steps_total: int, *steps_ms: float) -> ServiceState:
    samples = tuple(STEP.model_copy(update={"step_ms": ms}) for ms in steps_ms)
    return telling(worker("d1"), steps_total=steps_total, samples=samples)


def test_steps_per_second_are_those_of_the_last_seconds() -> None:
    rates = StepRates()
    assert rates.steps_per_s("d1") is None, "it was never heard"
    rates.observe(counted(100), 10.0)
    assert rates.steps_per_s("d1") is None, "it was heard once"
    rates.observe(counted(101), 10.25)
    assert rates.steps_per_s("d1") is None, "too short a time says nothing"
    rates.observe(counted(110), 12.0)
    assert rates.steps_per_s("d1") == 5.0
    rates.observe(counted(160), 10.25 + WINDOW_S)
    assert rates.steps_per_s("d1") == pytest.approx(59 / WINDOW_S)
    rates.keep(["d2"])
    assert rates.steps_per_s("d1") is None


def test_a_step_takes_the_median_of_the_last_minute_in_which_it_had_rows() -> None:
    rates = StepRates()
    assert rates.step_ms("d1", 0.0) is None
    rates.observe(counted(3, 100.0, 300.0, 200.0), 0.0)
    rates.observe(counted(4, 700.0), 10.0)
    assert rates.step_ms("d1", SAMPLES_S) == 250.0
    assert rates.step_ms("d1", SAMPLES_S + 1.0) == 700.0
    assert rates.step_ms("d1", SAMPLES_S + 11.0) is None


def test_a_report_counts_rows_and_leaves_their_lists_out() -> None:
    state = worker("d1", row("a", 0, 10), row("b", 0, 10))
    told = report(state, StepRates(), 0.0)
    assert (told.running_rows, told.waiting_rows, told.steps_per_s, told.step_ms) == (2, 0, None, None)
    assert present(told.state.worker).running == ()


@pytest.mark.parametrize(
    ("wait_ms", "told_ms"),
    [
        (0.0, 0.0),
        (9.99, 0.0),
        (10.0, 10.0),
        (10.4, 10.0),
        (99.4, 99.0),
        (104.0, 100.0),
        (1250.1, 1300.0),
        (98765.0, 99000.0),
    ],
)
def test_waits_have_two_digits(wait_ms: float, told_ms: float) -> None:
    assert coarse(wait_ms) == told_ms


def test_a_summary_names_two_gateways_that_take_requests() -> None:
    """Enough to know whether a gateway is the only one: a large fleet's names would be told again and again."""
    gateways = [
        worker(f"g{number}").model_copy(
            update={"service": ServiceName.GATEWAY, "worker": None, "draining": number == 0}
        )
        for number in range(4)
    ]
    told = summary("r", [worker("d1"), *gateways], wait_ms={"m": 1234.0})
    assert told.gateways == ("g1", "g2")
    assert told.ready == {ServiceName.DENOISER: 1, ServiceName.GATEWAY: 3}
    assert told.wait_ms == {"m": 1200.0}


# What the plan of placement is made from.


NOW_S = 10_000.0


def record(
    digest: str, size: int, *, created_s: int = 0, pinned: bool = False, tenant: str = "t"
) -> LoraRecord:
    return LoraRecord(
        lora_id=f"lora_{digest}",
        tenant=tenant,
        created_s=created_s,
        state=LoraState.READY,
        pinned=pinned,
        canonical=CanonicalLora(
            file=StoredFile(sha256=digest, size_bytes=size), model_digest="d", rank=1, modules=1
        ),
    )


def tiers() -> HostTiers:
    known = HostTiers()
    change = TierChange(number=1, sha256="a", size_bytes=5)
    known.observe(
        "i",
        HostTier(
            name="h", epoch=1, number=1, changes=(change,), budget_bytes=50, used_bytes=5, bytes_per_s=7.0
        ),
    )
    return known


def test_the_catalogue_is_what_is_ready_by_its_file() -> None:
    failed = record("c", 3).model_copy(update={"state": LoraState.FAILED})
    catalogue = LoraCatalogue.of(
        [
            record("a", 5, created_s=9),
            record("a", 5, created_s=4, pinned=True, tenant="u"),
            record("b", 6),
            failed,
        ]
    )
    assert catalogue == LoraCatalogue({"a": 5, "b": 6}, frozenset({"a"}), {"a": 4, "b": 0})


def test_hosts_are_places() -> None:
    catalogue = LoraCatalogue.of([record("a", 5), record("b", 6)])
    (host,) = observed(catalogue, tiers(), NOW_S).places
    assert (host.name, host.budget_bytes, host.held) == ("h", 50, {"a": 5})


def test_what_no_host_has_is_registered_for_a_while() -> None:
    recent = int(NOW_S - REGISTERED_S / 2)
    catalogue = LoraCatalogue.of(
        [record("a", 5, created_s=recent), record("b", 6, created_s=recent), record("c", 7, created_s=1)]
    )
    assert observed(catalogue, tiers(), NOW_S).registered == {"b"}
