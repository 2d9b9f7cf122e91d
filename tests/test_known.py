"""Accepted divergences on trial: each still diverges, and a wrong entry is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import known
from harness.campaign import Absent
from harness.cells import KNOWN, cells
from harness.lane import Tier
from harness.record import BAD, Status
from harness.run import ask, judge

ENTRIES = known.load(KNOWN)


def covered(entry, cell, device=None):
    """Whether the entry covers its own case in this cell, or on `device` if that is given."""
    where = cell.presence.device if device is None else device
    return entry.covers(cell.subject.name, where, entry.pinned)


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.id) for entry in ENTRIES])
def test_a_known_divergence_still_diverges(entry):
    """Strict: when the engine has been mended, the entry must go."""
    named = [cell for cell in cells([entry.op]) if covered(entry, cell, device=entry.device)]
    assert named, f"{entry.id}: no subject matches {', '.join(entry.subjects)}"
    here = torch.backends.cpu.get_cpu_capability()
    if entry.cpu not in ("", here):
        raise Absent(f"known on {entry.cpu}; this CPU has {here}")
    present = [
        cell for cell in named if covered(entry, cell) and cell.presence.tier is not Tier.ABSENT
    ]
    if not present:
        raise Absent(named[0].presence.reason or f"not on {entry.device}")
    for cell in present:
        assert cell.subject.refuses(entry.pinned) is None, f"{entry.id}: {cell.name} refuses it"
        record = ask(entry.pinned, cell)
        assert record.status in BAD, (
            f"{entry.id}: {cell.name} no longer diverges ({record.status}); take the entry out"
        )


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.id) for entry in ENTRIES])
def test_a_known_divergence_does_not_fail_a_run(entry):
    for cell in cells([entry.op]):
        if cell.presence.tier is Tier.ABSENT or not covered(entry, cell):
            continue
        record = judge(entry.pinned, cell)
        assert record.status not in BAD
        if entry.spares == "case":
            assert record.status is Status.KNOWN
            assert record.why.startswith(f"{entry.id}: ")


GOOD = """
[[known]]
id = "one"
op = "sdpa"
subjects = ["torch.sdpa.*"]
when = { q_len = 1 }
spares = "case"
case = '{"batch": 1, "dtype": "float32", "head_dim": 8, "heads": 1, "kv_heads": 1, "kv_len": 2, "q_len": 1, "seed": 0, "values": "normal"}'
why = "because"
"""  # noqa: E501 - one JSON line, as in the file


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("[[known]]", "[[known"), "is not TOML"),
        (lambda text: text.replace('why = "because"', ""), r"\['why'\] is missing"),
        (lambda text: text + 'colour = "red"\n', r"unknown fields \['colour'\]"),
        (lambda text: text.replace('"case"\n', '"nothing"\n'), "spares='nothing', expected one of"),
        (lambda text: text.replace("q_len = 1", "q_len = 2"), "not covered by its own `when`"),
        (lambda text: text.replace("q_len = 1", "size = 1"), "'size' is no attribute of SdpaCase"),
        (lambda text: text.replace('op = "sdpa"', 'op = "sdap"'), "op='sdap' is unknown"),
        (lambda text: text + text, "ids must be unique"),
        (lambda text: text + 'without = ["sink"]\n', r"without=\['sink'\], expected features"),
    ],
)
def test_a_wrong_entry_is_refused_with_a_sentence(tmp_path: Path, edit, message):
    path = tmp_path / "known.toml"
    path.write_text(GOOD)
    assert known.load(path)[0].id == "one"
    path.write_text(edit(GOOD))
    with pytest.raises(ValueError, match=message):
        known.load(path)


def test_an_entry_may_be_of_one_device_and_of_cases_without_a_feature(tmp_path: Path):
    path = tmp_path / "known.toml"
    path.write_text(GOOD + 'device = "cpu"\nwithout = ["sinks"]\n')
    (entry,) = known.load(path)
    assert entry.covers("torch.sdpa.math", "cpu", entry.pinned)
    assert not entry.covers("torch.sdpa.math", "cuda", entry.pinned)
    assert not entry.covers("torch.sdpa.math", "cpu", replace(entry.pinned, sinks=0.0))
    assert known.load(path)[0].covers("torch.sdpa.math", "cpu", replace(entry.pinned, seed=5))
