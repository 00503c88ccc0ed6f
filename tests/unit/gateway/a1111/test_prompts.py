"""LoRAs and other syntax in a prompt of A1111."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.adapters import AskedLora
from giornata.wire.errors import InvalidField, LoraNotFound
from giornata.wire.loras import LoraRecord, LoraState
from giornata_gateway.intake.rules.a1111.prompts import Tag, named, split
from tests.fakes.fleet import CARD

NAMES = st.text(st.characters(exclude_characters="<>:", exclude_categories=("Cc", "Cs")), min_size=1)
WORDS = st.text(st.characters(exclude_characters="<>()[]:", exclude_categories=("Cc", "Cs")))


def record(letter: str, name: str | None, **changes: object) -> LoraRecord:
    fields = {"tenant": "alice", "created_s": 0, "state": LoraState.READY, "model": CARD.name}
    return LoraRecord.model_validate({"lora_id": f"lora_{letter * 32}", "name": name} | fields | changes)


@given(st.lists(st.tuples(WORDS, NAMES, st.floats(-4, 4).map(lambda scale: round(scale, 3)))), WORDS)
def test_tags_are_taken_out_and_read(tagged: list[tuple[str, str, float]], last: str) -> None:
    prompt = "".join(f"{words}<lora:{name}:{scale}>" for words, name, scale in tagged) + last
    words, tags = split(prompt, "prompt")
    assert tags == [Tag(name, scale) for _, name, scale in tagged]
    assert words.split() == [
        word for text in (*(words for words, _, _ in tagged), last) for word in text.split()
    ]
    assert tagged or words == prompt


def test_a_tag_without_weight_acts_as_trained() -> None:
    assert split("<lora:rims>a star", "prompt") == ("a star", [Tag("rims", 1.0)])


@pytest.mark.parametrize(
    "text",
    ["<lora:>", "<lora:a:b>", "<lora:a:nan>", "<lora:a:5>", "<lora:a:1:1>", "<lyco:a:1>", "<hypernet:a:1>",
     "(red:1.2)", "(a red: .5 )", "[red:blue:0.5]", "[red:10]"],
)  # fmt: skip
def test_other_syntax_is_refused_as_it_stands(text: str) -> None:
    with pytest.raises(InvalidField) as refused:
        split(f"a {text} star", "negative_prompt")
    assert (refused.value.field, refused.value.received) == ("negative_prompt", text)


@pytest.mark.parametrize(
    "text", ["a (red) star", "a star [a]", "at 10:30", "[a: b]", "a < b", "((masterpiece))"]
)
def test_words_stay_as_they_are(text: str) -> None:
    assert split(text, "prompt") == (text, [])


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
        assert named([Tag(name, 0.5)], records, CARD) == (AskedLora(id=f"lora_{letter * 32}", scale=0.5),)
    with pytest.raises(LoraNotFound) as missing:
        named([Tag("Rims", 1.0)], records, CARD)
    assert (missing.value.field, missing.value.received) == ("prompt", "Rims")
    assert missing.value.accepted == f"lora_{'e' * 32}, rims"
