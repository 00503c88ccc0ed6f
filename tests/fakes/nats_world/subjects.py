"""Which subjects a pattern of NATS covers."""

from __future__ import annotations


def covers(pattern: str, subject: str) -> bool:
    """Whether `pattern`, with ``*`` for one token and ``>`` for all that follow, covers `subject`."""
    if pattern == subject:
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    wanted, tokens = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(tokens) > index
        if index >= len(tokens) or part not in {"*", tokens[index]}:
            return False
    return len(wanted) == len(tokens)


def overlap(one: str, other: str) -> bool:
    """Whether a subject exists that both patterns cover."""
    first, second = one.split("."), other.split(".")
    for left, right in zip(first, second, strict=False):
        if ">" in {left, right}:
            return True
        if left != right and "*" not in {left, right}:
            return False
    return len(first) == len(second)
