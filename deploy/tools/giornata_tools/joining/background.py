"""LoRAs of a running stack, profiled in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from giornata.wire.errors import GiornataError
from giornata.wire.loras import LoraRecord
from giornata.wire.permissions import NatsRole
from giornata_tools.joining.profiler import Done, LoraProfile, ProbeSetting
from giornata_tools.joining.session import ProfilerLogin, connected
from giornata_tools.launcher.stack import Stack


async def profiling(stack: Stack, say: Callable[[str], None]) -> None:
    """Profile the LoRAs of `stack` until cancelled, one edit at a time, and say how late each may join.

    Where that cannot go on, it says so and waits: the stack stays.
    """

    def begin(_: LoraRecord) -> Done:
        return lambda _edits, _tried: None

    def ended(record: LoraRecord, outcome: LoraProfile | GiornataError) -> None:
        name = record.name or record.lora_id
        if isinstance(outcome, GiornataError):
            say(f"The LoRA {name} could not be profiled: {outcome}")
        else:
            say(f"The LoRA {name} may join after {outcome.joins_within:.0%} of the steps.")

    login = ProfilerLogin(stack.nats_url, stack.nats_password_file(NatsRole.PROFILER), stack.blobs_url)
    try:
        async with connected(login, ProbeSetting(in_flight=1)) as session:
            await session.watch(begin, ended)
    except Exception as error:  # noqa: BLE001 - the task's edge: said, and the stack goes on
        say(f"LoRAs are profiled no more: {error}")
    await asyncio.Event().wait()
