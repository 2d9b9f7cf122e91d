"""The source of a callable with everything of this project that it uses, and of nothing else.

A module of the project becomes a function that defines the statements that are needed and returns
them as a namespace, so that names of two modules can't meet; the module of the callable itself is
written out plainly. Imports of other packages stay imports.
"""

import ast
import functools
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from reports.repro import literals

OURS = frozenset({"references", "cases", "harness", "reports", "tests"})
"""Packages that are copied; all others are imported."""


class BundleError(Exception):
    """There is no source for the callable; the message says for what part of it."""


class _Statement:
    """One top-level statement of a module, and the module's names that it binds and uses."""

    def __init__(self, node: ast.stmt, lines: list[str], module: str) -> None:
        self.node = node
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        self.text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        self.binds = _bound(node)
        uses, self.attributes = _used(node)
        self.uses = uses & _global(symtable.symtable(self.text, module, "exec"))


class _Module:
    """A module of the project, and which of its names are wanted."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.name = module.__name__.replace(".", "_")
        source = inspect.getsource(module)
        lines = source.splitlines()
        self.statements = [
            _Statement(node, lines, self.name) for node in _flat(ast.parse(source).body)
        ]
        self.bound = {name for statement in self.statements for name in statement.binds}
        self.wanted: set[str] = set()


class Bundle:
    """Collects source; `expression` first, then `modules` and `statements`.

    root: the module whose names stand at the top level of the script. loaded: source of values
    that come from elsewhere, e.g. from a person's file.
    """

    def __init__(self, root: ModuleType, loaded: Mapping[int, str] | None = None) -> None:
        self._root = root
        self._loaded = loaded or {}
        self._modules: dict[str, _Module] = {}
        self._namespaces: set[str] = set()
        self._imports: set[str] = set()
        self.attributes: set[str] = set()
        self._module(root)

    def expression(self, value: Any, home: ModuleType | None = None) -> str:
        """Source that gives `value` in the script. home: a module that knows it by a name.

        Raises:
            BundleError: there is none.
        """
        home = home or self._root
        if id(value) in self._loaded:
            return self._loaded[id(value)]
        if isinstance(value, ModuleType):
            return self._namespace(value) if _ours(value) else self._third(value, home)
        if isinstance(value, functools.partial):
            self._imports.add("import functools")
            parts = [self.expression(x, home) for x in (value.func, *value.args)]
            parts += [f"{k}={self.expression(v, home)}" for k, v in value.keywords.items()]
            return f"functools.partial({', '.join(parts)})"
        if named := self._named(value, home):
            return named
        if isinstance(value, FunctionType) and value.__globals__.get("__name__") in sys.modules:
            mine = sys.modules[value.__globals__["__name__"]]
            if _ours(mine):
                return self._function(value, mine)
        try:
            return literals.plain(value)
        except literals.NotPlain:
            return self._third(value, home)

    def modules(self) -> str:
        """The source of all modules but the root, as functions called once, in order of need."""
        self._settle()
        done: list[str] = []

        def visit(name: str) -> None:
            for other in self._needs(name):
                if other not in done and other != self._root.__name__:
                    visit(other)
            if name not in done and name != self._root.__name__:
                done.append(name)

        for name in list(self._modules):
            visit(name)
        return "\n\n".join(self._as_function(self._modules[name]) for name in done)

    def statements(self) -> str:
        """The source of what is needed of the root module, at the top level."""
        self._settle()
        root = self._modules[self._root.__name__]
        return "\n".join([*sorted(self._imports), *self._lines(root)])

    def _module(self, module: ModuleType) -> _Module:
        name = module.__name__
        if name not in self._modules:
            self._modules[name] = _Module(module)
        return self._modules[name]

    def _namespace(self, module: ModuleType) -> str:
        self._namespaces.add(module.__name__)
        return self._module(module).name

    def _want(self, module: ModuleType, name: str) -> str:
        """Mark a name as needed; how the script spells it."""
        mine = self._module(module)
        mine.wanted.add(name)
        return name if module is self._root else f"{mine.name}.{name}"

    def _named(self, value: Any, home: ModuleType) -> str | None:
        """By a global name of its module or of `home`, or as an entry of a dict there."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return None
        origin = sys.modules.get(getattr(value, "__module__", None) or "")
        for module in dict.fromkeys(m for m in (home, origin, self._root) if m and _ours(m)):
            bound = self._module(module).bound
            for name, found in vars(module).items():
                if found is value and name in bound:
                    return self._want(module, name)
            for name, found in vars(module).items():
                if isinstance(found, dict) and name in bound:
                    for key, entry in found.items():
                        if entry is value and isinstance(key, str | int):
                            return f"{self._want(module, name)}[{key!r}]"
        return None

    def _function(self, function: FunctionType, home: ModuleType) -> str:
        """A lambda, or a function that another one has made."""
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if code.co_name == "<lambda>":
            text, uses, attributes = _lambda(code, self._module(home))
            self.attributes |= attributes
            for name in uses & self._module(home).bound:
                if self._want(home, name) != name:
                    raise BundleError(f"a lambda of {home.__name__} at line {code.co_firstlineno}")
            if not cells:
                return f"({text})"
            given = [self.expression(cell.cell_contents, home) for cell in cells.values()]
            return f"(lambda {', '.join(cells)}: {text})({', '.join(given)})"
        factory, _, inner = code.co_qualname.partition(".<locals>.")
        maker = vars(home).get(factory)
        if not isinstance(maker, FunctionType) or not inner or "." in inner:
            raise BundleError(f"{code.co_qualname} of {home.__name__} has no name")
        captured: dict[str, Any] = {}
        _capture(function, f"{factory}.<locals>.", captured)
        parts = []
        for name, parameter in inspect.signature(maker).parameters.items():
            if name in captured:
                parts.append(f"{name}={self.expression(captured[name], home)}")
            elif parameter.default is parameter.empty:
                raise BundleError(f"{factory} of {home.__name__} keeps nothing of {name!r}")
        return f"{self._want(home, factory)}({', '.join(parts)})"

    def _third(self, value: Any, home: ModuleType) -> str:
        """Something of another package: by an alias of `home`, else by an import of its own."""
        aliases = [(n, m) for n, m in vars(home).items() if isinstance(m, ModuleType)]
        for name, module in aliases:
            if _ours(module) or name not in self._module(home).bound:
                continue
            if module is value:
                return self._want(home, name)
            for attribute, found in vars(module).items():
                if found is value and not attribute.startswith("_"):
                    return f"{self._want(home, name)}.{attribute}"
        if isinstance(value, ModuleType):
            self._imports.add(f"import {value.__name__}")
            return value.__name__
        if getattr(type(value), member := str(getattr(value, "name", "")), None) == value:
            return f"{self.expression(type(value), home)}.{member}"  # of an enum
        place, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        found = sys.modules.get(place or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if place is None or found is not value:
            raise BundleError(f"{type(value).__name__} {value!r} of {home.__name__}")
        self._imports.add(f"import {place}")
        return f"{place}.{name}"

    def _settle(self) -> None:
        """Follow what is wanted until nothing new is."""
        before = None
        while before != (before := self._state()):
            for mine in list(self._modules.values()):
                if mine.module.__name__ in self._namespaces:
                    mine.wanted |= self.attributes & mine.bound
                for statement in self._chosen(mine):
                    self._follow(mine, statement)

    def _state(self) -> tuple[int, ...]:
        wanted = [len(mine.wanted) for mine in self._modules.values()]
        return (len(self.attributes), len(self._namespaces), len(wanted), *wanted)

    def _chosen(self, mine: _Module) -> list[_Statement]:
        """Statements that bind a wanted name, or do something with one that the module defines."""
        own = {
            name
            for s in mine.statements
            if not isinstance(s.node, ast.Import | ast.ImportFrom)
            for name in s.binds
        }
        return [
            s
            for s in mine.statements
            if s.binds & mine.wanted
            or (isinstance(s.node, ast.Expr) and not s.binds and s.uses & mine.wanted & own)
        ]

    def _follow(self, mine: _Module, statement: _Statement) -> None:
        node = statement.node
        if not isinstance(node, ast.Import | ast.ImportFrom):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] in OURS:
                    raise BundleError(f"an import within {mine.module.__name__}: {inner.module}")
            self.attributes |= statement.attributes
            mine.wanted |= statement.uses & mine.bound
            return
        for alias in node.names:
            if (alias.asname or alias.name) in mine.wanted:
                origin = _origin(mine.module, node, alias)
                if isinstance(origin, ModuleType):
                    self._namespace(origin)
                elif origin is not None:
                    self._want(*origin)

    def _needs(self, name: str) -> set[str]:
        """Modules whose namespaces a module's imports speak of."""
        mine, out = self._modules[name], set()
        for statement in self._chosen(mine):
            node = statement.node
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) in mine.wanted:
                        origin = _origin(mine.module, node, alias)
                        if origin is not None:
                            module = origin if isinstance(origin, ModuleType) else origin[0]
                            out.add(module.__name__)
        return out

    def _as_function(self, mine: _Module) -> str:
        body = textwrap.indent("\n".join(self._lines(mine)), "    ")
        path = mine.module.__name__.replace(".", "/")
        return (
            f"def _{mine.name}():\n"
            f'    """What is needed of {path}.py."""\n'
            f"{body}\n"
            f"    return SimpleNamespace(**locals())\n\n\n"
            f"{mine.name} = _{mine.name}()\n"
        )

    def _lines(self, mine: _Module) -> list[str]:
        out: list[str] = []
        for statement in self._chosen(mine):
            node = statement.node
            if not isinstance(node, ast.Import | ast.ImportFrom):
                blank = isinstance(node, ast.FunctionDef | ast.ClassDef)
                out += ["", "", statement.text, ""] if blank else [statement.text]
                continue
            for alias in node.names:
                if (alias.asname or alias.name) in mine.wanted:
                    out.append(self._import(mine, node, alias))
        return out

    def _import(self, mine: _Module, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
        origin, name = _origin(mine.module, node, alias), alias.asname or alias.name
        if isinstance(origin, ModuleType):
            return f"{name} = {self._module(origin).name}"
        if origin is not None:
            module, attribute = origin
            here = "" if module is self._root else f"{self._module(module).name}."
            return f"{name} = {here}{attribute}"
        spelled = alias.name + (f" as {alias.asname}" if alias.asname else "")
        if isinstance(node, ast.Import):
            return f"import {spelled}"
        return f"from {node.module} import {spelled}"


def _ours(module: ModuleType) -> bool:
    return module.__name__.split(".")[0] in OURS


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Top-level statements, those under an `if` without `else` among them."""
    out: list[ast.stmt] = []
    for node in body:
        out += _flat(node.body) if isinstance(node, ast.If) and not node.orelse else [node]
    return out


def _bound(node: ast.stmt) -> frozenset[str]:
    """Names that a top-level statement gives the module."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return frozenset({node.name})
    if isinstance(node, ast.Import | ast.ImportFrom):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return frozenset()
        return frozenset((a.asname or a.name).split(".")[0] for a in node.names)
    targets: list[ast.AST] = [node]
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Expr):
        targets = []
    names = (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    return frozenset(n.id for n in names if isinstance(n.ctx, ast.Store))


def _global(table: symtable.SymbolTable) -> frozenset[str]:
    """Names that a statement, or a function in it, looks up in the module."""
    top = table.get_type() == "module"
    mine = {s.get_name() for s in table.get_symbols() if top or s.is_global()}
    return frozenset(mine.union(*map(_global, table.get_children())))


def _used(node: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """Names and attributes that a statement speaks of; annotations are not evaluated."""
    names, attributes, todo = set(), set(), [node]
    while todo:
        here = todo.pop()
        if isinstance(here, ast.Name):
            names.add(here.id)
        elif isinstance(here, ast.Attribute):
            attributes.add(here.attr)
        for name, value in ast.iter_fields(here):
            if name not in ("annotation", "returns"):
                items = value if isinstance(value, list) else [value]
                todo += [x for x in items if isinstance(x, ast.AST)]
    return frozenset(names), frozenset(attributes)


def _origin(
    module: ModuleType, node: ast.Import | ast.ImportFrom, alias: ast.alias
) -> ModuleType | tuple[ModuleType, str] | None:
    """Where an import of the project's own comes from; None for other packages."""
    if isinstance(node, ast.Import):
        found = sys.modules.get(alias.name)
        return found if found is not None and _ours(found) else None
    place = node.module or ""
    if node.level:
        package = (module.__package__ or "").split(".")
        place = ".".join([*package[: len(package) - node.level + 1], *filter(None, [place])])
    if place.split(".")[0] not in OURS:
        return None
    inner = sys.modules.get(f"{place}.{alias.name}")
    return inner if inner is not None else (sys.modules[place], alias.name)


def _lambda(code: CodeType, mine: _Module) -> tuple[str, frozenset[str], frozenset[str]]:
    """The source of the lambda that was compiled to `code`."""
    source = inspect.getsource(mine.module)
    nodes = [
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno
    ]
    for node in nodes:
        text = ast.get_source_segment(source, node) or ""
        other = _code_of(text)
        if len(nodes) == 1 or (other.co_code, other.co_names) == (code.co_code, code.co_names):
            return text, *_used(node)
    raise BundleError(f"a lambda at line {code.co_firstlineno} of {mine.module.__name__}")


def _code_of(text: str) -> CodeType:
    compiled = compile(f"({text})", "<lambda>", "eval")
    return next(c for c in compiled.co_consts if isinstance(c, CodeType))


def _capture(function: Callable[..., Any], prefix: str, found: dict[str, Any]) -> None:
    """Free variables of a function, and of those functions among them that have the same maker."""
    if not isinstance(function, FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = cell.cell_contents
        if name not in found:
            found[name] = value
            if isinstance(value, FunctionType) and value.__code__.co_qualname.startswith(prefix):
                _capture(value, prefix, found)
