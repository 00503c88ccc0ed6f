"""LoRAs from the store's file to a set on the device."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from giornata.wire.errors import GiornataError, LoraMismatch, LoraUnreadable, ServiceUnavailable
from giornata.wire.workers import AdapterLoad, Tier
from giornata_denoiser.loras import LoraTierCapacities, LoraTiers
from giornata_denoiser.rows.parts import RowLora
from tests.patience import HUNG_S

NETWORK = nn.ModuleDict({"layer": nn.Linear(6, 4)})
ROOMY = LoraTierCapacities(1 << 20, 1 << 20, 1 << 20)


class Summed:
    """A set as the change of the one layer's weight."""

    def __init__(self, name: str, loras: Sequence[tuple[Mapping[str, Tensor], float]]) -> None:
        self.name = name
        self.change = sum(scale * of["layer.up"] @ of["layer.down"] for of, scale in loras)
        self.tensors = [tensor for of, _ in loras for tensor in of.values()]
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors)


SUMMED: Final[Any] = Summed
"""In place of factors on a device."""


class Remote:
    """A LoRA store."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.stores: list[LoraTiers] = []
        self.asked: list[str] = []
        self.gate: threading.Event | None = None
        self.begun = threading.Event()

    def add(self, tensors: Mapping[str, Tensor], scale: float = 1.0) -> RowLora:
        data = save(dict(tensors))
        digest = hashlib.sha256(data).hexdigest()
        self.files[digest] = data
        return RowLora(digest, scale, size_bytes=len(data))

    def fetch(self, lora: RowLora, path: Path, ahead: bool) -> None:
        self.asked.append(lora.digest)
        self.begun.set()
        if self.gate is not None:
            path.write_bytes(b"half")
            assert self.gate.wait(HUNG_S)
        if lora.digest not in self.files:
            raise ServiceUnavailable
        path.write_bytes(self.files[lora.digest])


def factors(seed: int, rank: int = 2) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, 6, generator=made), torch.randn(4, rank, generator=made)
    return {"layer.down": down, "layer.up": up}


@pytest.fixture
def remote() -> Iterator[Remote]:
    """Torn down when the test's stack has ended all loads: whatever there was, no tier pins anything then."""
    remote = Remote()
    yield remote
    for store in remote.stores:
        assert not store.pinned()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tiers(
    remote: Remote,
    folder: Path,
    stack: ExitStack,
    budgets: LoraTierCapacities = ROOMY,
    told: Callable[[AdapterLoad], None] = lambda _: None,
) -> LoraTiers:
    store = LoraTiers(remote.fetch, SUMMED, dict(NETWORK.named_modules()), folder, budgets, told=told)
    remote.stores.append(store)
    return stack.enter_context(store)


def test_a_set_is_there_once_it_is_loaded_and_each_tier_counts(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    one, two = remote.add(factors(1), 0.5), remote.add(factors(2))
    store, loras = tiers(remote, tmp_path, stack), tuple(sorted((one, two)))
    assert store.find(loras) is None
    with store.held(loras) as loading:
        made: Any = loading.result(HUNG_S)
        assert store.find(loras) is made
    change = [of["layer.up"] @ of["layer.down"] for of in (factors(1), factors(2))]
    torch.testing.assert_close(vars(made)["change"], 0.5 * change[0] + change[1])
    with store.held((one,)) as loading:
        loading.result(HUNG_S)
    with store.held(loras) as loading:
        assert loading.result(HUNG_S) is made
    counted = store.counted()
    assert (counted.misses, counted.hits_memory, counted.hits_device) == (2, 1, 1)
    assert set(store.resident()[Tier.DISK]) == {one.digest, two.digest}
    again = tiers(remote, tmp_path, stack)
    with again.held((one,)) as loading:
        loading.result(HUNG_S)
    assert (again.counted().hits_disk, len(remote.asked)) == (1, 2)


def test_the_sets_of_an_outline_are_in_host_memory(remote: Remote, tmp_path: Path, stack: ExitStack) -> None:
    """A pool's leader has no weights, and its ranks read the sets from its memory."""
    outline = nn.ModuleDict({"layer": nn.Linear(6, 4, device="meta", dtype=torch.bfloat16)})
    one = remote.add(factors(1))
    store = LoraTiers(remote.fetch, SUMMED, dict(outline.named_modules()), tmp_path, ROOMY)
    remote.stores.append(store)
    with stack.enter_context(store).held((one,)) as loading:
        made = loading.result(HUNG_S)
    assert {(each.device.type, each.dtype) for each in made.tensors} == {("cpu", torch.bfloat16)}


def test_every_hop_of_a_lora_is_told_once(remote: Remote, tmp_path: Path, stack: ExitStack) -> None:
    one, two = remote.add(factors(1)), remote.add(factors(2))
    told: list[AdapterLoad] = []
    store = tiers(remote, tmp_path, stack, told=told.append)
    for _ in range(2):
        with store.held((one,)) as loading:
            loading.result(HUNG_S)
    with store.held(tuple(sorted((one, two)))) as loading:
        loading.result(HUNG_S)
    both = one.size_bytes + two.size_bytes
    assert [(hop.source, hop.size_bytes) for hop in told] == [
        (None, one.size_bytes),
        (Tier.MEMORY, one.size_bytes),
        (None, two.size_bytes),
        (Tier.MEMORY, both),
    ]
    assert all(hop.load_ms > 0 for hop in told)
    told.clear()
    with tiers(remote, tmp_path, stack, told=told.append).held((two,)) as loading:
        loading.result(HUNG_S)
    assert [hop.source for hop in told] == [Tier.DISK, Tier.MEMORY]


def test_what_rows_hold_outlives_pressure_and_goes_afterwards(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    loras = [(remote.add(factors(seed)),) for seed in range(4)]
    store = tiers(remote, tmp_path, stack, LoraTierCapacities(0, 0, 0))
    with ExitStack() as rows:
        for lora in loras:
            rows.enter_context(store.held(lora)).result(HUNG_S)
        assert all(store.find(lora) is not None for lora in loras)
    assert all(store.find(lora) is None for lora in loras)
    assert not store.resident()
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_a_set_stay_in_memory_while_rows_hold_it(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    """Another set with one of them is made of it while it loads or runs, whatever else wants the memory."""
    loras = tuple(sorted(remote.add(factors(seed)) for seed in range(2)))
    store = tiers(remote, tmp_path, stack, LoraTierCapacities(1 << 20, 0, 0))
    with store.held(loras) as loading:
        loading.result(HUNG_S)
        assert sorted(store.resident()[Tier.MEMORY]) == [lora.digest for lora in loras]
        with store.held(loras[:1]) as other:
            other.result(HUNG_S)
        assert store.counted().hits_memory == 1
    assert Tier.MEMORY not in store.resident()


def test_a_file_is_fetched_once_for_all_that_wait(remote: Remote, tmp_path: Path, stack: ExitStack) -> None:
    lora = (remote.add(factors(1)),)
    store = tiers(remote, tmp_path, stack)
    remote.gate = threading.Event()
    store.prefetch(lora)
    assert remote.begun.wait(HUNG_S)
    with store.held(lora) as loading:
        remote.gate.set()
        loading.result(HUNG_S)
    assert len(remote.asked) == 1
    assert store.counted().prefetched == 1


def test_a_set_that_is_prefetched_is_found_on_the_device(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    loras = tuple(sorted((remote.add(factors(1)), remote.add(factors(2)))))
    told: list[AdapterLoad] = []
    store = tiers(remote, tmp_path, stack, told=told.append)
    store.prefetch(loras)
    store.prefetch(())
    assert remote.begun.wait(HUNG_S)
    stack.close()  # what has begun ends
    assert store.find(loras) is not None
    assert [hop.source for hop in told] == [None, None, Tier.MEMORY]
    counted = store.counted()
    assert (counted.prefetched, counted.misses, counted.hits_memory, counted.hits_device) == (2, 0, 0, 0)


def test_a_set_for_which_pinned_ones_leave_no_room_is_prefetched_into_memory(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    held, ahead = (remote.add(factors(1)),), (remote.add(factors(2)),)
    store = tiers(remote, tmp_path, stack, LoraTierCapacities(1 << 20, 1 << 20, ahead[0].size_bytes))
    with store.held(held) as loading:
        loading.result(HUNG_S)
        remote.begun.clear()
        store.prefetch(ahead)
        assert remote.begun.wait(HUNG_S)
        stack.close()
        assert store.find(held) is not None
        assert store.find(ahead) is None
        assert ahead[0].digest in store.resident()[Tier.MEMORY]


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"layer.down": torch.ones(2, 5), "layer.up": torch.ones(4, 2)}, LoraMismatch),
        ({"other.down": torch.ones(2, 6), "other.up": torch.ones(4, 2)}, LoraMismatch),
        ({"layer.down": torch.ones(2, 6)}, LoraMismatch),
        ({"layer.down": torch.ones(2, 6), "layer.up": torch.ones(4, 2).half()}, LoraMismatch),
        ({"layer.alpha": torch.ones(())}, LoraMismatch),
    ],
)
def test_a_file_that_does_not_fit_fails_alone(
    remote: Remote, tmp_path: Path, stack: ExitStack, tensors: dict[str, Tensor], error: type[GiornataError]
) -> None:
    bad, good = (remote.add(tensors),), (remote.add(factors(1)),)
    store = tiers(remote, tmp_path, stack)
    with store.held(bad) as failing, store.held(good) as loading:
        with pytest.raises(error):
            failing.result(HUNG_S)
        loading.result(HUNG_S)
    assert store.counted().failed == 1
    assert store.resident()[Tier.DISK] == (good[0].digest,)


def test_a_damaged_file_is_told_and_fetched_anew(remote: Remote, tmp_path: Path, stack: ExitStack) -> None:
    lora = (remote.add(factors(1)),)
    whole = remote.files[lora[0].digest]
    remote.files[lora[0].digest] = whole[:-1]
    store = tiers(remote, tmp_path, stack)
    with store.held(lora) as loading, pytest.raises(LoraUnreadable):
        loading.result(HUNG_S)
    remote.files[lora[0].digest] = whole
    with store.held(lora) as loading:
        loading.result(HUNG_S)


def test_a_file_that_was_damaged_on_disk_is_told(remote: Remote, tmp_path: Path) -> None:
    lora = (remote.add(factors(1)),)
    with ExitStack() as before, tiers(remote, tmp_path, before).held(lora) as loading:
        loading.result(HUNG_S)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with ExitStack() as after:
        again = tiers(remote, tmp_path, after)
        with again.held(lora) as loading, pytest.raises(LoraUnreadable, match="damaged"):
            loading.result(HUNG_S)
        with again.held(lora) as loading:
            loading.result(HUNG_S)
    assert remote.asked == [lora[0].digest] * 2


def test_a_store_that_is_away_fails_the_load_and_leaves_nothing(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    store = tiers(remote, tmp_path, stack)
    with store.held((RowLora("0" * 64),)) as loading, pytest.raises(ServiceUnavailable):
        loading.result(HUNG_S)
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_leaves_before_its_load_begins_fetches_nothing(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    one, two, three = ((remote.add(factors(seed)),) for seed in range(3))
    store = tiers(remote, tmp_path, stack, LoraTierCapacities(0, 0, 0))
    remote.gate = threading.Event()
    with store.held(one) as first, store.held(two) as second:
        while len(remote.asked) < 2:  # both threads are busy
            assert remote.begun.wait(HUNG_S)
            remote.begun.clear()
        with store.held(three) as gone:
            pass
        assert gone.cancelled()
        remote.gate.set()
        first.result(HUNG_S)
        second.result(HUNG_S)
    assert three[0].digest not in remote.asked
    assert not store.resident()


def test_a_row_that_leaves_while_its_load_runs_frees_it(
    remote: Remote, tmp_path: Path, stack: ExitStack
) -> None:
    lora = (remote.add(factors(1)),)
    store = tiers(remote, tmp_path, stack, LoraTierCapacities(0, 0, 0))
    remote.gate = threading.Event()
    with store.held(lora) as loading:
        assert remote.begun.wait(HUNG_S)
    remote.gate.set()
    loading.result(HUNG_S)
    assert store.find(lora) is None
    assert list(tmp_path.iterdir()) == []
