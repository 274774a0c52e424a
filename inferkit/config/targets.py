"""What `_target_` names, read from its source: nothing is imported, so torch stays out.

Knows Python's way to find modules and classes; knows no configuration.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from inferkit.config.faults import closest, did_you_mean

OWN_PREFIX = "inferkit"
MAX_HOPS = 8
"""Re-exports that are followed from module to module."""


class TargetError(Exception):
    """A target that does not exist; the message is a clause that follows its name.

    Args:
        wrong: the part of the name, from its beginning, that leads nowhere.
        meant: what was probably meant by it; None = unknown.
    """

    def __init__(self, problem: str, *, wrong: str = "", meant: str | None = None) -> None:
        super().__init__(problem + did_you_mean(meant))
        self.wrong = wrong
        self.meant = meant

    def corrected(self, target: str) -> str | None:
        """The target with what was meant; None = unknown."""
        if self.meant is None or not f"{target}.".startswith(f"{self.wrong}."):
            return None
        return self.meant + target[len(self.wrong) :]


@dataclass(frozen=True, kw_only=True)
class Keywords:
    """Keyword arguments of a constructor."""

    names: frozenset[str]
    takes_any: bool
    """It has **kwargs of its own, or its source cannot be read."""
    required: frozenset[str] = frozenset()
    """Keywords without a default, as far as the class itself declares them."""

    def union(self, other: "Keywords") -> "Keywords":
        return Keywords(
            names=self.names | other.names,
            takes_any=self.takes_any or other.takes_any,
            required=self.required | other.required,
        )


NO_KEYWORDS = Keywords(names=frozenset(), takes_any=False)
ANY_KEYWORDS = Keywords(names=frozenset(), takes_any=True)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Where a name is defined. `node` is None where the source cannot be read."""

    module: "Module | None"
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        is_package = self.path.name == "__init__.py"
        return self.name if is_package else self.name.rpartition(".")[0]


def is_allowed(target: str, allowed_targets: Sequence[str]) -> bool:
    """Whether `target` lies in inferkit or under one of the prefixes."""
    prefixes = [OWN_PREFIX, *(prefix.rstrip(".") for prefix in allowed_targets)]
    return any(target.startswith(f"{prefix}.") for prefix in prefixes if prefix)


class SourceIndex:
    """Finds definitions; reads every file once, so use one for a check, not for a session."""

    def __init__(self) -> None:
        self._modules: dict[str, Module | None] = {}

    def find(self, target: str) -> Definition:
        """The class or function that `target` names.

        Raises:
            TargetError: there is no such module, or nothing of that name in it.
        """
        module_name, _, name = target.rpartition(".")
        if not module_name or not all(part.isidentifier() for part in target.split(".")):
            raise TargetError("is no dotted name of a class, package.module.Class")
        return self._find_in(module_name, name, MAX_HOPS)

    def keywords(self, definition: Definition) -> Keywords:
        """Keywords of a class's constructor, or of a function."""
        node, module = definition.node, definition.module
        if node is None or module is None:
            return ANY_KEYWORDS
        if isinstance(node, ast.ClassDef):
            return self._class_keywords(module, node, MAX_HOPS)
        return _signature(node, skip_first=False)

    def attribute(self, definition: Definition, name: str) -> tuple[str, ...] | None:
        """A class attribute that is a literal tuple of strings; None = the class has none."""
        for _, node in self._ancestry(definition):
            for statement in node.body:
                if name in _assigned_names(statement):
                    value = getattr(statement, "value", None)
                    try:
                        return tuple(ast.literal_eval(value)) if value else None
                    except ValueError:
                        return None
        return None

    def _find_in(self, module_name: str, name: str, hops: int) -> Definition:
        module = self._load(module_name)
        if module is None or hops == 0:
            return Definition(module=None, node=None)
        names: dict[str, ast.stmt] = {}
        for statement in _top_level(module.tree):
            for defined in _defined_names(statement):
                names[defined] = statement
        found = names.get(name)
        if isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return Definition(module=module, node=found)
        if isinstance(found, ast.ImportFrom):
            source, original = _imported_from(module, found, name)
            return self._find_in(source, original, hops - 1)
        if found is not None or "__getattr__" in names or "*" in names:
            return Definition(module=None, node=None)
        classes = [key for key, value in names.items() if isinstance(value, ast.ClassDef)]
        guess = closest(name, classes)
        meant = f"{module_name}.{guess}" if guess else None
        wrong = f"{module_name}.{name}"
        raise TargetError(f"names nothing in {module_name}", wrong=wrong, meant=meant)

    def _load(self, name: str) -> Module | None:
        """A module's source; None = it exists, but has no Python source."""
        if name not in self._modules:
            spec = _find_spec(name)
            path = Path(spec.origin) if spec.origin else None
            if path is None or path.suffix != ".py":
                self._modules[name] = None
            else:
                try:
                    tree = ast.parse(path.read_bytes())
                except SyntaxError as error:
                    raise TargetError(
                        f"cannot be read: {path}, line {error.lineno}: {error.msg}"
                    ) from None
                self._modules[name] = Module(name=name, path=path, tree=tree)
        return self._modules[name]

    def _class_keywords(self, module: Module, node: ast.ClassDef, hops: int) -> Keywords:
        if hops == 0:
            return ANY_KEYWORDS
        own = next(
            (s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None
        )
        if own is not None:
            keywords = _signature(own, skip_first=True)
            if not (keywords.takes_any and _forwards_keywords(own)):
                return keywords
            # What a base requires may be given by this constructor itself.
            base = self._base_keywords(module, node, hops)
            return Keywords(
                names=keywords.names | base.names,
                takes_any=base.takes_any,
                required=keywords.required,
            )
        keywords = self._base_keywords(module, node, hops)
        if not _is_dataclass(node):
            return keywords
        fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
        return Keywords(
            names=keywords.names.union(*map(_assigned_names, fields)),
            takes_any=keywords.takes_any,
            required=keywords.required.union(
                *(_assigned_names(s) for s in fields if s.value is None)
            ),
        )

    def _base_keywords(self, module: Module, node: ast.ClassDef, hops: int) -> Keywords:
        keywords = NO_KEYWORDS
        for base in self._bases(module, node):
            if base.module is None or not isinstance(base.node, ast.ClassDef):
                return ANY_KEYWORDS
            keywords = keywords.union(self._class_keywords(base.module, base.node, hops - 1))
        return keywords

    def _bases(self, module: Module, node: ast.ClassDef) -> Iterator[Definition]:
        for base in node.bases:
            text = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if text in ("object", "Protocol", "ABC", "Generic", "abc.ABC", "typing.Protocol"):
                continue
            try:
                yield self._find_in(module.name, text, MAX_HOPS)
            except TargetError:
                yield Definition(module=None, node=None)

    def _ancestry(self, definition: Definition) -> Iterator[tuple[Module, ast.ClassDef]]:
        module, node = definition.module, definition.node
        if module is not None and isinstance(node, ast.ClassDef):
            yield module, node
            for base in self._bases(module, node):
                yield from self._ancestry(base)


def _find_spec(name: str) -> ModuleSpec:
    """The module's spec, found without importing its packages."""
    parts = name.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ValueError, KeyError):  # a module without a spec, or a namespace that has gone
        spec = None
    if spec is None:
        raise TargetError(
            f"cannot be found: there is no module {parts[0]} here; install its package or "
            "start in the folder that holds it"
        )
    for depth in range(2, len(parts) + 1):
        child = ".".join(parts[:depth])
        parent = ".".join(parts[: depth - 1])
        places = spec.submodule_search_locations
        found = PathFinder.find_spec(child, places) if places is not None else None
        if found is None:
            guess = closest(parts[depth - 1], _submodules(places or ()))
            raise TargetError(
                f"cannot be found: there is no {parts[depth - 1]} in {parent}",
                wrong=child,
                meant=f"{parent}.{guess}" if guess else None,
            )
        spec = found
    return spec


def _submodules(places: Sequence[str]) -> list[str]:
    names = []
    for place in places:
        for path in Path(place).glob("*"):
            if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists()):
                names.append(path.stem)
    return sorted(set(names) - {"__init__"})


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, those inside `if` and `try` too."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            waiting += [*statement.body, *statement.orelse]
            if isinstance(statement, ast.Try):
                waiting += [s for handler in statement.handlers for s in handler.body]


def _defined_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    return _assigned_names(statement)


def _assigned_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _imported_from(module: Module, statement: ast.ImportFrom, name: str) -> tuple[str, str]:
    original = next(a.name for a in statement.names if (a.asname or a.name) == name)
    if statement.level == 0:
        return statement.module or "", original
    package = module.package.split(".")
    package = package[: len(package) - statement.level + 1]
    return ".".join([*package, *([statement.module] if statement.module else [])]), original


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip_first: bool) -> Keywords:
    arguments = node.args
    plain = [arg.arg for arg in arguments.args]
    required = plain[: len(plain) - len(arguments.defaults)]
    required += [
        arg.arg
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    names = [*plain, *(arg.arg for arg in arguments.kwonlyargs)]
    self_name = set(plain[:1]) if skip_first else set()
    return Keywords(
        names=frozenset(names) - self_name,
        takes_any=arguments.kwarg is not None,
        required=frozenset(required) - self_name,
    )


def _forwards_keywords(init: ast.FunctionDef) -> bool:
    """Whether `super().__init__(..., **kwargs)` gets the constructor's own **kwargs."""
    own = init.args.kwarg.arg if init.args.kwarg else None
    for node in ast.walk(init):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            spread = [ast.unparse(k.value) for k in node.keywords if k.arg is None]
            if own in spread:
                return True
    return False


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return any(name.split(".")[-1] == "dataclass" for name in names)
