"""The ledger, template files and the store: nothing beyond its budget, nothing wrong ever read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from giornata_denoiser.blocks.ledger import Ledger
from giornata_denoiser.rows.stored import BITS, store
from giornata_denoiser.rows.template import Entry, Kept, Template
from giornata_denoiser.templates import files
from giornata_denoiser.templates.store import TemplateStore

NAMES = st.sampled_from("abcdef")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(0, 12)),
        st.tuples(st.sampled_from(["use", "pin", "unpin", "remove"]), NAMES, st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(0, 20))
def test_a_ledger_keeps_to_its_budget_and_to_the_order_of_use(  # noqa: C901 - a model, action by action
    actions: list[tuple[str, str, int]], budget: int
) -> None:
    """Beside a model of it: a list in order of use."""
    ledger = Ledger(budget)
    order: list[str] = []
    sizes: dict[str, int] = {}
    pins: dict[str, int] = {}
    for action, name, size in actions:
        gone: tuple[str, ...] = ()
        made_room = action == "add" or (action == "unpin" and pins.get(name, 0) > 0)
        if action == "add":
            gone = ledger.add(name, size)
            if name in order:
                order.remove(name)
            if size <= budget or pins.get(name):
                order.append(name)
                sizes[name] = size
            else:
                assert gone == (name,)
                assert name not in ledger
                continue
        elif action == "use" and name in order:
            ledger.use(name)
            order.append(order.pop(order.index(name)))
        elif action == "pin":
            ledger.pin(name)
            pins[name] = pins.get(name, 0) + 1
        elif action == "unpin" and pins.get(name):
            gone = ledger.unpin(name)
            pins[name] -= 1
        elif action == "remove":
            assert ledger.remove(name) == (name in order)
            if name in order:
                order.remove(name)
        free = [n for n in order if not pins.get(n) and not (action == "add" and n == name)]
        expected = []
        while made_room and sum(sizes[n] for n in order) > budget and free:
            expected.append(free.pop(0))
            order.remove(expected[-1])
        assert list(gone) == expected
        assert ledger.size_bytes == sum(sizes[n] for n in order)
        assert [n in ledger for n in "abcdef"] == [n in order for n in "abcdef"]


def test_a_pin_that_is_not_there_is_not_taken_back() -> None:
    with pytest.raises(ValueError, match="a is not pinned"):
        Ledger(1).unpin("a")


def template(name: str, bits: int = 8, tokens: int = 6, seed: int = 0) -> Template:
    generator = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.randn(tokens, 8, generator=generator).bfloat16()

    entries = tuple(
        Entry(
            sigma,
            (
                Kept(key=store(random(), bits), value=store(random(), bits)),
                Kept(hidden=store(random(), bits)),
                Kept(),
            ),
        )
        for sigma in (1.0, 0.51234567891)
    )
    return Template(name, (2, tokens // 2), entries)


def same(one: Template, other: Template) -> bool:
    parts = [
        [
            part
            for entry in t.entries
            for block in entry.blocks
            for part in (block.key, block.value, block.hidden)
        ]
        for t in (one, other)
    ]
    return (one.id, one.grid, [e.sigma for e in one.entries]) == (
        other.id,
        other.grid,
        [e.sigma for e in other.entries],
    ) and all(
        (a is None and b is None)
        or (
            a is not None
            and b is not None
            and torch.equal(a.data, b.data)
            and (a.scale is None) == (b.scale is None)
            and (a.scale is None or (torch.equal(a.scale, b.scale) and torch.equal(a.low, b.low)))
        )
        for a, b in zip(*parts, strict=True)
    )


@pytest.mark.parametrize("bits", BITS)
def test_a_file_gives_back_the_template(tmp_path: Path, bits: int) -> None:
    made = template("t", bits)
    size = files.write(made, tmp_path / "f")
    assert size == (tmp_path / "f").stat().st_size >= made.size_bytes
    assert same(files.read(tmp_path / "f", "t"), made)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_no_changed_byte_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write(template("t", tokens=2), path)
    whole = path.read_bytes()
    for index in range(0, len(whole), 7):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 4]) + whole[index + 1 :])
        with pytest.raises(files.NotATemplate):
            files.read(path, "t")
    for length in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(files.NotATemplate):
            files.read(path, "t")
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(files.NotATemplate):
        files.read(path, "t")


def test_a_store_goes_from_memory_to_disk_to_nothing(tmp_path: Path) -> None:
    one = template("one")
    room = files.write(one, tmp_path / "x") * 3 + 100  # names are of different lengths
    tiers = TemplateStore(one.size_bytes * 2, tmp_path, disk_bytes=room)
    (tmp_path / "x").unlink()
    for name in ("one", "two", "three", "four"):
        tiers.put(template(name))
    assert [name in tiers for name in ("one", "two", "three", "four")] == [False, True, True, True]
    assert tiers.memory_bytes == one.size_bytes * 2
    assert tiers.find("one") is None
    found = tiers.find("two")
    assert found is not None
    assert same(found, template("two"))
    assert tiers.find("four") is not None
    assert dict(tiers.counters) == {"miss": 1, "disk": 1, "memory": 1, "evicted_memory": 3, "evicted_disk": 1}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_restart_keeps_what_is_on_disk(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    found = TemplateStore(10**6, tmp_path, 10**6).find("one")
    assert found is not None
    assert same(found, template("one"))
    assert "one" not in TemplateStore(10**6, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_template_is_a_miss_and_removed(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    assert tiers.find("one") is None
    assert list(tmp_path.iterdir()) == []
    files.write(template("other"), path)
    assert TemplateStore(10**6, tmp_path, 10**6).find("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_into_memory_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6, pin=True)

    def no_memory(self: Template) -> Template:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Template, "pinned", no_memory)
    assert tiers.find("one") is None
    tiers.prefetch("one")
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(Template, "pinned", lambda self: self)
    assert tiers.find("one") is not None


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(template("one"), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_a_start_clears_what_was_half_written_and_nothing_else(tmp_path: Path) -> None:
    for name in (f"tmp123{files.PART}", "mine.part"):
        (tmp_path / name).write_bytes(b"x")
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.part", f"one{files.SUFFIX}"]


def test_a_removed_template_is_in_no_tier(tmp_path: Path) -> None:
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    tiers.put(template("one"))
    assert tiers.remove("one")
    assert not tiers.remove("one")
    assert tiers.find("one") is None
    assert list(tmp_path.iterdir()) == []


def test_pins_keep_a_template_in_memory() -> None:
    size = template("one").size_bytes
    tiers = TemplateStore(size)
    tiers.put(template("one"))
    with tiers.pinned("one"):
        tiers.put(template("two"))
        assert tiers.find("one") is not None
        assert tiers.find("two") is not None
    assert tiers.find("one") is None
    assert tiers.memory_bytes == size


def test_threads_share_a_store(tmp_path: Path) -> None:
    size = template("t0").size_bytes
    tiers = TemplateStore(3 * size, tmp_path, 10**6)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for turn in range(25):
            name = f"t{(seed * 7 + turn * 3) % 6}"
            number = int(name[1])
            if turn % 3 == 0:
                tiers.put(template(name, seed=number))
            elif turn % 11 == 10:
                tiers.remove(name)
            elif (found := tiers.find(name)) is not None and not same(found, template(name, seed=number)):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tiers.memory_bytes <= 3 * size


def test_many_threads_read_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    begun, go_on, read = threading.Event(), threading.Event(), files.read
    reads: list[str] = []

    def slow(path: Path, template_id: str, *, checked: bool = False) -> Template:
        reads.append(template_id)
        begun.set()
        assert go_on.wait(10)
        return read(path, template_id, checked=checked)

    monkeypatch.setattr(files, "read", slow)
    found: list[Template | None] = []
    threads = [threading.Thread(target=lambda: found.append(tiers.find("one"))) for _ in range(3)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert reads == ["one"]
    assert [one is found[0] for one in found] == [True] * 3
    counted = tiers.counted()
    assert (counted.hits_disk, counted.hits_memory, counted.misses) == (1, 2, 0)


def test_a_template_is_whole_for_whoever_has_it_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    """Rows that run hold mapped tensors: neither a removal nor another file of the same name may change them."""
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    held = tiers.find("one")
    assert held is not None
    tiers.put(template("one", seed=1))
    tiers.put(template("two"))
    assert same(held, template("one"))
    tiers.remove_all("one")
    assert list(tmp_path.glob("one*")) == []
    assert same(held, template("one"))
    assert tiers.find("one") is None
    assert tiers.find("two") is not None


def test_a_file_is_checked_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TemplateStore(0, tmp_path, 10**6)
    tiers.put(template("one"))
    checks: list[bool] = []
    read = files.read

    def watched(path: Path, template_id: str, *, checked: bool = False) -> Template:
        checks.append(checked)
        return read(path, template_id, checked=checked)

    monkeypatch.setattr(files, "read", watched)
    for _ in range(2):
        found = tiers.find("one")
        assert found is not None
        assert same(found, template("one"))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert tiers.find("one") is None
    assert checks == [False, True, False]
    assert list(tmp_path.iterdir()) == []


def test_what_was_prefetched_is_in_memory_for_its_edit(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    assert tiers.size_of("none") is None
    assert (tiers.size_of("one") or 0) > template("one").size_bytes  # its file
    for name in ("one", "one", "none"):
        tiers.prefetch(name)
    assert tiers.size_of("one") == template("one").size_bytes
    assert tiers.find("one") is not None
    counted = tiers.counted()
    assert (counted.prefetched, counted.hits_memory, counted.hits_disk, counted.misses) == (1, 1, 0, 0)
    assert counted.memory_bytes == template("one").size_bytes
    assert counted.disk_bytes == tiers.disk_bytes > 0
