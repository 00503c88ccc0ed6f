"""``giornata bench baseline``: the checkout's server of diffusers' pipeline, in this process's place."""

from __future__ import annotations

from giornata_tools.cli.handing_over import become, passes_flags


@passes_flags
def baseline(flags: tuple[str, ...]) -> None:
    """Serve diffusers' own pipeline with static batching, to compare with; --help lists the server's flags."""
    become(
        "giornata_tools.baseline",
        *flags,
        absent=", and the baseline is part of it. Clone the repository and run `giornata bench baseline` inside.",
    )
