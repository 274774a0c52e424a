"""Where in the code an error was raised: the file and line that tell a user most."""

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent.parent


def told(error: BaseException) -> str:
    """The error's type and message as `ValueError: no such thing`."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")


def told_with_place(error: BaseException, *, inside: Path | None = None) -> str:
    """The error's type and message, and on a line of its own `  at FILE:LINE in FUNCTION`."""
    place = place_of(error, inside=inside)
    return f"{told(error)}\n  at {place}" if place else told(error)


def place_of(error: BaseException, *, inside: Path | None = None) -> str:
    """`FILE:LINE in FUNCTION` of the frame that tells most; empty where there is none.

    That is the innermost one in a user's own code, else in inferkit, else the innermost of all.

    Args:
        inside: a file, or a folder: a frame in there comes before all others.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown_path(error.filename)}:{error.lineno}"
    frames = list(_frames(error))
    if not frames:
        return ""
    file, line, function = max(
        enumerate(frames), key=lambda entry: (_weight(entry[1][0], inside), entry[0])
    )[1]
    where = "" if function == "<module>" else f" in {function}"
    return f"{shown_path(file)}:{line}{where}"


def is_raised_by_inferkit(error: BaseException) -> bool:
    """Whether the innermost frame is in this package."""
    frames = list(_frames(error))
    return bool(frames) and Path(frames[-1][0]).resolve().is_relative_to(PACKAGE_DIR)


def shown_path(file: str) -> str:
    """Relative to this folder where it is below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of every frame in a file, outermost first."""
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if os.path.isfile(code.co_filename):
            yield code.co_filename, step.tb_lineno, code.co_name
        step = step.tb_next


def _weight(file: str, inside: Path | None) -> int:
    path = Path(file).resolve()
    if inside is not None and path.is_relative_to(inside):
        return 3
    if path.is_relative_to(PACKAGE_DIR):
        return 1
    return 0 if any(path.is_relative_to(folder) for folder in _library_folders()) else 2


@cache
def _library_folders() -> tuple[Path, ...]:
    """Python's own modules and installed packages."""
    paths = sysconfig.get_paths()
    return tuple(Path(paths[n]).resolve() for n in ("stdlib", "platstdlib", "purelib", "platlib"))
