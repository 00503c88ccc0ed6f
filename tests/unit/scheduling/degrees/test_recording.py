"""Decisions are recorded, read back, and made again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.recording import DecisionRecord, RecordedRule, as_json, from_json
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from tests.unit.scheduling.degrees.pools import Moment, VirtualPool, at_once, moments, row

SWITCHES = st.builds(
    ReplanningOptions,
    waits=st.booleans(),
    shares=st.booleans(),
    ages_s=st.sampled_from((30.0, math.inf)),
    cap_s=st.sampled_from((0.25, math.inf)),
)


@given(moments(), SWITCHES)
def test_recorded_decisions_replay_equally_after_a_round_trip(
    moment: Moment, switches: ReplanningOptions
) -> None:
    recordings: list[DecisionRecord] = []
    rule = RecordedRule(recordings.append, moment.devices, switches, together=at_once)
    decision = rule.decide(moment.now_s, moment.rows, moment.free)
    plain = ReplanningRule(moment.devices, switches, together=at_once)
    assert decision == plain.decide(moment.now_s, moment.rows, moment.free)
    (recording,) = recordings
    line = as_json(recording)
    assert b"\n" not in line
    assert from_json(line) == recording
    assert from_json(line).replayed() == recording.decision


def test_a_whole_run_replays() -> None:
    lines: list[bytes] = []
    rule = RecordedRule(lambda recording: lines.append(as_json(recording)), 4, together=at_once)
    VirtualPool(rule, 4).run([row(f"r{i}", 3 + 0.3 * i, 4, arrived_s=0.2 * i) for i in range(12)])
    recordings = [from_json(line) for line in lines]
    assert len(recordings) > 12
    assert all(recording.replayed() == recording.decision for recording in recordings)


def test_keys_of_any_kind_are_recorded_as_places() -> None:
    recordings: list[DecisionRecord] = []
    key = RowKey("job", 1, 0)
    decision = RecordedRule(recordings.append, 1).decide(0.0, [row("x", left=0), row(key, 9.0)], {0})  # type: ignore[arg-type]
    assert decision.begins[0].rows == (key,)
    assert recordings[0].decision.begins[0].rows == (1,)


def test_a_decision_of_other_switches_does_not_replay() -> None:
    recordings: list[DecisionRecord] = []
    RecordedRule(recordings.append, 8).decide(0.0, [row("a", 50.0, 3)], set(range(8)))
    narrow = as_json(recordings[0]).replace(b'"widens":true', b'"widens":false')
    assert from_json(narrow).replayed() != recordings[0].decision


def test_a_line_that_is_no_recording_is_refused() -> None:
    with pytest.raises(ValidationError, match="devices"):
        from_json(b"{}")
