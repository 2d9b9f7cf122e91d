"""Arguments and options that several commands have, each said once."""

from pathlib import Path
from typing import Annotated

import typer

CaseId = Annotated[str, typer.Argument(metavar="ID", help="a case id, or how it begins")]
OnLane = Annotated[str | None, typer.Option(help="on this lane")]
InRun = Annotated[Path | None, typer.Option(help="look in this run instead")]
Runs = Annotated[Path, typer.Option(help="folder that holds the runs")]
Findings = Annotated[Path, typer.Option(help="folder of findings")]
AskedFindings = Annotated[Path, typer.Option(help="folder of findings, asked first")]
OnlyOps = Annotated[list[str] | None, typer.Option(help="only this op (repeatable)")]
Seed = Annotated[int, typer.Option(help="of what is drawn")]
