"""LoRAs, ControlNets and step caches at every degree: rows equal those of one process."""

from __future__ import annotations

import queue
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from giornata.control.networks import load
from giornata.packed.low_rank import LowRankFactors, SequenceLoras
from giornata.planning.cost_model import StepParallelism
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices
from giornata.wire.controlnets import DataPath
from giornata.wire.models import TaylorSeerSchedule
from giornata_denoiser.choices import EXACT
from giornata_denoiser.controls.residuals import (
    ControlLinkAddress,
    ControlNetSession,
    PoolControls,
    control_target,
    open_controls,
)
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.pool.rank import RankControls
from giornata_denoiser.rows.parts import Adapters, RowControl, RowLora, TaylorRule, lora_set_name
from giornata_denoiser.rows.row import Row
from tests.fakes.local_controls import controls_of
from tests.integration.denoiser.pool.bench import After, Model, Walk, equal, running
from tests.integration.denoiser.test_service_adapters import CPU, fitting
from tests.integration.test_composition import TOKEN, ControlInstance
from tests.patience import HUNG_S
from tests.present import present

STEPS = 6
PLAN: list[Devices] = [(0,), (0, 1), (1,), (1,), (0, 1), (0, 1), (0,), (0, 1)]
"""Rows of :data:`STEPS` steps begin with the third."""


class Sets:
    """Sets of LoRAs of one process, of which a test can hold some back; satisfies `LowRanks`."""

    def __init__(self, family: ModelFamily, *loras: RowLora) -> None:
        self.held_back: set[RowLora] = set()
        self._sets = {
            lora_set_name((lora,)): _random_set(family, lora, seed) for seed, lora in enumerate(loras)
        }

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return None if self.held_back.intersection(loras) else self._sets[lora_set_name(loras)]


def _random_set(family: ModelFamily, lora: RowLora, seed: int) -> SequenceLoras:
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for path, layer in family.network.layers.items():
        if isinstance(layer, torch.nn.Linear):
            sides = (2, layer.in_features), (layer.out_features, 2)
            factors[path] = LowRankFactors(*(torch.randn(*side, generator=generator) * 0.1 for side in sides))
    return SequenceLoras(lora_set_name((lora,)), factors)


ONE, OTHER = RowLora("1" * 64), RowLora("2" * 64, scale=0.5)


def with_loras(row: Row, *loras: RowLora, first: int = 0, early: bool = True) -> Row:
    return replace(row, adapters=Adapters(loras, first, joins_early=early))


@pytest.mark.parametrize("halves", [False, True], ids=["by tokens", "by guidance halves"])
def test_adapters_and_step_caches_act_on_one_device_and_on_two(
    model: Model, tmp_path: Path, halves: bool
) -> None:
    """LoRAs, one of which joins at a later step, a ControlNet, step caches, and a row without any.

    The same steps are extrapolated as in one process, whichever devices computed those before.
    """
    fitting(model.checkpoint).save_pretrained(tmp_path / "edges")
    configured = f"edges={tmp_path / 'edges'}"
    family, multiple = model.checkpoint.family, model.checkpoint.card.pixel_multiple
    target = control_target(family.network, multiple)
    nets = open_controls(configured, target, dtype=torch.float32, device=CPU)
    (digest,) = nets
    image = torch.randn(20, 64, generator=torch.Generator().manual_seed(7))
    use = RowControl("edges", digest, 0.8, 1, STEPS, work=nets[digest].card.work, image=image)
    sets = Sets(family, ONE, OTHER)
    edges = model.row("edges", steps=STEPS, seed=4, guided=True)
    adapted = [
        with_loras(model.row("one", steps=STEPS), ONE),
        with_loras(model.row("other", steps=STEPS, seed=1, guided=True), OTHER),
        with_loras(model.row("later", steps=STEPS, seed=2), ONE, first=3, early=False),
        replace(edges, adapters=Adapters(controls=(use,))),
    ]
    rule, steps = TaylorRule(TaylorSeerSchedule(2, 1), 2), len(PLAN)
    cached = [
        replace(model.row("cached", steps=steps), step_cache=rule),
        replace(model.row("guided", steps=steps, seed=1, guided=True), step_cache=rule),
    ]
    rows = [*adapted, *cached, model.row("none", steps=STEPS, seed=3)]
    config = model.profiled(tmp_path / "profile.json", (2,), halves=halves).config(2)
    config = config.model_copy(update={"controlnets": configured})
    with running(config, Walk(PLAN), low_ranks=sets) as bench:
        assert bench.checkpoint.control_cards.keys() == {digest}
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
    ways = {StepParallelism(), StepParallelism(2)} | {StepParallelism(2, halves=halves)}
    assert {StepParallelism(sample.degree, sample.halves) for sample in bench.samples} == ways
    found = bench.latents()
    equal(found, model.alone(rows, sets, controls_of(nets, family.network, multiple, 2)))
    skipped = sum(rule.steps.skipped(steps) * len(row.inputs.prompts) for row in cached) * family.depth
    assert bench.skipped_blocks == skipped > 0
    bare = model.alone([replace(row, adapters=Adapters()) for row in adapted])
    assert not any(torch.allclose(found[name], latent, atol=1e-3) for name, latent in bare.items())


def test_a_row_waits_for_its_loras_and_another_takes_them_when_they_come(model: Model) -> None:
    """The set comes after two steps of a masked row: what it has kept of steps without it is void then."""
    sets = Sets(model.checkpoint.family, ONE)
    sets.held_back.add(ONE)
    waits = with_loras(model.row("waits", steps=3), ONE)
    joins = with_loras(model.row("joins", steps=STEPS, seed=2, masked=True), ONE, first=STEPS - 1)
    config = model.config(2).model_copy(update={"template_bits": EXACT})
    arrive = After(2, lambda _: sets.held_back.clear())
    with running(config, Walk([(0, 1)] * STEPS), after=arrive, low_ranks=sets) as bench:
        assert bench.pool.submit([waits, joins])
        bench.until(lambda: len(bench.degrees) >= 2)
        bench.pool.resume("waits", 1)
        bench.until_ended(["waits", "joins"])
        assert bench.pool.paused == 1
    joined = bench.ended["joins"]
    assert isinstance(joined, Row)
    first = joined.adapters.loras_from
    assert 2 <= first < STEPS - 1
    expected = with_loras(joins, ONE, first=first, early=False)
    equal(bench.latents(), model.alone([waits, expected], sets))


def test_ranks_ask_the_service_for_rows_that_it_has_open(model: Model, tmp_path: Path) -> None:
    """A row waits until it is open, and again where it has been lost; others go on meanwhile."""
    made = fitting(model.checkpoint)
    made.save_pretrained(tmp_path / "edges")
    ours, theirs = (load(tmp_path / "edges", torch.float32, CPU, "edges") for _ in range(2))
    family, multiple = model.checkpoint.family, model.checkpoint.card.pixel_multiple
    target = present(control_target(family.network, multiple))
    image = torch.randn(20, 64, generator=torch.Generator().manual_seed(7))
    bare = model.row("guided", steps=STEPS, guided=True)
    use = RowControl("edges", ours.card.digest, 0.8, 1, STEPS, image=image)
    row = replace(bare, adapters=Adapters(controls=(use,)))
    lost: queue.Queue[RowKey] = queue.Queue()
    walk: list[Devices] = [(0,), *[(0, 1)] * (STEPS - 1)]
    controls = PoolControls(lambda key, _: lost.put(key))
    with ExitStack() as stack:
        opened = ControlInstance(tmp_path, theirs, stack).opened(row, target)
        address = ControlLinkAddress(DataPath.UNIX, str(tmp_path / "link.sock"), TOKEN, 32 << 20)
        bench = stack.enter_context(running(model.config(2), Walk(walk), controls=controls))
        assert bench.pool.submit([row, model.row("plain", steps=STEPS, seed=1)])
        bench.until_ended(["plain"])
        assert bench.pool.paused == 1
        assert len(bench.degrees) == STEPS + 1, "it has made the one step in which no ControlNet acts"
        nowhere = replace(address, address=str(tmp_path / "nowhere.sock"))
        for link in (nowhere, address):
            session = ControlNetSession(opened.instance, link, opened.row, opened.behind)
            controls.put(row.key, session)
            bench.pool.resume("guided", 1)
            if link is nowhere:
                assert lost.get(timeout=HUNG_S) == row.key
                assert not controls.has(row.key)
        bench.until_ended(["guided"])
    found = {"guided": bench.latents()["guided"]}
    nets = {ours.card.digest: ours}
    equal(found, model.alone([row], controls=controls_of(nets, family.network, multiple, 2)))
    without = model.alone([bare])
    assert not torch.allclose(found["guided"], without["guided"], atol=1e-3)


def test_a_rank_closes_the_link_to_an_instance_that_is_gone(model: Model, tmp_path: Path) -> None:
    family, multiple = model.checkpoint.family, model.checkpoint.card.pixel_multiple
    fitting(model.checkpoint).save_pretrained(tmp_path / "edges")
    net = load(tmp_path / "edges", torch.float32, CPU, "edges")
    target = present(control_target(family.network, multiple))
    image = torch.randn(20, 64, generator=torch.Generator().manual_seed(7))
    use = RowControl("edges", net.card.digest, 0.8, 1, STEPS, image=image)
    row = replace(model.row("guided", steps=STEPS, guided=True), adapters=Adapters(controls=(use,)))
    controls = RankControls(CPU)
    with ExitStack() as stack:
        stack.callback(controls.close)
        opened = ControlInstance(tmp_path, net, stack).opened(row, target)
        address = ControlLinkAddress(DataPath.UNIX, str(tmp_path / "link.sock"), TOKEN, 32 << 20)
        links = []
        for slab_bytes in (
            32 << 20,
            16 << 20,
        ):  # of an instance that was started again, under another address
            there = replace(address, slab_bytes=slab_bytes)
            controls.follow(row.key, ControlNetSession(opened.instance, there, opened.row, opened.behind))
            session = present(controls.session(row.key))
            links.append(session.link)
            session.link.close()
        assert controls._links.keys() == {replace(address, slab_bytes=16 << 20)}
        assert links[0] is not links[1]
