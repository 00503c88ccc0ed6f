"""Clusters described by hand: a JSON or TOML file of groups of alike workers. Pure; texts in, machines out.

Example::

    [[workers]]
    count = 6
    machine = "h800-flux"
    rows = 4

    [[workers]]
    count = 2
    profile = "slow.json"        # of `giornata profile`, relative to this file
    slowness = 1.3
    memory_gb = 64
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from giornata.planning.costs import COMPUTE, LOAD, StepCosts
from giornata.planning.profile import Profile
from giornata_tools.simulation.machines import Machine, Storage, h800_flux

PUBLISHED: Final[dict[str, Callable[[], Machine]]] = {"h800-flux": h800_flux}
MOST: Final = 1000
"""Most workers of a cluster."""


class Costs(BaseModel):
    """Step costs by hand: milliseconds a unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compute: tuple[float, ...] = Field(min_length=len(COMPUTE), max_length=len(COMPUTE))
    """In the order of :data:`giornata.planning.costs.COMPUTE`; all but the first are costs of one block."""
    load: tuple[float, ...] = Field((0.0,) * len(LOAD), min_length=len(LOAD), max_length=len(LOAD))
    blocks: int = Field(1, ge=1)


class Group(BaseModel):
    """Alike workers; `machine`, `profile` or `costs` says what their steps cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(1, ge=1, le=MOST)
    machine: str | None = None
    profile: str | None = None
    costs: Costs | None = None
    device: str | None = None
    rows: int = Field(8, ge=1)
    tokens: int = Field(1 << 40, ge=1)
    step_limit_ms: float = Field(math.inf, gt=0)
    slowness: float = Field(1.0, gt=0)
    noise: float = Field(0.0, ge=0)
    busy: tuple[tuple[float, float], ...] = ()
    memory_gb: float = Field(math.inf, ge=0)
    disk_gb: float = Field(0.0, ge=0)
    disk_gb_per_s: float = Field(2.0, gt=0)
    link_gb_per_s: float | None = Field(None, gt=0)
    """From memory to the device; None: as the profile says, and neglected where there is none."""

    @model_validator(mode="after")
    def _one_source(self) -> Group:
        given = [name for name in ("machine", "profile", "costs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"one of machine, profile and costs is needed; received {', '.join(given) or 'none'}"
            )
        if self.machine is not None and self.machine not in PUBLISHED:
            raise ValueError(f"no machine is called {self.machine}; there are {', '.join(PUBLISHED)}")
        return self

    def of(self, read: Callable[[str], str]) -> Machine:
        """One worker; `read` gives the text of a profile's file."""
        alike = self.model_dump(include={"rows", "tokens", "step_limit_ms", "slowness", "noise", "busy"})
        storage = Storage(self.memory_gb * 1e9, self.disk_gb * 1e9, self.disk_gb_per_s * 1e9)
        made = replace(self._source(read), **alike, storage=storage)
        if self.device is not None:
            made = replace(made, device=self.device)
        if self.link_gb_per_s is not None:
            made = replace(made, costs=StepCosts(made.costs.compute, (0.0, 1e-6 / self.link_gb_per_s)))
        return made

    def _source(self, read: Callable[[str], str]) -> Machine:
        if self.profile is not None:
            return Machine.of(Profile.model_validate_json(read(self.profile)))
        if self.costs is not None:
            return Machine(StepCosts(self.costs.compute, self.costs.load), self.costs.blocks)
        return PUBLISHED[self.machine or ""]()


class _Cluster(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: tuple[Group, ...] = Field(min_length=1)


def read(text: str, suffix: str, profile: Callable[[str], str]) -> list[Machine]:
    """The workers of a file.

    Args:
        text: of the file.
        suffix: of its name: `.toml` or `.json`.
        profile: gives the text of a profile that the file names.

    Raises:
        ValueError: says what is wrong where.
    """
    try:
        groups = _Cluster.model_validate(
            tomllib.loads(text) if suffix == ".toml" else json.loads(text)
        ).workers
    except ValidationError as error:
        told = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in told["loc"])
        raise ValueError(f"{where or 'the file'}: {told['msg']}") from error
    machines = [machine for group in groups for machine in [group.of(profile)] * group.count]
    if len(machines) > MOST:
        raise ValueError(f"received {len(machines)} workers; at most {MOST} are simulated")
    return machines
