"""The wheel: same files from the tree and through the sdist, and it runs away from the checkout."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# Imported package -> the declared package that cannot do without it.
BROUGHT_BY_OTHERS = {
    "markupsafe": "jinja2",
    "anyio": "httpx",
    "yaml": "omegaconf",
    "tokenizers": "transformers",
    "pydantic": "fastapi",
    "starlette": "fastapi",
}


def run(command: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(kind: str, tree: Path, target: Path) -> Path:
    """Build a `wheel` or `sdist` of `tree` into `target`; nothing is downloaded."""
    run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)], cwd=tree)
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` folder of a fresh environment with the wheel; its dependencies are this one's."""
    venv = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], cwd=venv)
    python = venv / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index"]
    run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)],
        cwd=venv,
    )
    site = run([str(python), "-c", "import site; print(site.getsitepackages()[0])"], cwd=venv)
    Path(site.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


@pytest.fixture
def outside(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A working directory away from the checkout, and an environment that does not lead back."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return tmp_path, env


def members(archive: Path) -> set[str]:
    """Files of a wheel or sdist (an sdist's one top folder is left out)."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def tree_files(folder: str) -> set[str]:
    """Files of a top-level folder, relative to the checkout; what git ignores is left out."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not any(parent.is_symlink() for parent in path.parents)
    }


def test_wheel_holds_the_package_with_conf_and_models_inside(wheel: Path) -> None:
    expected = tree_files("inferkit")
    expected |= {f"inferkit/{name}" for name in tree_files("conf") | tree_files("models")}
    packaged = {name for name in members(wheel) if ".dist-info/" not in name}
    assert packaged == expected
    assert "inferkit/conf/config.yaml" in packaged


def test_wheel_puts_only_inferkit_at_the_top(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in members(wheel)}
    assert tops == {"inferkit", f"inferkit-{PYPROJECT['project']['version']}.dist-info"}


def test_wheel_carries_the_licence(wheel: Path) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in members(wheel))


def test_wheel_through_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as tar:
        # Later releases of Python 3.11 know filters, and 3.12 warns without one.
        tar.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    again = build("wheel", tree, tmp_path)
    assert members(again) == members(wheel)


def test_sdist_holds_tests_and_launchers_and_no_links(sdist: Path) -> None:
    packaged = members(sdist)
    assert {
        "tests/conftest.py",
        "launchers/offline_single_node.sh",
        "README.md",
        "LICENSE",
    } <= packaged
    assert not any(name.startswith(("inferkit/conf/", "inferkit/models/")) for name in packaged)


def test_checkout_has_conf_and_models_as_links() -> None:
    links = {name: ROOT / "inferkit" / name for name in ("conf", "models")}
    if not any(link.exists() for link in links.values()):
        return  # an unpacked sdist: the wheel maps the folders
    for name, link in links.items():
        assert os.readlink(link) == f"../{name}"


def test_installed_module_composes_the_configuration_elsewhere(
    installed: Path, outside: tuple[Path, dict[str, str]]
) -> None:
    cwd, env = outside
    printed = run([str(installed / "python"), "-m", "inferkit", "--cfg", "job"], cwd=cwd, env=env)
    assert "allowed_targets: []" in printed
    assert not (cwd / "outputs").exists()


def test_installed_package_is_not_the_checkout(
    installed: Path, outside: tuple[Path, dict[str, str]]
) -> None:
    cwd, env = outside
    code = "import inferkit; print(inferkit.__file__)"
    printed = run([str(installed / "python"), "-c", code], cwd=cwd, env=env)
    assert Path(printed.strip()).is_relative_to(installed.parent)


def test_installed_command_runs_the_main_job_elsewhere(
    installed: Path,
    outside: tuple[Path, dict[str, str]],
    tiny_hf_model: Callable[..., Path],
) -> None:
    cwd, env = outside
    command = [
        str(installed / "inferkit"),
        "model=llama",
        f"model.path={tiny_hf_model('llama')}",
        "model.with_ckpt=false",
        "model.dtype=float32",
        "scheduler.max_new_tokens=4",
        "data.limit=2",
    ]
    run(command, cwd=cwd, env=env)
    (generations,) = (cwd / "outputs").rglob("generations.jsonl")
    rows = [json.loads(line) for line in generations.read_text("utf-8").splitlines()]
    assert len(rows) == 2
    assert all(1 <= len(row["token_ids"]) <= 4 for row in rows)


def declared() -> set[str]:
    """Names of the packages that pyproject.toml requires, the plots and npu extras included."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    requirements = [*PYPROJECT["project"]["dependencies"], *extras["plots"], *extras["npu"]]
    return {normalized(requirement) for requirement in requirements}


def normalized(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def third_party_imports() -> set[str]:
    names = set()
    for path in [*(ROOT / "inferkit").glob("**/*.py"), *(ROOT / "models").glob("**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names) - {"inferkit"}


def test_every_third_party_import_is_declared() -> None:
    distributions = packages_distributions()
    missing = {
        name
        for name in third_party_imports()
        if not declared() & {normalized(found) for found in distributions.get(name, [name])}
        and BROUGHT_BY_OTHERS.get(name) not in declared()
    }
    assert missing == set()


def test_every_declared_version_is_pinned_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {normalized(line) for line in lines if "==" in line}
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = {normalized(requirement) for requirement in PYPROJECT["project"]["dependencies"]}
    names = ("plots", "optuna", "slurm", "dev")
    wanted |= {normalized(requirement) for name in names for requirement in extras[name]}
    assert wanted - pinned == set()


def test_every_dependency_says_why_it_is_there() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    requirements = [*PYPROJECT["project"]["dependencies"], *(entry for e in extras for entry in e)]
    silent = [
        requirement
        for requirement in requirements
        if not re.search(re.escape(f'"{requirement}",') + r"\s+# \S", text)
    ]
    assert silent == []
