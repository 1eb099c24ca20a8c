"""The events of a run in a file, with whatever a kill has left of the last line."""

from __future__ import annotations

from datetime import datetime

from lit_grpo.runs.files.event_log import Event, append_event, now, read_events

START = Event(time="2026-11-23T16:05:01+01:00", step=0, kind="start", directory="/home/me")
ALERT = Event(time="2026-11-23T16:06:01+01:00", step=3, kind="alert", message="Zürich", cause="x")


def test_a_run_without_events_has_none(tmp_path):
    assert read_events(tmp_path) == []


def test_events_are_read_as_they_were_written(tmp_path):
    for event in (START, ALERT):
        append_event(tmp_path / "runs" / "0", event)
    assert read_events(tmp_path / "runs" / "0") == [START, ALERT]
    assert "Zürich" in (tmp_path / "runs/0/events.jsonl").read_text(encoding="utf-8")


def test_a_line_that_is_no_event_is_left_out(tmp_path):
    append_event(tmp_path, START)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('[]\nnothing\n{"step": 1}\n')
    append_event(tmp_path, ALERT)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-11-23T16:07:01", "step": 4, "kind": "al')
    assert read_events(tmp_path) == [START, ALERT]


def test_a_field_of_a_later_version_is_ignored(tmp_path):
    line = '{"time": "2026-11-23T16:05:01", "step": 0, "kind": "start", "later": 1}\n'
    (tmp_path / "events.jsonl").write_text(line)
    assert read_events(tmp_path) == [Event(time="2026-11-23T16:05:01", step=0, kind="start")]


def test_a_file_in_another_encoding_has_no_events(tmp_path):
    (tmp_path / "events.jsonl").write_bytes("Zürich\n".encode("latin-1"))
    assert read_events(tmp_path) == []


def test_a_time_has_its_time_zone():
    assert datetime.fromisoformat(now()).tzinfo is not None
    assert "." in now("milliseconds")
