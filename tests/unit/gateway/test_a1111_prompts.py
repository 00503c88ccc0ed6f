"""LoRAs and other syntax in a prompt of A1111."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.adapters import AskedLora
from giornata.wire.errors import InvalidField, LoraNotFound
from giornata.wire.loras import LoraRecord, LoraState
from giornata_gateway.rules.a1111_forms import Emphasis, LoraTag, named, split
from tests.fakes.fleet import CARD

NAMES = st.text(st.characters(exclude_characters="<>:", exclude_categories=("Cc", "Cs")), min_size=1)
WORDS = st.text(st.characters(exclude_characters="<>()[]:\\", exclude_categories=("Cc", "Cs"))).filter(
    lambda text: not re.search("AND|BREAK", text)
)


def record(letter: str, name: str | None, **changes: object) -> LoraRecord:
    fields = {"tenant": "alice", "created_s": 0, "state": LoraState.READY, "model": CARD.name}
    return LoraRecord.model_validate({"lora_id": f"lora_{letter * 32}", "name": name} | fields | changes)


@given(st.lists(st.tuples(WORDS, NAMES, st.floats(-4, 4).map(lambda scale: round(scale, 3)))), WORDS)
def test_tags_are_taken_out_and_read(tagged: list[tuple[str, str, float]], last: str) -> None:
    prompt = "".join(f"{words}<lora:{name}:{scale}>" for words, name, scale in tagged) + last
    words, tags = split(prompt, "prompt")
    assert tags == [LoraTag(name, scale) for _, name, scale in tagged]
    assert words.split() == [
        word for text in (*(words for words, _, _ in tagged), last) for word in text.split()
    ]
    assert tagged or words == prompt


def test_a_tag_without_weight_acts_as_trained() -> None:
    assert split("<lora:rims>a star", "prompt") == ("a star", [LoraTag("rims", 1.0)])


@pytest.mark.parametrize(
    "text",
    ["<lora:>", "<lora:a:b>", "<lora:a:nan>", "<lora:a:5>", "<lora:a:1:1>", "<lyco:a:1>", "<hypernet:a:1>",
     "(red)", "(red:1.2)", "(red:+1.2)", "(red:1.2.3)", "(a red: .5 )", "[red]", "[red:blue:0.5]", "[red:10]",
     "[red::3]", "[red|blue]", "[(a red:1) | (blue)]", "AND", "BREAK"],
)  # fmt: skip
@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_other_syntax_is_refused_as_it_stands(text: str, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        split(f"a {text} star", field)
    received = "(blue)" if "(blue)" in text else text
    assert (refused.value.field, refused.value.received) == (field, received)
    assert refused.value.accepted


@pytest.mark.parametrize(
    ("prompt", "received"),
    [
        ("(a (red) circle:1.4)", "(red)"),
        ("(a red circle:1.4)", "(a red circle:1.4)"),
        ("a ((masterpiece))", "(masterpiece)"),
        ("[(a red:1.0)] circle", "[(a red:1.0)]"),
        ("a (red circle", "(red circle"),
        ("an [old (red:1) circle", "[old (red:1) circle"),
        ("a (red] circle) b)", "(red] circle)"),
        ("CATS AND DOGS", "AND"),
    ],
)
def test_nested_and_open_brackets_are_refused(prompt: str, received: str) -> None:
    with pytest.raises(InvalidField) as refused:
        split(prompt, "prompt")
    assert refused.value.received == received


@pytest.mark.parametrize(
    "text",
    [
        "at 10:30",
        "a < b",
        "a: b",
        "a | b",
        "a star :)",
        "red] or 2)",
        "a \\ b",
        "and break",
        "BRAND BREAKS",
        "",
    ],
)
def test_words_stay_as_they_are(text: str) -> None:
    assert split(text, "prompt") == (text, [])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (r"a \(red\) \[star\] \\", "a (red) [star] \\"),
        ("a (red: 1.0) star", "a red star"),
        ("an empty () and []", "an empty  and "),
    ],
)
def test_escapes_are_characters_and_weights_of_one_are_words(prompt: str, words: str) -> None:
    assert split(prompt, "prompt") == (words, [])


@given(st.text(st.characters(exclude_characters="<>")).filter(lambda text: not re.search("AND|BREAK", text)))
def test_whatever_is_escaped_is_read_as_it_is(text: str) -> None:
    assert split(re.sub(r"([()\[\]\\])", r"\\\1", text), "prompt") == (text, [])


def test_the_setting_emphasis_takes_weights_away_or_reads_brackets_as_characters() -> None:
    prompt = r"(a (red:1.3) [old] \(x\) circle:1.4), best"
    assert split(prompt, "prompt", Emphasis.IGNORE) == ("a red old (x) circle, best", [])
    assert split(prompt, "prompt", Emphasis.NONE) == (prompt, [])
    with pytest.raises(InvalidField):
        split(prompt, "prompt", Emphasis.NO_NORM)
    for emphasis in Emphasis:
        for text in ("[a:b:3]", "[a|b]", "a AND b"):
            with pytest.raises(InvalidField):
                split(text, "prompt", emphasis)


def test_a_lora_is_named_by_name_file_or_id_and_the_newest_is_meant() -> None:
    records = [
        record("c", "rims", state=LoraState.FAILED),
        record("b", "rims.safetensors"),
        record("a", "rims"),
        record("d", "rims", model="another"),
        record("e", None),
    ]
    for name, letter in (
        ("rims", "b"),
        ("rims.safetensors", "b"),
        (f"lora_{'a' * 32}", "a"),
        (f"lora_{'e' * 32}", "e"),
    ):
        assert named([LoraTag(name, 0.5)], records, CARD) == (AskedLora(id=f"lora_{letter * 32}", scale=0.5),)
    with pytest.raises(LoraNotFound) as missing:
        named([LoraTag("Rims", 1.0)], records, CARD)
    assert (missing.value.field, missing.value.received) == ("prompt", "Rims")
    assert missing.value.accepted == f"lora_{'e' * 32}, rims"
