"""The direction of imports, and which packages may know hydra, torch or a device."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each package may import from those before it, never from those after it.
ORDER = (
    "core",
    "config",
    "platforms",
    "parallel",
    "ops",
    "layers",
    "kv_cache",
    "models",
    "loader",
    "kv_transfer",
    "engine",
    "scheduler",
    "runtime",
    "offline",
    "online",
    "bench",
    "sweep",
    "inspect",
    "cli",
    "__main__",
)
# Beyond the order: a scheduler sees the engine as a Protocol; models are named by conf/model only.
NEVER_IMPORTS = {"scheduler": {"engine", "models", "platforms"}}
ONLY_NAMED_BY_CONFIGURATION = "models"

HYDRA_PACKAGES = {"config", "cli", "sweep"}
DEVICE_PACKAGES = {"platforms"}
TORCH_FREE = (
    "inferkit",
    "inferkit.__main__",
    "inferkit.core",
    "inferkit.config",
    "inferkit.cli",
    "inferkit.sweep",
    "inferkit.inspect",
    "inferkit.offline.runner",
    "inferkit.offline.prompts",
    "inferkit.online.runner",
    "inferkit.bench.load",
)
ONLINE_PACKAGES = {"fastapi", "starlette", "uvicorn", "zmq", "msgspec", "httpx", "openai"}


@dataclass(frozen=True)
class Import:
    """`module` imports `target`; `is_eager` = it happens when the module is imported."""

    module: str
    target: str
    line: int
    is_eager: bool

    def __str__(self) -> str:
        return f"{self.module} line {self.line} imports {self.target}"


def source_files() -> dict[str, Path]:
    """Dotted module name -> file, of everything that a wheel holds."""
    files = {}
    for folder, prefix in ((ROOT / "inferkit", "inferkit"), (ROOT / "models", "inferkit.models")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if path.is_relative_to(ROOT / "inferkit") and parts[0] in {"conf", "models"}:
                continue  # the links of a checkout
            files[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return files


SOURCES = source_files()
TREES = {module: ast.parse(path.read_text("utf-8")) for module, path in SOURCES.items()}


def package_of(module: str) -> str:
    """`inferkit.engine.sampler` -> `engine`; `inferkit` itself -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in ast.unparse(test)


def walk_imports(module: str, node: ast.AST, is_eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, is_eager)
        elif isinstance(child, ast.ImportFrom):
            base = absolute_base(module, child)
            yield Import(module, base, child.lineno, is_eager)
            for alias in child.names:
                yield Import(module, f"{base}.{alias.name}", child.lineno, is_eager)
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield from walk_imports(module, ast.Module([statement], []), False)
            for statement in child.orelse:
                yield from walk_imports(module, ast.Module([statement], []), is_eager)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk_imports(module, child, is_eager and not is_function)


def absolute_base(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.split(".")
    if SOURCES[module].name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


IMPORTS = [found for module, tree in TREES.items() for found in walk_imports(module, tree, True)]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def direction_fault(found: Import) -> str | None:
    """Why `found` breaks the order, or None."""
    if not is_within(found.target, "inferkit"):
        return None
    source, target = package_of(found.module), package_of(found.target)
    if source == "" or source == target:
        return None  # inferkit/__init__.py has a test of its own
    if target not in ORDER:
        return f"{found}: name the package that defines it"
    if ORDER.index(target) > ORDER.index(source):
        return f"{found}: {source} may only import from packages before it"
    if target in NEVER_IMPORTS.get(source, set()):
        return f"{found}: {source} must not know {target}"
    if target == ONLY_NAMED_BY_CONFIGURATION:
        return f"{found}: only conf/model names a model"
    return None


def base_imports(found: Import) -> bool:
    """`from inferkit import x` also yields the name `inferkit`, which says nothing by itself."""
    return found.target != "inferkit"


def test_every_package_has_a_place_in_the_order() -> None:
    packages = {package_of(module) for module in SOURCES} - {""}
    assert packages <= set(ORDER)
    assert {"core", "config"} <= packages


def test_packages_import_only_from_packages_before_them() -> None:
    faults = [direction_fault(found) for found in IMPORTS if base_imports(found)]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("inferkit.core.request", "inferkit.engine.sampler"),
        ("inferkit.scheduler.scheduler", "inferkit.engine.execution_engine"),
        ("inferkit.loader.default_loader", "inferkit.models.dense.model"),
        ("inferkit.engine.sampler", "inferkit.load_config"),
    ],
)
def test_direction_fault_sees_a_forbidden_import(module: str, target: str) -> None:
    assert direction_fault(Import(module, target, 1, True)) is not None


def test_hydra_stays_in_configuration_and_command_line() -> None:
    faults = [
        str(found)
        for found in IMPORTS
        if found.target.split(".")[0] in {"hydra", "omegaconf"}
        and package_of(found.module) not in HYDRA_PACKAGES
    ]
    assert faults == []


def test_nothing_imports_the_top_level_folders() -> None:
    names = {"models", "conf", "tests", "launchers"}
    faults = [str(found) for found in IMPORTS if found.target.split(".")[0] in names]
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                targets = [node.module or ""]
            else:
                continue
            faults += [
                f"{path.relative_to(ROOT)} line {node.lineno} imports {target}"
                for target in targets
                if target.split(".")[0] in {"models", "conf"}
            ]
    assert faults == []


def device_words(tree: ast.AST) -> Iterator[str]:
    """What only a platform may say: device modules, device methods, device backends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"cuda", "npu"}:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in {"nccl", "hccl"}:
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                is_device = name.startswith(("torch.cuda", "torch.npu"))
                if is_device or name.split(".")[0] in {"torch_npu", "torchair"}:
                    yield f"line {node.lineno}: {name}"


def test_device_words_are_said_in_platforms_only() -> None:
    faults = [
        f"{module} {word}"
        for module, tree in TREES.items()
        if package_of(module) not in DEVICE_PACKAGES
        for word in device_words(tree)
    ]
    assert faults == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch_npu",
        "from torch.cuda import Stream",
        "torch.npu.synchronize()",
        "x = x.cuda()",
        "backend = 'hccl'",
    ],
)
def test_device_words_sees(line: str) -> None:
    assert list(device_words(ast.parse(line)))


def torch_free_modules() -> list[str]:
    return [
        module
        for module in SOURCES
        if module == "inferkit"
        or any(is_within(module, package) for package in TORCH_FREE if package != "inferkit")
        or (package_of(module) == "models" and module.endswith(".arch"))
    ]


def test_torch_free_modules_do_not_name_torch_when_imported() -> None:
    free = set(torch_free_modules())
    faults = [
        str(found)
        for found in IMPORTS
        if found.module in free and found.is_eager and found.target.split(".")[0] == "torch"
    ]
    assert faults == []


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level names in sys.modules after `statement` ran in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_command_line_loads_neither_torch_nor_what_serves() -> None:
    loaded = modules_loaded_by("import inferkit, inferkit.cli")
    assert loaded.isdisjoint({"torch"} | ONLINE_PACKAGES)


def test_the_runner_of_a_role_loads_what_serves_only_when_it_runs() -> None:
    loaded = modules_loaded_by("import inferkit.online.runner")
    assert loaded.isdisjoint({"torch"} | ONLINE_PACKAGES)


def test_package_loads_neither_torch_nor_hydra() -> None:
    loaded = modules_loaded_by("import inferkit")
    assert loaded.isdisjoint({"torch", "hydra", "omegaconf", "transformers"})


def test_torch_free_modules_load_without_torch() -> None:
    modules = [module for module in torch_free_modules() if module != "inferkit.__main__"]
    assert "torch" not in modules_loaded_by("\n".join(f"import {name}" for name in modules))
