"""Named policies of retrying: what they try again, when they stop, and what they raise then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tenacity import AsyncRetrying, stop_after_attempt

from giornata import retries


class Refused(Exception):
    """What the policies under test try again."""


POLICIES: dict[str, Callable[[float], AsyncRetrying]] = {
    "soon": lambda limit_s: retries.soon(Refused, limit_s),
    "patiently": lambda limit_s: retries.patiently(Refused, limit_s),
    "until_led": lambda limit_s: retries.until_led(lambda error: isinstance(error, Refused), limit_s),
    "polling": lambda limit_s: retries.polling(Refused, limit_s),
}


class Server:
    """Fails so often, then answers."""

    def __init__(self, failures: int, error: type[Exception] = Refused) -> None:
        self.failures, self.error, self.asked = failures, error, 0

    async def answer(self, question: str) -> str:
        self.asked += 1
        if self.asked <= self.failures:
            raise self.error(question)
        return f"{question}!"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
async def test_a_policy_tries_its_errors_again_and_no_others(
    policy: Callable[[float], AsyncRetrying],
) -> None:
    server = Server(2)
    assert await policy(30)(server.answer, "hello") == "hello!"
    assert server.asked == 3
    other = Server(1, KeyError)
    with pytest.raises(KeyError):
        await policy(30)(other.answer, "hello")
    assert other.asked == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
async def test_a_policy_whose_time_is_over_raises_the_last_error(
    policy: Callable[[float], AsyncRetrying],
) -> None:
    server = Server(10_000)
    with pytest.raises(Refused, match="hello"):
        await policy(0)(server.answer, "hello")


async def test_a_stage_stops_where_its_caller_says() -> None:
    server = Server(10_000)
    with pytest.raises(Refused):
        await retries.elsewhere(lambda _error: True, stop_after_attempt(2))(server.answer, "hello")
    assert server.asked == 2


async def test_a_decorated_method_is_tried_again() -> None:
    server = Server(1)

    @retries.patiently(Refused).wraps
    async def ask(question: str) -> str:
        return await server.answer(question)

    assert await ask("hello") == "hello!"
