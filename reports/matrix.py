"""The matrix of a run, subject by lane, for the terminal and as Markdown."""

import math
from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.record import BAD, Record, Status
from reports import summary
from reports.summary import Absence, Row

ALWAYS = (Status.REFUSED, Status.VACUOUS)
"""Counted in every matrix, even where all are zero."""
OPTIONAL = (
    Status.KNOWN,
    Status.SUSPECT,
    Status.DRIFT,
    Status.DISAGREE,
    Status.ERROR,
)
"""Counted in the terminal only where some cell has one; Markdown has them all."""
NAMED = 4
"""Absent subjects that are named before the rest is counted."""
_BROKEN = {
    "refused": "re-\nfused",
    "vacuous": "vacu-\nous",
    "suspect": "sus-\npect",
    "disagree": "dis-\nagree",
}
"""Heads in two lines, for a table with many columns."""
_STYLE = {Status.SUSPECT: "yellow", Status.DRIFT: "bold magenta"}


def terminal(records: Sequence[Record]) -> RenderableType:
    """For a rich console: a table per op, absent cells, a sentence per lane."""
    rows = summary.rows(records)
    shown = [s for s in OPTIONAL if any(row.count[s] for row in rows)]
    parts: list[RenderableType] = []
    if rows:
        parts.append(_table(rows, shown))
        if none := [s for s in OPTIONAL if s not in shown]:
            parts.append(Text(f"No cell has {_listed(none)}.", style="dim"))
    parts += [
        Text(f"absent  {absence.lane}: {absence.reason}: {_subjects(absence)}", style="dim")
        for absence in summary.absences(records)
    ]
    parts += [Text(said, style="dim") for said in _accepted(records)]
    parts.append(Text())
    parts += [
        Text(said, style="red" if _wrong(records, said.split(":")[0]) else "")
        for said in summary.lanes(records)
    ]
    if not records:
        parts.append(Text("No record: nothing was asked.", style="bold red"))
    return Group(*parts)


def text(
    records: Sequence[Record],
    *,
    width: int = 118,
    colour: bool = False,
) -> str:
    """`terminal` as a string. width: in columns."""
    console = Console(width=width, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as captured:
        console.print(terminal(records))
    return captured.get()


def markdown(records: Sequence[Record]) -> str:
    """The same as a Markdown table with every column, absent cells and lane sentences below."""
    counted = (Status.AGREE, *ALWAYS, *OPTIONAL)
    head = ["op", "subject", "lane", "tier", "program", "judged", *counted, "excess", "exact"]
    lines = [
        f"| {' | '.join(head)} |",
        "|" + "---|" * 5 + "---:|" * (len(head) - 5),
    ]
    for row in summary.rows(records):
        cells = [row.op, f"`{row.subject}`", row.lane, row.tier, row.program or "-", row.judged]
        cells += [f"**{row.count[s]}**" if s in BAD and row.count[s] else row.count[s]
                  for s in counted]  # fmt: skip
        cells += [_excess(row), _share(row)]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    lines.append("")
    lines += [
        f"- absent on {absence.lane}: {absence.reason}: {_subjects(absence)}"
        for absence in summary.absences(records)
    ]
    lines += [f"- {said}" for said in (*_accepted(records), *summary.lanes(records))]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row], shown: Sequence[Status]) -> Table:
    counted = (*ALWAYS, *shown)
    agrees = any(row.count[Status.AGREE] != row.judged for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("subject", overflow="fold")
    for name in ("lane", "tier", "program"):
        table.add_column(name, no_wrap=True)
    numbers = ["judged", *(["agree"] if agrees else []), *counted, "excess", "exact"]
    for name in map(str, numbers):
        head = _BROKEN.get(name, name) if len(shown) > 1 else name
        table.add_column(head, justify="right", no_wrap=True)
    for op, group in groupby(rows, key=lambda row: row.op):
        table.add_section()
        table.add_row(Text(op, style="bold"))
        for row in group:
            cells = [
                Text(
                    "  " + row.subject.replace(f".{op}.", ".", 1),
                    style="bold red" if row.bad else "",
                ),
                Text(row.lane),
                Text(row.tier, style="yellow" if row.tier == "emulated" else ""),
                Text(row.program or "-"),
                Text(str(row.judged), style="" if row.judged else "bold red"),
            ]
            if agrees:
                cells.append(Text(str(row.count[Status.AGREE])))
            cells += [_count(row, status) for status in counted]
            cells += [Text(_excess(row), style="" if row.excess <= 1 else "bold red")]
            cells += [Text(_share(row))]
            table.add_row(*cells)
    return table


def _short(row: Row) -> str:
    """The subject's name without its op, under which it stands."""
    return row.subject.replace(f".{row.op}.", ".", 1)


def _count(row: Row, status: Status) -> Text:
    number = row.count[status]
    if not number:
        return Text("-", style="dim")
    return Text(str(number), style=_STYLE.get(status, "bold red" if status in BAD else ""))


def _excess(row: Row) -> str:
    if not row.judged:
        return "-"
    return f"{row.excess:.3f}" if row.excess < 10 else f"{row.excess:.3g}"


def _share(row: Row) -> str:
    """Four digits, rounded down: only a share of exactly 1 reads as 1."""
    if row.share is None:
        return "-"
    return "1" if row.exact == row.elements else f"{math.floor(row.share * 1e4) / 1e4:.4f}"


def _subjects(absence: Absence) -> str:
    named = ", ".join(absence.subjects[:NAMED])
    rest = len(absence.subjects) - NAMED
    return f"{named} and {rest} more" if rest > 0 else named


def _accepted(records: Sequence[Record]) -> list[str]:
    """Per op, the entries of known.toml behind the column `known`, with their cases."""
    return [
        f"known   {op}: {', '.join(f'{name} ({cases})' for name, cases in sorted(ids.items()))}"
        for op, ids in summary.accepted(records).items()
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _wrong(records: Sequence[Record], lane: str) -> bool:
    return any(record.lane == lane and record.status in BAD for record in records)
