"""The ControlNets of this service: cards of all that are configured, weights of some."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import structlog
import torch

from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control.layout import parse_checkpoints
from giornata.control.networks import ControlNet, import_control_kind, load
from giornata.model_cards import read_control_card
from giornata.residency.tiers import LoadedTier, TierLookup
from giornata.wire.adapters import ControlCard
from giornata.wire.errors import ControlNetUnavailable, Failed

log = structlog.get_logger(__name__)


class ConfiguredControlNet(NamedTuple):
    """A ControlNet whose card has been read."""

    card: ControlCard
    folder: Path


def read_cards(configured: str) -> tuple[ConfiguredControlNet, ...]:
    """The ControlNets of a configuration, without their weights; hub ids are downloaded first.

    Raises:
        Failed: names every checkpoint that cannot be served, and why.
    """
    found, mistakes = [], []
    for name, checkpoint in parse_checkpoints(configured).items():
        try:
            folder = checkpoint_folder(checkpoint, CONTROL_FILES)
            found.append(ConfiguredControlNet(read_control_card(folder, name), folder))
            import_control_kind(found[-1].card.kind)  # no row waits for it
        except (ValueError, OSError) as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise Failed(f"ControlNets cannot be served: {'; '.join(mistakes)}")
    return tuple(found)


class ResidentControlNets:
    """ControlNets by digest on one device, loaded when a row asks for them; a context.

    Those that rows have pinned in `tier` stay; the others are let go of beyond `budget_bytes`, least recently used
    first. Used on the event loop alone, but for what the threads of loads do.
    """

    def __init__(
        self,
        configured: tuple[ConfiguredControlNet, ...],
        device: torch.device,
        dtype: torch.dtype,
        *,
        budget_bytes: int,
        loads: int,
    ) -> None:
        self.cards = tuple(each.card for each in configured)
        self.device, self.dtype = device, dtype
        self.hits, self.misses = 0, 0
        """Rows whose ControlNets were all here when they were opened, and those that waited for one."""
        self._folders: Mapping[str, ConfiguredControlNet] = {each.card.digest: each for each in configured}
        self.tier: LoadedTier[ControlNet] = LoadedTier(budget_bytes, _size_of)
        self._loading: dict[str, asyncio.Future[TierLookup[ControlNet]]] = {}
        self._threads = ThreadPoolExecutor(loads, thread_name_prefix="controlnet-load")
        for card in self.cards:
            if card.weight_bytes > budget_bytes:
                log.warning("controlnet_exceeds_budget", name=card.name, budget_bytes=budget_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait for loads that have begun; those that have not are cancelled."""
        self._threads.shutdown(cancel_futures=True)

    def has(self, digest: str) -> bool:
        """Return whether it is configured."""
        return digest in self._folders

    def count(self, digests: set[str]) -> None:
        """A row that is to be opened uses these."""
        here = digests <= set(self.tier)
        self.hits, self.misses = self.hits + here, self.misses + (not here)

    async def loaded(self, digest: str) -> ControlNet:
        """The ControlNet of this digest, which is configured; one load serves all that wait, and outlives them.

        Raises:
            ControlNetUnavailable: it cannot be loaded, or there is no memory for it.
        """
        if (found := self.tier.get(digest)) is not None:
            return found
        loading = self._loading.get(digest)
        if loading is None:
            work = functools.partial(self.tier.load, digest, lambda: self._read(digest))
            begun = asyncio.get_running_loop().run_in_executor(self._threads, work)
            loading = self._loading[digest] = begun
            begun.add_done_callback(functools.partial(self._ended, digest))
        found = (await asyncio.shield(loading)).value
        if found is None:
            raise RuntimeError(f"the ControlNet {digest} was not read")
        return found

    def _ended(self, digest: str, loading: asyncio.Future[TierLookup[ControlNet]]) -> None:
        del self._loading[digest]
        if not loading.cancelled() and (error := loading.exception()) is not None:
            log.error("controlnet_not_loaded", digest=digest[:12], error=str(error))

    def _read(self, digest: str) -> ControlNet:
        card, folder = self._folders[digest]
        log.info("controlnet_loading", name=card.name, digest=digest[:12])
        try:
            net = load(folder, self.dtype, self.device, card.name)
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            raise ControlNetUnavailable(f"The ControlNet {card.name} cannot be loaded: {error}") from error
        if net.card.digest != digest:
            raise ControlNetUnavailable(
                f"The files of the ControlNet {card.name} have changed since the start."
            )
        return net


def _size_of(net: ControlNet) -> int:
    return sum(parameter.nbytes for parameter in net.net.parameters())
