"""What tests rely on that have an account of a NATS server instead of a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

from tests.integration.nats_accounts import LeakedConnection, NatsAccounts


@contextmanager
def opened(folder: Path, count: int, **options: float) -> Iterator[NatsAccounts]:
    accounts = NatsAccounts(folder, count, **options)
    try:
        yield accounts
    finally:
        accounts.close()


async def test_accounts_share_neither_subjects_nor_streams(tmp_path: Path) -> None:
    with opened(tmp_path, 2) as accounts, accounts.lent() as one, accounts.lent() as other:
        async with await nats.connect(one) as first, await nats.connect(other) as second:
            for client in (first, second):
                stream = await client.jetstream().add_stream(name="jobs", subjects=["jobs"], max_msgs=1)
                assert stream.state.messages == 0
            heard = await second.subscribe("*")
            await second.flush()
            await first.jetstream().publish("jobs", b"mine")
            await second.jetstream().publish("jobs", b"yours")
            assert (await heard.next_msg()).data == b"yours"
            assert (await first.jetstream().get_msg("jobs", 1)).data == b"mine"


async def test_an_account_that_comes_back_is_empty(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as accounts:
        for _ in range(2):
            with accounts.lent() as url:
                async with await nats.connect(url) as client:
                    assert await client.jetstream().streams_info() == []
                    await client.jetstream().create_key_value(bucket="records")


async def test_a_connection_that_is_left_open_is_told_by_its_name_and_its_account_is_not_lent_again(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 1, wait_s=0.1) as accounts:
        with pytest.raises(LeakedConnection, match="a router"), accounts.lent() as url:
            client = await nats.connect(url, name="a router")
        with pytest.raises(IndexError), accounts.lent():
            pass
        await client.close()
