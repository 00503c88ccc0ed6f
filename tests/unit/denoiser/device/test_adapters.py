"""LoRAs and ControlNets on a device that is not there: no race of streams, and no step that waits."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from giornata.control.flux import FluxControl
from giornata.packed.low_rank import low_rank
from giornata.packed.moving import moved
from giornata.scheduling.batch import Capacity
from giornata.wire.adapters import ControlKind
from giornata_denoiser.adapters.store import LoraTiers
from giornata_denoiser.controls import local
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.rows.adapters import Adapters, RowControl
from tests.fakes import tiny_flux, tiny_flux_control
from tests.fakes.cuda import CUDA, pretended
from tests.fakes.local_controls import controls_of
from tests.fakes.tiny_flux import Spec
from tests.patience import HUNG_S
from tests.unit.denoiser.adapters.test_store import ROOMY, Remote, factors
from tests.unit.denoiser.device.test_step_budgets import GRID, family


def test_a_set_that_is_let_go_while_a_step_reads_it_stays_until_the_step_has_ended(tmp_path: Path) -> None:
    remote = Remote()
    both = remote.add(factors(1)), remote.add(factors(2), scale=0.5)
    with pretended(triton=False) as world:
        layers = {"layer": nn.Module.to(nn.Linear(6, 4), CUDA, torch.bfloat16)}
        tiers: Any = LoraTiers(remote.fetch, low_rank, layers, tmp_path, ROOMY)
        with tiers, tiers.held(both) as coming:
            found = coming.result(HUNG_S).factors("layer")
            read = found.up @ found.down
        del found, coming, tiers
        gc.collect()
        assert world.races == []
        del read


def test_an_edit_with_a_controlnet_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "work_of", lambda card: None)
    digest = "d" * 64
    card: Any = SimpleNamespace(name="n", modes=0, digest=digest, kind=ControlKind.FLUX, sees=None)
    with pretended(triton=False) as world:
        of = family("flux")
        net: Any = nn.Module.to(tiny_flux_control.net(), CUDA, torch.bfloat16)
        engine = Engine(
            of,
            Capacity(8, 10_000),
            lambda: 0.0,
            reusing=ReuseOptions(device=device_for(CUDA, 1 << 30)),
            controls=controls_of({digest: FluxControl(net, card)}, of.network, 16, 1),
        )
        row = tiny_flux.row(of, Spec("a", grid=GRID, steps=4))
        image = torch.randn(GRID[0] * GRID[1], tiny_flux.LATENT, dtype=torch.bfloat16)
        acting = Adapters(controls=(RowControl("n", digest, 1.0, 0, 4),))
        engine.batch.submit([replace(row, adapters=acting, control_images=(image,))])
        world.clear()
        while (report := engine.step()) is not None:
            assert not report.failed, report.failed[0].error.__cause__
        assert Counter(world.synchronisations) == {}
        assert world.races == []


def test_what_leaves_pageable_memory_waits_and_what_is_moved_does_not() -> None:
    with pretended(triton=False) as world:
        torch.zeros(3).to(CUDA)
        assert [told.what for told in world.synchronisations] == ["copy to the device"]
        world.clear()
        moved(torch.zeros(3), CUDA)
        assert world.synchronisations == []


def test_what_is_computed_beyond_the_memory_of_the_device_is_refused() -> None:
    with pretended(triton=False, limit_bytes=4096) as world:
        kept = torch.zeros(512, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1024, device=CUDA)
        assert (world.live_bytes, world.peak_bytes) == (2048, 2048)
        del kept


def test_a_read_before_the_copy_was_waited_for_is_found() -> None:
    with pretended(triton=False) as world:
        beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's is not typed
        with torch.cuda.stream(beside):
            copy = moved(torch.zeros(3), CUDA)
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            arrived.record()
        torch.cuda.current_stream().wait_event(arrived)
        copy.record_stream(torch.cuda.current_stream())
        copy + 1
        assert world.races == []
        with torch.cuda.stream(beside):
            late = moved(torch.zeros(3), CUDA)
        late + 1
        del late
        found = Counter(told.what for told in world.races)
        assert found == {"used before it was written": 1, "freed while another stream may use it": 1}
