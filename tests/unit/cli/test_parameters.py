"""Options of ``giornata edit``: every field of the request, its limits, its mistakes."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from giornata.wire.adapters import Annotator, AskedControl, AskedLora
from giornata.wire.requests import EditParameters
from giornata_tools.cli.options import option_name
from giornata_tools.cli.parameters import in_order, options, validated

LORA = f"lora_{'0' * 32}"
LORAS = st.builds(AskedLora, id=st.from_regex(r"lora_[0-9a-f]{32}", fullmatch=True), scale=st.floats(-4, 4))


def command(kind: type[BaseModel] = EditParameters) -> click.Command:
    """Prints the value of every option."""

    @click.command(params=options(kind))
    def show(**values: Any) -> None:
        click.echo(repr(values))

    return show


def test_every_field_is_an_option_with_its_default() -> None:
    made = {option.name: option for option in options(EditParameters)}
    assert made.keys() == EditParameters.model_fields.keys()
    for name, field in EditParameters.model_fields.items():
        option = made[name]
        assert isinstance(option, click.Option)
        assert option.required == field.is_required()
        if option.multiple:
            assert field.get_default() == ()
        elif not field.is_required():
            assert option.default == field.get_default()
        assert option.help, f"{name} has no description"
        assert option_name(name) in option.opts


CONTROLS = st.builds(
    AskedControl,
    model=st.sampled_from(["outline", "union-1.0"]),
    image=st.integers(0, 2),
    annotator=st.none() | st.sampled_from(Annotator),
    scale=st.floats(0, 4),
    start=st.floats(0, 0.5, exclude_max=True),
    end=st.floats(0.5, 1),
    mode=st.none() | st.integers(0, 63),
)


@settings(max_examples=30)
@given(
    st.builds(
        EditParameters,
        prompt=st.text("a b-c", min_size=1).filter(str.strip),
        n=st.integers(1, 10),
        strength=st.none() | st.floats(0.01, 1),
        mask_blur=st.floats(0, 256),
        grow_mask=st.integers(0, 512),
        seed=st.none() | st.integers(0, 2**32 - 1),
        negative_prompt=st.none(),
        mask_prompt=st.none() | st.just("the hat"),
        loras=st.lists(LORAS, max_size=4, unique_by=lambda lora: lora.id).map(tuple),
        controlnets=st.lists(CONTROLS, max_size=3).map(tuple),
    )
)
def test_what_is_typed_is_what_is_asked(parameters: EditParameters) -> None:
    typed = [
        f"{option_name(name)}={value}"
        for name, value in parameters.model_dump(mode="json", exclude={"loras", "controlnets"}).items()
        if value is not None and not isinstance(value, bool)
    ]
    typed += [option_name("auto_edit")] if parameters.auto_edit else []
    typed += [f"--lora={lora.id}:{lora.scale}" for lora in parameters.loras]
    typed += [f"--controlnet={_typed(control)}" for control in parameters.controlnets]
    with command().make_context("edit", typed) as context:
        assert (
            validated(EditParameters, {k: v for k, v in context.params.items() if v is not None})
            == parameters
        )


def _typed(control: AskedControl) -> str:
    told = control.model_dump(mode="json", exclude={"model"}, exclude_none=True)
    return ",".join([control.model, *(f"{key}={value}" for key, value in told.items())])


def test_controlnets_that_say_not_what_they_see_see_the_images_in_their_order() -> None:
    given: list[dict[str, object]] = [
        {"model": "a"},
        {"model": "b", "annotator": "tile"},
        {"model": "c", "image": 0},
        {"model": "d"},
    ]
    assert [one.get("image") for one in in_order(given, 2)] == [0, None, 0, 1]
    assert [one.get("image") for one in in_order(given, 1)] == [0, None, 0, None]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strength", "0"], "'--strength'"),
        (["--n", "11"], "'--n'"),
        (["--num-inference-steps", "many"], "'--num-inference-steps'"),
        (["--mask-mode", "red"], "'--mask-mode'"),
        (["--steps", "4"], "No such option"),
        (["--lora", f"{LORA}:strong"], "ID:SCALE"),
        (["--controlnet", "outline,strength=1"], "scale=…"),
        (["--controlnet", "outline,scale=1,scale=2"], "each once"),
        (["--controlnet", "outline,image=first"], "'first' is no number"),
    ],
)
def test_a_mistake_is_a_usage_error_that_names_the_option(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(command(), ["--prompt", "a hat", *arguments])
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"prompt": " "}, "--prompt: must not be blank."),
        ({"prompt": "a", "true_cfg_scale": 2.0}, "--negative-prompt: --true-cfg-scale above 1 needs it."),
        ({"prompt": "a", "output_compression": 90}, "--output-compression: applies to jpeg and webp only."),
        ({"prompt": "a", "size": "big", "seed": -1}, "; --seed: "),
        ({"prompt": "a", "controlnets": ({"model": "outline"},)}, "needs image or annotator"),
        ({"prompt": "a", "loras": ({"id": LORA},) * 2}, f"--lora: names {LORA} twice."),
    ],
)
def test_what_only_the_whole_shows_names_options_too(given_: dict[str, object], told: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        validated(EditParameters, given_)
    assert told in raised.value.message


class Switch(BaseModel):
    fast: bool = Field(default=False, description="Be fast.")
    ratio: float = Field(0.5, ge=0, lt=1, description="How much.")


class Odd(BaseModel):
    parts: list[int] = Field([], description="Parts.")


def test_a_boolean_has_two_names_and_limits_may_be_open() -> None:
    assert "True" in CliRunner().invoke(command(Switch), ["--fast"]).output
    assert "False" in CliRunner().invoke(command(Switch), ["--no-fast"]).output
    assert CliRunner().invoke(command(Switch), ["--ratio", "1"]).exit_code == 2
    assert CliRunner().invoke(command(Switch), ["--ratio", "0"]).exit_code == 0


def test_a_field_that_no_option_stands_for_is_noticed() -> None:
    with pytest.raises(TypeError, match="parts"):
        options(Odd)
