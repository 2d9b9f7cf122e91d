"""Run folders: nothing judged is lost, nothing half-written is read as whole."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.record import Record, Status
from harness.rundir import RunError, attach, latest, open_run, read_run

ROOT = Path(__file__).parents[1]
RECORD = Record(
    op="sdpa",
    subject="torch.sdpa.math",
    lane="cpu",
    tier="hardware",
    status=Status.AGREE,
    excess=0.25,
    where=(0, 1),
)


def test_round_trip(tmp_path: Path) -> None:
    writer = open_run(tmp_path, {"seed": 7})
    infinite = replace(RECORD, status=Status.ERROR, excess=float("inf"), why="two\nlines \u2028 é")
    writer.append(RECORD)
    writer.append(infinite)
    folder = writer.finish({"duration_s": 1.5})
    info, records = read_run(folder)
    assert records == [RECORD, infinite]
    assert (info["seed"], info["duration_s"], info["run"]) == (7, 1.5, folder.name)
    assert info["complete"]
    assert info["notes"] == []
    assert sorted(path.name for path in folder.iterdir()) == ["records.jsonl", "run.json"]


def test_a_run_is_partial_until_it_is_finished(tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    writer.append(RECORD)
    assert [path.name for path in tmp_path.iterdir()] == [f"{writer.name}.partial"]
    with pytest.raises(RunError, match="no finished run"):
        latest(tmp_path)
    info, records = read_run(writer.folder)
    assert (info["complete"], records) == (False, [RECORD])
    folder = writer.finish({})
    assert latest(tmp_path) == folder == tmp_path / writer.name


def test_workers_are_joined(tmp_path: Path) -> None:
    controller = open_run(tmp_path)
    for name in ("gw0", "gw1"):
        worker = attach(controller.folder, name)
        worker.append(replace(RECORD, subject=f"torch.{name}"))
        worker.close()
    controller.append(RECORD)
    assert len(read_run(controller.folder)[1]) == 3
    assert controller.join() == []
    assert len(read_run(controller.folder)[1]) == 3
    _, records = read_run(controller.finish({}))
    assert {r.subject for r in records} == {"torch.gw0", "torch.gw1", "torch.sdpa.math"}


def test_join_then_finish_keeps_every_record_once(tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    writer.append(RECORD)
    writer.join()
    assert read_run(writer.finish({}))[1] == [RECORD]


def test_half_written_last_line_is_reported_and_left_out(tmp_path: Path) -> None:
    controller = open_run(tmp_path)
    worker = attach(controller.folder, "gw0")
    worker.append(RECORD)
    worker.close()
    with (controller.folder / "records-gw0.jsonl").open("a") as torn:
        torn.write(RECORD.to_json()[:-1])
    info, records = read_run(controller.folder)
    assert records == [RECORD]
    assert "records-gw0.jsonl: its last line is half-written" in info["notes"][0]
    info, records = read_run(controller.finish({}))
    assert records == [RECORD]
    assert "half-written" in info["notes"][0]


def test_whole_but_unterminated_line_is_not_trusted(tmp_path: Path) -> None:
    """A number cut short is still a number: only the newline says that the line is whole."""
    writer = open_run(tmp_path)
    writer.close()
    (writer.folder / "records-main.jsonl").write_text(RECORD.to_json())
    assert read_run(writer.folder)[1] == []


CHILD = """
import sys
from pathlib import Path
from harness.record import Record, Status
from harness.rundir import open_run
writer = open_run(Path(sys.argv[1]), {"seed": 3})
print(writer.folder, flush=True)
number = 0
while True:
    writer.append(Record(op="sdpa", subject="torch.x", lane="cpu", tier="hardware",
                         status=Status.AGREE, elements=number, why="x" * 3000))
    number += 1
    if number % 100 == 0:
        print(number, flush=True)
"""


def test_kill_in_the_middle_keeps_what_was_judged(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout as said:
        folder = Path(said.readline().strip())
        promised = int(said.readline())
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    info, records = read_run(folder)
    assert (info["seed"], info["complete"]) == (3, False)
    assert len(records) >= promised
    assert [record.elements for record in records] == list(range(len(records)))
    with pytest.raises(RunError, match="an unfinished one is"):
        latest(tmp_path)


def test_two_runs_at_once_get_different_folders(tmp_path: Path) -> None:
    writers = [open_run(tmp_path) for _ in range(20)]
    assert len({writer.folder for writer in writers}) == 20
    for writer in writers:
        writer.append(RECORD)
    assert all(read_run(writer.finish({}))[1] == [RECORD] for writer in writers)


def test_latest_is_the_last_of_several(tmp_path: Path) -> None:
    first = open_run(tmp_path).finish({})
    first.rename(first.with_name("20200101T000000Z-ffffff"))
    second = open_run(tmp_path).finish({})
    assert latest(tmp_path) == second


def test_unwritable_root_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't be written.*name another with --runs"):
        open_run(tmp_path / "file" / "runs")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is no run: it has no run\.json"):
        read_run(tmp_path)


def test_corrupt_record_is_refused(tmp_path: Path) -> None:
    folder = open_run(tmp_path).finish({})
    (folder / "records.jsonl").write_text('{"format": 1, "op": "sdpa"}\n')
    with pytest.raises(RunError, match=r"records\.jsonl, line 1"):
        read_run(folder)


def test_newer_record_is_refused(tmp_path: Path) -> None:
    folder = open_run(tmp_path).finish({})
    data = json.loads(RECORD.to_json())
    (folder / "records.jsonl").write_text(json.dumps({**data, "format": 999}) + "\n")
    with pytest.raises(RunError, match=r"newer.*update kernel-parity$"):
        read_run(folder)


DEEP = '{"format": 1, "x": ' + "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"format": 999}', '{"format": "1"}', "{"),
        *('{"format": 1, "notes": 5}', '{"format": 1, "notes": [5]}'),
        pytest.param(DEEP, id="deep"),
    ],
)
def test_corrupt_or_newer_description_is_refused(tmp_path: Path, text: str) -> None:
    folder = open_run(tmp_path).finish({})
    (folder / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json"):
        read_run(folder)


def test_truncated_finished_run_is_refused(tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    writer.append(RECORD)
    folder = writer.finish({})
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(text[:-20])
    with pytest.raises(RunError, match="damaged"):
        read_run(folder)


def test_a_finished_run_that_lost_whole_lines_is_refused(tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    for _ in range(3):
        writer.append(RECORD)
    folder = writer.finish({})
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    for kept in (2, 0):
        (folder / "records.jsonl").write_text("".join(lines[:kept]))
        with pytest.raises(RunError, match=rf"has {kept} records and run\.json says 3"):
            read_run(folder)
    info = json.loads((folder / "run.json").read_text())
    del info["records"]  # as earlier versions wrote it
    (folder / "run.json").write_text(json.dumps(info))
    assert read_run(folder)[1] == []


def test_a_bad_byte_of_an_unfinished_run_costs_its_line_alone(tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    for _ in range(3):
        writer.append(RECORD)
    writer.close()
    part = writer.folder / "records-main.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(lines[0] + lines[1].replace(b"sdpa", b"sd\xffa") + lines[2])
    info, records = read_run(writer.folder)
    assert records == [RECORD] * 2
    (note,) = info["notes"]
    assert "records-main.jsonl, line 2: " in note
    assert "the line is left out" in note


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("op", 5), ("op", "spda"), ("subject", None), ("lane", "nolane"), ("lane", ["cpu"]),
        ("tier", "weird"), ("elements", "abc"), ("elements", True), ("exact", 1.5),
        ("status", "good"), ("excess", "much"), ("excess", None), ("where", "abc"),
        ("where", [1, "2"]), ("where", 5), ("why", 5), ("lost", "it"), ("program", "none"),
        ("subject_ms", "3"), ("case", {}), ("colour", "red"), ("format", "2"),
    ],
)  # fmt: skip
def test_a_value_that_no_record_has_is_refused(tmp_path: Path, name: str, wrong: object) -> None:
    writer = open_run(tmp_path)
    writer.append(RECORD)
    folder = writer.finish({})
    line = json.dumps({**json.loads(RECORD.to_json()), name: wrong})
    (folder / "records.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=r"records\.jsonl, line 1: .* is not a record: .*damaged"):
        read_run(folder)


def test_a_path_that_is_no_file_is_a_sentence(tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    writer.close()
    (writer.folder / "records-gw0.jsonl").mkdir()
    with pytest.raises(RunError, match=r"records-gw0\.jsonl can't be read \(Is a directory\)"):
        read_run(writer.folder)
