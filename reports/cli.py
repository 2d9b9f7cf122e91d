"""The command `parity`: one module per command in `reports.commands`, and one way to fail.

Exit codes: 0 passed, 1 a finding, 2 bad usage, each with one sentence that says what to do.
"""

import sys

import typer

from harness.engines import EngineError
from harness.rundir import RunError
from reports.commands import (
    bench,
    check,
    env,
    explain,
    lanes,
    matrix,
    new,
    power,
    replay,
    repro,
    run,
)
from reports.usage import UsageError

app = typer.Typer(
    name="parity",
    help="Judges production kernels of LLM engines against plain references.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    run.run,
    matrix.matrix,
    check.check,
    replay.replay,
    repro.repro,
    lanes.lanes,
    explain.explain,
    bench.bench,
    power.power,
):
    app.command()(_command)
app.add_typer(env.app, name="env")
app.add_typer(new.new, name="new")


def main() -> None:
    """Run the command line; what the user can mend is a sentence and exit code 2."""
    try:
        app()
    except (UsageError, RunError, EngineError) as error:
        print(f"parity: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
