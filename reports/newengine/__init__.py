"""What `parity new engine NAME` writes: an engine called `acme`, one file per op.

The files are linted, typed and judged as they stand; NAME takes the place of acme.
"""

import importlib
import keyword
import pkgutil
import re
from pathlib import Path

from harness import engines

OPS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))
OURS = ("references", "cases", "harness", "reports", "tests", "conftest", "parity")
"""What the harness itself is called at the top."""
_HEAD = '"""acme: which of its kernels are asked, and where they run."""\n\nREQUIRES = ("torch",)\n'


def check(name: str, folder: Path) -> None:
    """Refuse a name that no new engine can have.

    Raises:
        ValueError: it is no lower-case Python name, one of ours, or taken.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in OURS:
        raise ValueError(
            f"name={name!r} can't be a folder of harness/engines; expected the package's Python "
            "name in lower case, such as flash_attn"
        )
    if name in engines.NAMES or (folder / name).exists():
        raise ValueError(
            f"name={name!r} is taken by {folder / name}; expected a new one: to add an op to it, "
            "add a file named after the op"
        )


def write(name: str, op: str, folder: Path) -> tuple[Path, ...]:
    """Write `folder`/`name`/ with one subject for `op`; the files written.

    Raises:
        ValueError: see `check`. OSError: the folder can't be written.
    """
    check(name, folder)
    path = importlib.import_module(f"reports.newengine.{op}").__file__
    text = Path(path or "").read_text(encoding="utf-8")
    mine = folder / name
    mine.mkdir()
    files = (mine / "__init__.py", mine / f"{op}.py")
    for file, content in zip(files, (_HEAD, text), strict=True):
        file.write_text(content.replace("acme", name), encoding="utf-8")
    return files
