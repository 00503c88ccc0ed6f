"""The bench of a LoRA store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.lora_bench import Store, open_bench


@pytest.fixture
async def bench(nats_account: str, tmp_path: Path) -> AsyncIterator[Store]:
    """No store runs yet."""
    async with open_bench(nats_account, tmp_path) as opened:
        yield opened
