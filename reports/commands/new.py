"""`parity new engine`: the folder of a new engine, with one subject that works."""

from typing import Annotated

import typer

from reports import newengine, usage
from reports.usage import ROOT, UsageError

new = typer.Typer(help="Write the files of something new.", no_args_is_help=True)


@new.callback()
def _several() -> None:
    """Write the files of something new."""


@new.command()
def engine(
    name: Annotated[str, typer.Argument(help="the package's Python name, such as flash_attn")],
    op: Annotated[str, typer.Option(help="the op of its first subject")] = "sdpa",
) -> None:
    """Write harness/engines/NAME with one subject, judged like all others from then on."""
    (first,) = usage.ops([op])
    folder = ROOT / "harness" / "engines"
    try:
        files = newengine.write(name, first, folder)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"{folder / name} can't be written ({error.strerror or error}); expected a checkout "
            "that can be: `parity new` adds to the harness itself"
        ) from error
    for file in files:
        print(file)
    print(
        f"it answers already: `parity run --engine {name}`; now put the package's own call in "
        f"{files[-1].name}, and the package into REQUIRES"
    )
