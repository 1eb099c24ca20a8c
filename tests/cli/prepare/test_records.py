"""Records survive a kill at any moment, whoever wrote them, and no damage goes unnoticed."""

from __future__ import annotations

import os
import signal

import pytest
from forked import receive, start_process

from lit_grpo.cli.prepare.records import RecordFiles
from lit_grpo.types import UserError

RECORDS = [{"k": "a", "v": 0, "s": 7}, {"k": "ü\ud800", "s": None}, {"answers": ["x\n", '"}']}]


def write(directory, records=RECORDS):
    files = RecordFiles(directory)
    for record in records:
        files.append(record)
    files.close()
    return files._path


def read(directory):
    return list(RecordFiles(directory).read_new())


def test_records_are_read_as_they_were_written(tmp_path):
    write(tmp_path / "cache")
    assert read(tmp_path / "cache") == RECORDS
    assert read(tmp_path / "none") == []


def test_a_last_line_that_is_cut_off_anywhere_is_not_read(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert read(tmp_path) == RECORDS[:2]


def test_only_what_is_new_is_read_again_and_a_line_once_it_is_whole(tmp_path):
    files = RecordFiles(tmp_path)
    path = write(tmp_path, RECORDS[:1])
    assert list(files.read_new()) == RECORDS[:1]
    files.append(RECORDS[1])
    line = write(tmp_path / "other").read_bytes().splitlines(keepends=True)[2]
    with path.open("ab") as file:
        file.write(line[:9])
        file.flush()
        assert list(files.read_new()) == RECORDS[1:2]
        file.write(line[9:])
    assert list(files.read_new()) == RECORDS[2:]
    assert list(files.read_new()) == []
    files.close()


@pytest.mark.parametrize("change", [(b'"s":7', b'"s":8'), (b'"x":"', b'"y":"'), (b"}\n", b"\n")])
def test_a_damaged_line_is_named(change, tmp_path):
    path = write(tmp_path, [{"k": "b"}, *RECORDS])
    head, line, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([head, line.replace(*change), *rest]))
    with pytest.raises(UserError) as raised:
        read(tmp_path)
    assert str(raised.value) == (
        f"{path}, line 2: the line must end with its checksum, got another (it was damaged after "
        "it was written). Remove the line; what it had is asked again."
    )
    path.write_bytes(b"".join([head, *rest]))
    assert read(tmp_path) == [{"k": "b"}, *RECORDS[1:]]


def test_a_full_disk_is_said_and_what_was_written_before_stays(tmp_path, monkeypatch):
    files = RecordFiles(tmp_path)
    files.append(RECORDS[0])
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: real(descriptor, line[:5]))
    with pytest.raises(UserError, match=r"cannot be written: the disk is full; .* is kept\. Free"):
        files.append(RECORDS[1])
    monkeypatch.undo()
    files.close()
    assert read(tmp_path) == RECORDS[:1]


def test_a_process_that_is_killed_loses_nothing_that_it_has_recorded(tmp_path):
    def append_and_tell(sender):
        files = RecordFiles(tmp_path)
        for number in range(10**6):
            files.append({"n": number})
            sender.send(number)

    for num_records in (1, 10, 200):
        process, told = start_process(append_and_tell)
        for _ in range(num_records):
            last = receive(told)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while told.poll():
            try:
                last = told.recv()
            except EOFError:
                break
        (path,) = tmp_path.glob("*.jsonl")
        numbers = [record["n"] for record in read(tmp_path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > last >= num_records - 1
        path.unlink()
