"""Every two features in one row, beside others in one batch: each row is as alone, and no feature is left out.

`deploy.composition` has the tables: which features there are, and which pairs are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from deploy.composition.__main__ import (
    EXCLUSIVE,
    FAMILIES,
    FEATURES,
    LACKING,
    REFUSED,
    Pair,
    families_of,
    page,
    pairs,
)
from giornata.control.layout import count_sequences
from giornata.control.link.client import ControlLink
from giornata.control.link.server import Listener, is_known_token
from giornata.control.networks import ControlNet, load
from giornata.model_cards import read_model_card
from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.packed.packing import with_companions
from giornata.packed.sharding import AllToAllGroup
from giornata.scheduling.batch import Capacity
from giornata.wire.controlnets import DataPath
from giornata.wire.errors import GiornataError
from giornata.wire.models import ModelCard, Sampler
from giornata.wire.requests import REFERENCE, EditParameters, asked
from giornata.wire.resolution import check_taken, resolve
from giornata_controlnet.compute_thread import ControlNetThread
from giornata_controlnet.rows import ActiveControlNet, OpenRow
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.controls.controlnets import ControlDispatcher
from giornata_denoiser.controls.residuals import (
    HELD_STEPS,
    ControlNetSession,
    LocalControls,
    RemoteControls,
    control_conditions,
    control_target,
)
from giornata_denoiser.engine.batch_tensors import LowRanks
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxInpaint, FluxKontext
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.sampling import DiscreteTime
from giornata_denoiser.parallel import halve_guidance, shared
from giornata_denoiser.rows.parts import Adapters, RowControl, RowLora
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.distances import distance
from tests.fakes import tiny_driven, tiny_flux_control, tiny_sd3_control, tiny_unet_control
from tests.fakes.checkpoints import SDXL_UNET, checkpoint, flux_checkpoint
from tests.fakes.step_caches import taylor
from tests.patience import HUNG_S
from tests.unit.denoiser.engine.edits import GRID, where

Features = frozenset[str]
LoraKey = tuple[RowLora, ...]
CLOSE: Final = 1e-5
"""How far float32 may be from the row alone, over its largest value."""
SHOWS: Final = 100 * CLOSE
"""How far the picture of a row is at least from that without one of its features."""
STEPS: Final = 4
RESUMED: Final = 2
"""Steps of a row before it goes on elsewhere."""
CPU: Final = torch.device("cpu")
PIXELS: Final = 16
"""Of the picture, a side of a token."""
TOKEN: Final = "a-secret"  # noqa: S105 - of these tests
ONE, TWO, LATE, ZERO = RowLora("one", 1.0), RowLora("two", 0.5), RowLora("late", 1.0), RowLora("zero", 0.0)
SETS: Final = ((ONE,), (ONE, TWO), (LATE,), (LATE, TWO), (ZERO,))
BOUND: Final = 3
"""The step before which late LoRAs join; they arrive after the first one."""
BY_SAMPLING: Final = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012}
SILENT: Final = frozenset({"resumed", "degree"})
"""What changes no picture."""
IDLE: Final[Mapping[str, Features]] = {
    "idle LoRA": frozenset({"lora", "loras", "late"}),
    "idle cache": frozenset({"control", "service", "cache"}),
}
"""What is there and changes nothing, a LoRA of zeros or a step cache that skips no step; and what it is not beside."""
OTHER_NOISE: Final = "other noise"
"""What a stochastic row has in place of its own: the rest of its sampler shows without any noise."""
CONTINUED: Final = frozenset({"lora", "loras", "control", "service", "reference", "stochastic", "guidance"})
"""Rows with these go on elsewhere as if nothing had happened; others learn, compute or wait for something again."""


def title(features: Features) -> str:
    return "+".join(each for each in (*FEATURES, *IDLE, OTHER_NOISE) if each in features) or "plain"


def rows_of(pair: Pair) -> list[Features]:
    """The rows that stand for a pair: one with both, but for what one row cannot have together."""
    return [frozenset({each}) for each in pair] if pair in EXCLUSIVE else [frozenset(pair)]


def without(features: Features, one: str) -> Features:
    """The same row but for one feature; itself where the others imply it."""
    left = features - {one}
    if one == "stochastic":
        return features | {OTHER_NOISE}
    if one == "padding" and "hit" not in left:
        return left | {"miss"}  # what keeps no padding
    implied = {"lora": {"loras", "late"}, "miss": {"padding"} if "hit" not in left else set()}
    return features if left & implied.get(one, set()) else left


def crashed(error: Exception) -> None:
    raise error


def renamed(row: Row) -> Row:
    """`row` as a job called plain, which no other of a batch is."""
    return replace(row, key=replace(row.key, job_id="plain"))


def computed_pairs(of: str) -> list[Pair]:
    """Those that this family's network computes."""
    return [
        pair for pair in pairs() if ("degree" in pair or pair not in REFUSED) and of in families_of(*pair)
    ]


def owner(pair: Pair) -> str:
    """The batch of a pair: references need another model, and two devices another engine."""
    return next((each for each in ("degree", "reference") if each in pair), pair[0])


# Tiny models, a new instance each time: threads share no module.


def flux(*, references: bool) -> ModelFamily:
    return tiny_flux.family((FluxKontext if references else FluxInpaint)(tiny_flux.transformer()))


def sd3(*, references: bool) -> ModelFamily:
    assert not references
    return tiny_driven.family.__wrapped__("sd3", torch.float32)


def unet(*, references: bool) -> ModelFamily:
    assert not references
    network = tiny_unet.network("shallow")
    config = {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear", **BY_SAMPLING}
    return ModelFamily(network.text, DiscreteTime(config), network)


MODELS: Final[Mapping[str, Callable[..., ModelFamily]]] = {"flux": flux, "sd3": sd3, "unet": unet}
NETS: Final[Mapping[str, Callable[[], Any]]] = {
    "flux": tiny_flux_control.net,
    "sd3": lambda: tiny_sd3_control.net(tiny_driven.unhooked("sd3").config),
    "unet": lambda: tiny_unet_control.net("shallow"),
}


class LoopInTest(EngineLoop):
    """A loop that takes its turns when a test says so; late LoRAs arrive with the first, or when all rows wait."""

    def __init__(self, engine: Callable[[LowRanks], Engine], sets: Mapping[LoraKey, SequenceLoras]) -> None:
        self.reports: list[StepReport] = []
        self._sets, self._arrived = sets, False
        super().__init__(engine(self), self.reports.append, crashed)

    def find(self, loras: LoraKey) -> SequenceLoras | None:
        """It holds the LoRAs: see `LowRanks`."""
        return None if LATE in loras and not self._arrived else self._sets[loras]

    def turn(self) -> StepReport:
        """A step of all rows that are ready."""
        if not self._goes_on():
            self._arrive()
        assert self._goes_on(), "rows wait for ever"
        self._step(self._next())
        self._arrive()
        return self.reports[-1]

    @property
    def over(self) -> bool:
        return not self._engine.batch.keys

    def _arrive(self) -> None:
        self._arrived = True
        for key in self._engine.batch.keys:
            self.resume(key.job_id, key.attempt)


class ThreadGroup:
    """One of two threads that compute a batch together; satisfies `AllToAllGroup`."""

    name, size = "two threads", 2

    def __init__(self, rank: int, posts: list[Sequence[Tensor]], barrier: threading.Barrier) -> None:
        self.rank, self._posts, self._barrier = rank, posts, barrier

    def trade(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self._posts[self.rank] = torch.split(flat, list(sent))
        self._barrier.wait(HUNG_S)
        got = torch.cat([parts[self.rank] for parts in self._posts])
        self._barrier.wait(HUNG_S)
        assert len(got) == sum(received)
        return got


class ControlInstance:
    """The ControlNet service's end of the data path, and its thread, in this process."""

    def __init__(self, folder: Path, net: ControlNet, stack: ExitStack) -> None:
        self._net, self._rows = net, dict[str, OpenRow]()
        find = lambda key, _: self._rows.get(key)  # noqa: E731 - one line
        computing = ControlNetThread(find, CPU, torch.float32, tokens=1000, on_crash=crashed)
        stack.enter_context(computing)
        admits = partial(is_known_token, tokens=[TOKEN])
        listener = stack.enter_context(
            Listener(admits, computing.ask, unix=folder / "link.sock", tcp=None, device=CPU)
        )
        address = listener.addresses[DataPath.UNIX]
        self._link = stack.enter_context(
            ControlLink(DataPath.UNIX, address, TOKEN, slab_bytes=32 << 20, device=CPU, room_s=HUNG_S)
        )

    def opened(self, row: Row, target: Any) -> ControlNetSession[ControlLink]:
        """`row` as a denoiser has it open here."""
        (use,), behind = row.adapters.controls, self._net.behind(target.base)
        seen = self._net.open(control_conditions(row, 0))
        act = ActiveControlNet(self._net, seen, use.scale, behind, use.first_step, use.end_step, 1.0)
        key = row.key.job_id
        self._rows[key] = OpenRow(
            key,
            "denoiser",
            [act],
            (behind,),
            target.base,
            row.grid,
            tuple(row.track.times.tolist()),
            count_sequences(target.base.kind, len(row.inputs.prompts)),
            row.region,
            ExitStack(),
        )
        return ControlNetSession("instance", self._link, key, (behind,))


class Matrix:
    """One family's rows: with some features each, alone or in a batch."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        self.name = name
        NETS[name]().save_pretrained(folder / "net")
        # One for each rank and one for the service: their threads share no module.
        *self._nets, theirs = [load(folder / "net", torch.float32, CPU, "edges") for _ in range(3)]
        self._instance = ControlInstance(folder, theirs, stack)
        self.family = cache(self._made)
        self.row = cache(self._row)
        self.alone = cache(self._alone)
        self._template = cache(self._recorded)

    @cached_property
    def _sets(self) -> Mapping[tuple[RowLora, ...], SequenceLoras]:
        generator = torch.Generator().manual_seed(0)

        def tensors() -> dict[str, Tensor]:
            made = {}
            for path, layer in self.family(False).network.layers.items():
                if isinstance(layer, torch.nn.Linear):
                    made[f"{path}.down"] = 0.1 * torch.randn(4, layer.in_features, generator=generator)
                    made[f"{path}.up"] = 0.1 * torch.randn(layer.out_features, 4, generator=generator)
            return made

        loras = {each: tensors() for each in (ONE, TWO, LATE, ZERO)}
        return {each: low_rank(str(each), [(loras[lora], lora.scale) for lora in each]) for each in SETS}

    def _row(self, features: Features, seed: int = 1) -> Row:
        """A row with these features, whose job is called by them."""
        references, resume = "reference" in features, None
        of, adapters = self.family(references), self._adapters(features)
        if "resumed" in features:
            before = self._begun(self.row(features - {"resumed"}, seed=seed))
            resume, adapters = before.export(), before.adapters
        made = tiny_driven.row(
            of,
            Spec(
                title(features),
                grid=GRID,
                steps=STEPS,
                text_tokens=6,
                padding_tokens=3,
                true_cfg_scale=2.0 if "guidance" in features else 1.0,
                seed=seed,
            ),
            [(2, 3)] if references else (),
            sampler=Sampler.EULER_ANCESTRAL if "stochastic" in features else None,
            resume=resume,
        )
        if adapters.controls:
            generator = torch.Generator().manual_seed(seed + 40)
            sides = (3, *(PIXELS * side for side in GRID)) if self.name == "unet" else (16, tiny_flux.LATENT)
            adapters = adapters.seeing([torch.rand(*sides, generator=generator)])
        made = replace(made, adapters=adapters)
        made = replace(made, step_cache=taylor(2, 1, 1) if "cache" in features else None)
        made = replace(made, step_cache=taylor(1, 1, STEPS)) if "idle cache" in features else made
        if OTHER_NOISE in features:
            made = replace(made, generator=torch.Generator().manual_seed(seed + 1).get_state())
        if not features & {"hit", "miss", "padding"}:
            return made
        return changed(
            made,
            region=with_companions(where(), made.inputs.companions),
            template=self._template(references) if "hit" in features else None,
            renewed_every=0 if "hit" in features else 3,
            keeps_padding="padding" in features,
        )

    def ended(self, rows: Sequence[Row], of: ModelFamily | None = None, rank: int = 0) -> dict[str, Tensor]:
        """The final latents of rows that share their steps."""
        loop = self._loop(rows, of, rank)
        found: dict[str, Tensor] = {}
        while not loop.over:
            report = loop.turn()
            assert not report.failed
            found |= {row.key.job_id: row.latent for row in report.advanced if row.done}
        return found

    def ended_by_two(self, rows: Sequence[Row], references: bool) -> list[dict[str, Tensor]]:
        """Likewise, by two threads that compute each step together: what either has made."""
        posts: list[Sequence[Tensor]] = [(), ()]
        barrier = threading.Barrier(2)
        divided: Callable[[ModelFamily, AllToAllGroup], ModelFamily]
        divided = halve_guidance if self.name == "unet" else shared

        parts = [
            divided(self.family(references, rank + 1), ThreadGroup(rank, posts, barrier)) for rank in range(2)
        ]

        def computed(rank: int) -> dict[str, Tensor]:
            try:
                return self.ended(rows, parts[rank], rank)
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(computed, range(2)))

    def _made(self, references: bool, rank: int = 0) -> ModelFamily:
        """The model of one thread; 0 is this one."""
        assert rank in range(3)
        return MODELS[self.name](references=references)

    def _alone(self, features: Features) -> Tensor:
        return self.ended([self.row(features)])[title(features)]

    def _recorded(self, references: bool) -> CachedTemplate:
        row = self.row(frozenset({"reference"} if references else ()), seed=9)
        recording = RecordingSpec(frozenset({CacheForm.KV}), EXACT)
        loop = self._loop([replace(row, records=recording)])
        *_, last = (loop.turn() for _ in range(STEPS))
        return CachedTemplate("t", GRID, last.advanced[0].entries)

    def _begun(self, row: Row) -> Row:
        loop = self._loop([row])
        *_, last = (loop.turn() for _ in range(RESUMED))
        return last.advanced[0]

    def _adapters(self, features: Features) -> Adapters:
        controls: tuple[RowControl, ...] = ()
        if features & {"control", "service"}:
            controls = (RowControl("edges", self._nets[0].card.digest, 0.8, 0, STEPS),)
        named = {"lora": (ONE,), "loras": (ONE, TWO), "late": (LATE,), "idle LoRA": (ZERO,)}
        sets = [named[each] for each in named if each in features]
        loras = (LATE, TWO) if features >= {"loras", "late"} else max(sets, key=len, default=())
        loras = (LATE,) if features >= {"lora", "late"} else loras
        return Adapters(loras, BOUND if LATE in loras else 0, controls)

    def _loop(self, rows: Sequence[Row], of: ModelFamily | None = None, rank: int = 0) -> LoopInTest:
        """The loop of an engine that has the rows."""
        of = of or self.family(bool(rows[0].inputs.companions))
        net, target = self._nets[rank], control_target(of.network, PIXELS)
        assert target is not None
        remote = RemoteControls(
            target,
            torch.float32,
            CPU,
            lambda _, error: crashed(error),
            held_steps=HELD_STEPS,
            late_s=HUNG_S,
        )
        for row in rows:
            if "service" in row.key.job_id.split("+"):
                remote.sessions.put(row.key, self._instance.opened(row, target))
        engine = partial(
            Engine,
            of,
            Capacity(rows=32, tokens=1 << 20),
            lambda: 0.0,
            reusing=ReuseOptions(correction_bits=EXACT),
            controls=ControlDispatcher(LocalControls({net.card.digest: net}, target), remote),
        )
        loop = LoopInTest(lambda loras: engine(low_ranks=loras), self._sets)
        assert loop.submit(rows)
        return loop


@pytest.fixture(scope="module", params=FAMILIES)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with ExitStack() as stack:
        yield Matrix(request.param, tmp_path_factory.mktemp("composition"), stack)


BATCHES: Final = [
    (of, feature)
    for of in FAMILIES
    for feature in FEATURES
    if any(owner(pair) == feature for pair in computed_pairs(of))
]
"""Each has all pairs of a feature, but for those that another one has."""


@pytest.mark.parametrize(("matrix", "feature"), BATCHES, indirect=["matrix"])
def test_rows_with_both_are_in_a_batch_as_alone(matrix: Matrix, feature: str) -> None:
    """Beside a row with neither."""
    mine = [pair for pair in computed_pairs(matrix.name) if owner(pair) == feature]
    wanted = {row - {"degree"} for pair in mine for row in rows_of(pair)}
    for references in {"reference" in row for row in wanted}:
        of = {row for row in wanted if ("reference" in row) is references}
        plain = renamed(matrix.row(frozenset({"reference"} if references else ()), seed=2))
        rows = [*map(matrix.row, of), plain]
        alone = {title(row): matrix.alone(row) for row in of} | matrix.ended([plain])
        for found in matrix.ended_by_two(rows, references) if feature == "degree" else [matrix.ended(rows)]:
            far = {name: distance(found[name], latent) for name, latent in alone.items()}
            assert {name: by for name, by in far.items() if not by <= CLOSE} == {}


def test_each_feature_of_a_pair_shows(matrix: Matrix) -> None:
    """A feature that is left out in silence would leave the picture as it is without it."""
    rows = {row for pair in computed_pairs(matrix.name) if "degree" not in pair for row in rows_of(pair)}
    parts = [(row, one, without(row, one)) for row in rows for one in row - SILENT]
    near = {
        (title(row), one): distance(matrix.alone(row), matrix.alone(other))
        for row, one, other in parts
        if row != other
    }
    assert {each: by for each, by in near.items() if not by > SHOWS} == {}


def test_what_changes_nothing_takes_nothing_from_a_feature(matrix: Matrix) -> None:
    """A correction, say, that is dropped beside a step cache would be dropped alone, too."""
    far = {
        (feature, idle): distance(
            matrix.alone(frozenset({feature, idle})), matrix.alone(frozenset({feature}))
        )
        for idle, apart in IDLE.items()
        for feature in FEATURES
        if matrix.name in families_of(feature) and feature not in apart | {"degree"}
    }
    assert {each: by for each, by in far.items() if not by <= CLOSE} == {}


def test_who_computes_a_controlnet_and_where_a_row_goes_on_show_in_no_picture(matrix: Matrix) -> None:
    far = {}
    for row in map(frozenset, computed_pairs(matrix.name)):
        other = row - {"resumed"} if row <= CONTINUED | {"resumed"} else row
        if "service" in row and "control" not in row:
            other = other - {"service"} | {"control"}
        if other != row and "degree" not in row:
            far[title(row)] = distance(matrix.alone(row), matrix.alone(other))
    assert len(far) > len(CONTINUED)
    assert {name: by for name, by in far.items() if not by <= CLOSE} == {}


# What is refused.


NAMED: Final[Mapping[str, Mapping[str, Any]]] = {
    "cache": {"step_cache": "taylorseer"},
    "stochastic": {"sampler": "euler_ancestral"},
    "control": {"controlnets": [{"model": "edges", "image": 0}]},
    "service": {"controlnets": [{"model": "edges", "image": 0}]},
}
"""How a request asks for a feature."""


def card_of(of: str, folder: Path) -> ModelCard:
    if of == "flux":
        return read_model_card(flux_checkpoint(folder, "FluxInpaintPipeline"))
    if of == "sd3":
        network = {"in_channels": 16, "sample_size": 128}
        return read_model_card(
            checkpoint(folder, "StableDiffusion3Pipeline", network, tokenizer="tokenizer_3")
        )
    return read_model_card(checkpoint(folder, "StableDiffusionXLPipeline", SDXL_UNET))


def ask(card: ModelCard, *features: str) -> None:
    """A request for these, as gateway and denoiser read it."""
    fields = {name: value for feature in features for name, value in NAMED.get(feature, {}).items()}
    check_taken({REFERENCE: int("reference" in features)}, card)
    resolve(asked(EditParameters, {"prompt": "a hat", **fields}), card, seed=7)


@pytest.mark.parametrize("of", FAMILIES)
def test_what_the_table_refuses_is_refused_with_its_code_and_nothing_else(of: str, tmp_path: Path) -> None:
    card = card_of(of, tmp_path)
    for features, refusal in [
        *((pair, REFUSED.get(pair)) for pair in pairs() if families_of(*pair) and of in families_of(*pair)),
        *(((feature,), LACKING.get((of, feature))) for feature in FEATURES),
    ]:
        if "reference" in features and of == "flux":  # that of Kontext
            card = card.model_copy(update={"max_references": 1})
        if refusal is None or refusal.code is None:
            ask(card, *features)
            continue
        with pytest.raises(GiornataError) as refused:
            ask(card, *features)
        assert refused.value.code == refusal.code, features


@pytest.mark.parametrize("of", [of for of, feature in LACKING if feature == "padding"])
def test_blocks_without_padding_keep_none(of: str) -> None:
    row = tiny_driven.row(MODELS[of](references=False), Spec(grid=GRID, text_tokens=6, padding_tokens=3))
    kept = changed(row, region=where(), renewed_every=3, keeps_padding=True)
    assert kept.padding == (0,)


def test_the_page_is_made_of_the_tables() -> None:
    assert Path("docs/composition.md").read_text() == page()
