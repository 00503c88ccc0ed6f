"""``giornata up``: the launcher of the checkout, in this process's place."""

from __future__ import annotations

from giornata_tools.cli.handing_over import become, passes_flags


@passes_flags
def up(flags: tuple[str, ...]) -> None:
    """Run the whole system on this machine until Ctrl-C, as `make up` does; --help lists the launcher's flags."""
    become(
        "giornata_tools.launcher",
        "up",
        *flags,
        absent=". Clone the repository and run `giornata up` inside, or start the containers with "
        "`docker compose -f deploy/compose.yaml up`.",
    )
