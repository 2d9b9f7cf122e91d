"""`parity env`: the environments of engines that live in a Python of their own."""

import shlex
import sys
import time
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.environments import declared as environments
from harness.environments.declared import Declared
from harness.environments.store import BuildError, Ready, Store
from reports.usage import UsageError

app = typer.Typer(no_args_is_help=True, help="Build, list and remove the environments of engines.")
Names = Annotated[list[str], typer.Argument(help="environments, as `parity env list` names them")]


@app.command()
def create(
    names: Names,
    python: Annotated[
        str | None, typer.Option(help="use this interpreter from now on instead of building one")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="words that start a Python elsewhere: 'ssh host cd DIR && python3'"),
    ] = None,
    index: Annotated[
        list[str] | None,
        typer.Option(help="extra package index, e.g. one with CPU builds of torch (repeatable)"),
    ] = None,
) -> None:
    """Build what is missing, each from its lock into the user's cache; a few minutes each."""
    chosen = [_declared(name) for name in names]
    if python is not None and command is not None:
        raise UsageError("--python and --command: expected one of them; both name what to start")
    words = _words(python, command)
    if words and len(chosen) > 1:
        raise UsageError(f"{len(chosen)} environments and one interpreter: name one at a time")
    options = ["--quiet", *(f"--extra-index-url={url}" for url in index or ())]
    for one in chosen:
        start = time.monotonic()
        try:
            ready = Store().name(one, words) if words else Store().build(one, options, _say)
        except BuildError as error:
            raise UsageError(str(error)) from error
        took = time.monotonic() - start
        print(f"{one.name}: {_versions(ready)} ({took:.0f} s)")


@app.command(name="list")
def list_() -> None:
    """Show each environment, whom it serves, and where it is or how it is built."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for column in ("environment", "engines", "holds", "started by"):
        table.add_column(column, overflow="fold")
    for one in environments.load().values():
        ready = Store().find(one)
        if ready is None:
            where = f"not built: {one.remedy}"
        else:
            where = shlex.join(ready.command) + ("" if ready.built else " (named by you)")
        table.add_row(one.name, ", ".join(one.engines), ready and _versions(ready), where)
    Console(highlight=False).print(table)


@app.command()
def remove(names: Names) -> None:
    """Remove builds, and forget interpreters that were named."""
    for one in [_declared(name) for name in names]:
        gone = Store().remove(one, _say)
        print(f"{one.name}: {f'removed {len(gone)}' if gone else 'there was none'}")


def _words(python: str | None, command: str | None) -> list[str]:
    """What starts the interpreter that a person names; empty where one is to be built."""
    if python is None and command is None:
        return []
    try:
        words = [python] if python is not None else shlex.split(command or "")
    except ValueError as error:
        raise UsageError(
            f"--command {command!r} is no shell command: {error}; expected words such as "
            "'ssh host cd DIR && python3'"
        ) from error
    if not any(words):
        option = "--python" if python is not None else "--command"
        raise UsageError(f"{option} '' names no interpreter; leave it out to have one built")
    return words


def _declared(name: str) -> Declared:
    known = environments.load()
    if name not in known:
        raise UsageError(
            f"environment={name!r} is unknown; expected one of {', '.join(known)}; "
            "[tool.parity.environments] in pyproject.toml declares them"
        )
    return known[name]


def _versions(ready: Ready) -> str:
    found = ", ".join(f"{name} {version}" for name, version in ready.facts.versions.items())
    return f"{found} on {ready.facts.host}"


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
