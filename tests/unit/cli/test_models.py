"""What ``giornata models`` prints, from what the gateway tells."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType

from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.models import Task
from giornata_gateway.views.catalog import model_list
from giornata_tools.cli.models import model_table, models_table
from tests.fakes.fleet import CARD

PAINTER = CARD.model_copy(
    update={
        "name": "painter",
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 3.5,
        "generation_steps": 9,
        "samplers": ("euler", "heun"),
    }
)
TOLD: list[dict[str, Any]] = model_list({"tiny": CARD, "painter": PAINTER}, {}).model_dump(mode="json")[
    "data"
]


def rendered(table: RenderableType) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return [line.split() for line in capture.get().splitlines() if line]


def test_every_model_has_a_line() -> None:
    lines = rendered(models_table(TOLD))
    assert [line[:4] for line in lines[1:]] == [
        ["painter", "flux-fill", "edit,", "generate"],
        ["tiny", "flux-fill", "edit", "embedded"],
    ]
    assert rendered(models_table([])) == [["No", "model", "is", "served."]]


def test_a_models_options_have_their_defaults_by_task() -> None:
    lines = rendered(model_table(TOLD[0]))
    options = {line[0]: line[1:] for line in lines[3:-1]}
    assert lines[2] == ["option", "edit", "generate"]
    assert options["--num-inference-steps"] == ["4", "9"]
    assert options["--guidance-scale"] == ["30.0", "3.5"]
    assert options["--strength"] == ["1.0", "-"]
    assert options["--n"] == ["1", "1"]
    assert options["--prompt"] == ["required", "required"]
    assert "Undefined" not in str(lines)
    assert options["IN"] == ["-"]
    assert "--true-cfg-scale" not in options
    assert lines[-1] == ["samplers:", "euler,", "heun"]


def test_adapters_are_named_as_their_options_and_controlnets_by_name() -> None:
    nets = [
        ControlCard(name=name, digest="d", kind=ControlKind.FLUX, text_channels=8, modes=modes)
        for name, modes in (("outline", 0), ("union", 3))
    ]
    (told,) = model_list({"tiny": CARD}, {"tiny": nets}).model_dump(mode="json")["data"]
    lines = rendered(model_table(told))
    options = {line[0]: line[1:] for line in lines[3:-2]}
    assert options["--lora"] == options["--controlnet"] == []
    assert options["--lora-wait"] == ["exact"]
    assert " ".join(lines[-1]) == "ControlNets: outline, union (mode 0 to 2)"
