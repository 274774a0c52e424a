"""What no committed file may hold: machine facts, pickles, stray prints, text outside ASCII."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("inferkit", "conf", "models", "launchers", "tests", ".ci")
TEXT_SUFFIXES = {"", ".py", ".yaml", ".yml", ".toml", ".md", ".txt", ".sh", ".json", ".jsonl"}
SKIPPED = ("__pycache__/", ".ci/cache/")

# Each pattern is written so that it does not find itself.
MACHINE_FACTS = {
    "a path of one machine": (
        r"(?<![\w.}])/(?:wor[k]|roo[t]|Users|opt/[p]ypi|home/(?!someone/)[a-z]\w*)/"
    ),
    "a package registry": r"py[p]i\.org|[p]ythonhosted|npm[j]s|deb\.[d]ebian|/simpl[e]/",
}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj"}
PRINTING = (
    "inferkit/bench/",
    "inferkit/cli",
    "inferkit/config/reference.py",
    "inferkit/inspect/",
    "inferkit/offline/summary.py",
    "inferkit/sweep/",
)


def files() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != "LICENSE"]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_link = any(parent.is_symlink() for parent in (path, *path.parents))
            is_skipped = any(part in name_of(path) for part in SKIPPED)
            if path.is_file() and not is_link and not is_skipped:
                found.append(path)
    return [path for path in found if path.suffix in TEXT_SUFFIXES]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def product_sources() -> list[Path]:
    return [
        path
        for path in files()
        if path.suffix == ".py" and name_of(path).startswith(("inferkit/", "models/"))
    ]


@pytest.mark.parametrize("what", MACHINE_FACTS)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(MACHINE_FACTS[what])
    faults = [
        f"{name_of(path)}:{number}: {line.strip()[:80]}"
        for path in files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of one machine", "cache = '" + "/ro" + "ot/.cache'"),
        ("a path of one machine", "open('" + "/home" + "/developer/model')"),
        ("a package registry", "https://py" + "pi.org/project"),
    ],
)
def test_patterns_see(what: str, line: str) -> None:
    assert re.search(MACHINE_FACTS[what], line)


def pickle_uses(tree: ast.AST) -> Iterator[str]:
    """Pickles that are read or written, and code or checkpoints that could hold one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Attribute):
            is_torch_load = ast.unparse(node) == "torch.load"
            names = [node.attr] if node.attr in PICKLING_CALLS or is_torch_load else []
        elif isinstance(node, ast.keyword):
            is_on = not (isinstance(node.value, ast.Constant) and node.value.value is False)
            names = ["trust_remote_code"] if node.arg == "trust_remote_code" and is_on else []
        else:
            continue
        for name in names:
            if name.split(".")[0] in PICKLES or name in PICKLING_CALLS | {
                "load",
                "trust_remote_code",
            }:
                yield f"line {node.lineno}: {name}"


def test_no_pickle_and_no_remote_code() -> None:
    faults = [
        f"{name_of(path)} {use}"
        for path in product_sources()
        for use in pickle_uses(ast.parse(path.read_text("utf-8")))
    ]
    assert faults == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "socket.send_pyobj(x)",
        "weights = torch.load(path)",
        "tokenizer(path, trust_remote_code=True)",
    ],
)
def test_pickle_uses_sees(line: str) -> None:
    assert list(pickle_uses(ast.parse(line)))


def test_print_is_for_terminal_output_only() -> None:
    faults = [
        f"{name_of(path)} line {node.lineno}"
        for path in product_sources()
        if not name_of(path).startswith(PRINTING)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert faults == []


def test_code_and_configuration_are_ascii() -> None:
    faults = [
        name_of(path)
        for path in files()
        if path.suffix in {".py", ".yaml", ".toml", ".sh"}
        and not name_of(path).startswith("tests/")
        and not path.read_text("utf-8").isascii()
    ]
    assert faults == []


def test_option_files_open_with_a_line_of_why() -> None:
    faults = [
        name_of(path)
        for path in files()
        if path.suffix == ".yaml"
        and name_of(path).startswith("conf/")
        and not path.read_text("utf-8").startswith("#")
    ]
    assert faults == []
