"""What `parity power` tells: the kill matrix, what others say of the same answers, and a summary.

Estimated is the probability that one drawn case kills: the share of drawn cases that did, over all
dtypes together, as a cell that takes them all draws them evenly. Its interval takes the draws for
independent. A miss is the chance that so many cases all fail to kill.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import profiles
from harness.power.correct import Right
from harness.power.rules import RULES
from harness.power.statistics import interval, miss
from harness.power.trial import Tally

PREMERGE, NIGHTLY = (profiles.load(name).examples for name in ("premerge", "nightly"))
PAIRS = 0.95
"""Share of (defect, dtype) pairs that must be caught."""
NAMED = 0.9
"""Share of kills of listed faults that must be named as the planted one."""
UNLIKELY = 1e-6
"""The chance of a miss that a nightly run may have, for each defect."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One defect in all dtypes that it shows in."""

    op: str
    defect: str
    tallies: tuple[Tally, ...]

    @property
    def live(self) -> list[Tally]:
        return [tally for tally in self.tallies if not tally.equivalent]

    @property
    def caught(self) -> bool:
        return any(tally.caught for tally in self.tallies)

    @property
    def killed(self) -> int:
        return sum(tally.killed for tally in self.tallies)

    @property
    def drawn(self) -> int:
        return sum(tally.drawn for tally in self.tallies)

    @property
    def probability(self) -> float:
        """Of a kill by one case of a cell with all these dtypes."""
        return self.killed / self.drawn if self.drawn else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.killed, self.drawn) if self.drawn else (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that one `parity power` found. budget: cases drawn per defect and dtype."""

    budget: int
    held_to: str
    tallies: tuple[Tally, ...]
    rights: tuple[Right, ...] = ()

    @property
    def rows(self) -> list[Row]:
        keyed = sorted(self.tallies, key=lambda t: t.op)
        order = {(t.op, t.defect): None for t in keyed}
        return [
            Row(
                op=op,
                defect=name,
                tallies=tuple(t for t in keyed if (t.op, t.defect) == (op, name)),
            )
            for op, name in order
        ]

    @property
    def pairs(self) -> list[Tally]:
        """Defects in dtypes in which they show."""
        return [tally for tally in self.tallies if not tally.equivalent]

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "held_to": self.held_to,
            "tallies": [asdict(tally) for tally in self.tallies],
            "rights": [asdict(kernel) for kernel in self.rights],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measured":
        """What `to_json` wrote."""
        tallies = [Tally(**{**t, "bugs": tuple(t["bugs"])}) for t in data["tallies"]]
        rights = [Right(**kernel) for kernel in data["rights"]]
        return cls(
            budget=data["budget"],
            held_to=data["held_to"],
            tallies=tuple(tallies),
            rights=tuple(rights),
        )


def findings(measured: Measured) -> list[str]:
    """A sentence for everything that is not as good as it must be."""
    said = []
    for row in measured.rows:
        if row.live and not row.caught:
            where = ", ".join(f"{t.dtype} ({t.shown} answers differ)" for t in row.live)
            said.append(f"{row.op} {row.defect}: never caught in {row.drawn} cases: {where}")
        chance = miss(row.interval[0], NIGHTLY)
        if row.live and measured.budget >= PREMERGE and chance > UNLIKELY:
            said.append(
                f"{row.op} {row.defect}: a nightly run may miss it with a chance of {chance:.0e}, "
                f"expected below {UNLIKELY:g}: {row.killed} of {row.drawn} drawn cases kill it; "
                "draw it more often, or show with --budget that more do"
            )
    pairs = measured.pairs
    caught = sum(tally.caught for tally in pairs)
    if caught < PAIRS * len(pairs):
        said.append(
            f"{caught} of {len(pairs)} pairs of defect and dtype are caught in {measured.budget} "
            f"cases each, expected {PAIRS:.0%}"
        )
    kills, named = _naming(pairs)
    if named < NAMED * kills:
        said.append(f"{named} of {kills} kills are named as what was planted, expected {NAMED:.0%}")
    for kernel in measured.rights:
        if kernel.rejected:
            said.append(
                f"{kernel.kernel} in {kernel.dtype} is right, and {kernel.rejected} of "
                f"{kernel.judged} cases failed it"
            )
    return said


def _naming(pairs: Sequence[Tally]) -> tuple[int, int]:
    """Kills of listed faults, and those with the right name."""
    listed = [tally for tally in pairs if tally.listed]
    return sum(t.kills for t in listed), sum(t.right for t in listed)


def terminal(measured: Measured) -> RenderableType:
    """The kill matrix of every op, what others say, and the summary."""
    parts: list[RenderableType] = []
    for op, group in groupby(measured.rows, key=lambda row: row.op):
        rows = list(group)
        dtypes = list(dict.fromkeys(t.dtype for row in rows for t in row.tallies))
        parts += [Text(op, style="bold"), _kills(rows, dtypes), Text(), _others(rows), Text()]
    parts += [_summary(measured), Text()]
    if measured.rights:
        parts += [_rules(measured), Text()]
    parts.append(Text(_legend(measured), style="dim"))
    return Group(*parts)


def _legend(measured: Measured) -> str:
    return (
        f"{measured.budget} cases drawn per defect and dtype. In a dtype: kills of cases that show "
        "the defect, @ the case that killed first; = no case shows it. p: share of drawn cases "
        "that kill, all dtypes together, with its 95 % Clopper-Pearson interval. miss: the chance "
        "that so many cases of a cell all fail to kill, at p, and for the nightly run at p's lower "
        "end. named: kills named as what was planted. ~ held to declared arithmetic: the dtypes "
        "alone may allow it."
    )


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _kills(rows: Sequence[Row], dtypes: Sequence[str]) -> Table:
    table = _table(
        "defect", *dtypes, "p", "95 %", f"miss\n{PREMERGE}", f"miss\n{NIGHTLY} <", "named"
    )
    for row in rows:
        by_dtype = {tally.dtype: tally for tally in row.tallies}
        kills, named = _naming(row.live)
        low, high = row.interval
        rounding = any(tally.rounding for tally in row.tallies)
        table.add_row(
            Text(row.defect + (" ~" if rounding else ""), style=_style(row)),
            *(_in(by_dtype.get(dtype)) for dtype in dtypes),
            f"{row.probability:.2f}" if row.live else "-",
            f"{low:.2f}-{high:.2f}" if row.live else "-",
            f"{miss(row.probability, PREMERGE):.0e}" if row.live else "-",
            f"{miss(low, NIGHTLY):.0e}" if row.live else "-",
            f"{named / kills:.0%}" if kills else "-",
        )
    return table


def _style(row: Row) -> str:
    return "dim" if not row.live else "" if row.caught else "bold red"


def _in(tally: Tally | None) -> Text:
    if tally is None:
        return Text("")
    if tally.equivalent:
        return Text("=", style="dim")
    if tally.first is None:
        only = " pinned" if tally.caught else ""
        return Text(f"0/{tally.shown}{only}", style="yellow" if tally.caught else "red")
    return Text(f"{tally.killed}/{tally.shown} @{tally.first}")


def _others(rows: Sequence[Row]) -> Table:
    """Shares of the wrong answers that each rule rejects."""
    table = _table("wrong answers rejected", "answers", "ours", *RULES)
    for row in rows:
        shown = sum(tally.shown for tally in row.tallies)
        if shown:
            counts = (row.killed, *(sum(t.rules[name] for t in row.tallies) for name in RULES))
            table.add_row(row.defect, str(shown), *(f"{n / shown:.0%}" for n in counts))
    return table


_HEADS = (
    "op",
    "defects",
    "pairs",
    "equivalent",
    "killed",
    "weakest p",
    f"miss in {PREMERGE}",
    f"miss in {NIGHTLY}",
    "named",
)


def _lines(measured: Measured) -> list[list[str]]:
    """A line per op and one for all: the cells of `_HEADS`."""
    rows = measured.rows
    groups = [(op, list(g)) for op, g in groupby(rows, key=lambda row: row.op)]
    if len(groups) > 1:
        groups.append(("all", rows))
    return [_line(name, group) for name, group in groups]


def _line(name: str, rows: Sequence[Row]) -> list[str]:
    pairs = [tally for row in rows for tally in row.tallies]
    live = [tally for tally in pairs if not tally.equivalent]
    caught = sum(tally.caught for tally in live)
    weakest = min((row for row in rows if row.live), key=lambda row: row.probability, default=None)
    kills, named = _naming(live)
    line = [name, str(len(rows)), str(len(live)), str(len(pairs) - len(live))]
    line.append(f"{caught} ({caught / len(live):.1%})" if live else "-")
    if weakest is None:
        line += ["-"] * 3
    else:
        low, _ = weakest.interval
        line += [
            f"{weakest.probability:.3f} ({weakest.defect})",
            f"{miss(weakest.probability, PREMERGE):.0e}",
            f"< {miss(low, NIGHTLY):.0e}",
        ]
    return [*line, f"{named / kills:.1%}" if kills else "-"]


def _summary(measured: Measured) -> Table:
    table = _table(*_HEADS)
    for line in _lines(measured):
        table.add_row(*line)
    return table


def _rule_heads(measured: Measured) -> list[str]:
    ops = sorted({kernel.op for kernel in measured.rights})
    return ["rule", "pairs caught", "wrong answers rejected", *(f"right {op}" for op in ops)]


def _rule_lines(measured: Measured) -> list[list[str]]:
    """A line per rule: what it catches, and the share of right answers that it rejects, by op."""
    pairs = [tally for tally in measured.pairs if tally.shown]
    shown = sum(tally.shown for tally in pairs)
    ops = sorted({kernel.op for kernel in measured.rights})
    lines = []
    for name in ("ours", *RULES):
        hits = [t.killed if name == "ours" else t.rules[name] for t in pairs]
        line = [name]
        line.append(f"{sum(n > 0 for n in hits) / len(pairs):.1%}" if pairs else "-")
        line.append(f"{sum(hits) / shown:.1%}" if shown else "-")
        for op in ops:
            kernels = [kernel for kernel in measured.rights if kernel.op == op]
            judged = sum(kernel.judged for kernel in kernels)
            wrong = sum(k.rejected if name == "ours" else k.rules[name] for k in kernels)
            line.append(f"{wrong / judged:.1%}" if judged else "-")
        lines.append(line)
    return lines


def _rules(measured: Measured) -> Table:
    table = _table(*(head.replace(" ", "\n", 1) for head in _rule_heads(measured)))
    for line in _rule_lines(measured):
        table.add_row(*line)
    return table


def markdown(measured: Measured) -> str:
    """The summary per op and the rules, as Markdown tables."""
    blocks = [_markdown(_HEADS, _lines(measured))]
    if measured.rights:
        blocks.append(_markdown(_rule_heads(measured), _rule_lines(measured)))
    return "\n".join(blocks)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    ruler = "|---|" + "---:|" * (len(heads) - 1)
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in (heads,)), ruler,
                      *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"  # fmt: skip
