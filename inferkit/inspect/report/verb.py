"""The verb `report`: one HTML file of a run or a sweep."""

import argparse
from pathlib import Path

from inferkit.config.arguments import Arguments, UsageError
from inferkit.config.provenance import RESOLVED_FILE, write_text
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.core.exit_codes import EXIT_OK
from inferkit.inspect.report.page import render
from inferkit.inspect.report.run import run_page
from inferkit.inspect.report.sweep import sweep_page, with_pictures
from inferkit.sweep.outcomes import SWEEP_FILE
from inferkit.sweep.summary import read_summary

USAGE = """\
Write one HTML file of a run or a sweep, to be read in a browser, sent or printed.

Usage: inferkit report DIR [--output FILE]

  inferkit report outputs/2026-01-31/12-00-00-1
  inferkit report outputs/sweeps/2026-01-31/12-00-00-1

It shows how the run ended, its metrics, pictures and generations, the configuration with who has
set each key, what follows from it, and the provenance; of a sweep the table of its cells, which can
be sorted, and its pictures. Everything is in the file: it opens without a network.

  --output FILE   where it goes; default: report.html in the folder

Exit code: 0 = written, 2 = DIR is no folder of a run or a sweep, or FILE cannot be written."""
REPORT_FILE = "report.html"
SWEEP_FILES = (SWEEP_FILE, "multirun.yaml")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path)


def run(arguments: Arguments) -> int:
    """Write the report and say where it is.

    Raises:
        UsageError: not one folder is named.
        ConfigError: it is none of a run or sweep, or the report cannot be written.
    """
    folder = _folder(arguments)
    output = arguments.options.output or folder / REPORT_FILE
    if output.is_dir():
        output = output / REPORT_FILE
    html = report_html(folder, arguments.space(), output)
    try:
        write_text(output, html)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror}; name another place with --output FILE"
        ) from None
    print(f"report: {output}")
    return EXIT_OK


def report_html(folder: Path, space: ConfigSpace, output: Path) -> str:
    """The report of the run or sweep in `folder`.

    Args:
        output: where it will be written; its links lead from there.

    Raises:
        ConfigError: it is neither, or a file of it cannot be read.
    """
    if _is_sweep(folder):
        try:
            found = read_summary(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: its {SWEEP_FILE} cannot be read: {error}") from None
        with with_pictures(found) as summary:
            return render(sweep_page(summary, space, output))
    return render(run_page(folder, space))


def _is_sweep(folder: Path) -> bool:
    if (folder / RESOLVED_FILE).is_file():
        return False
    return any((folder / name).is_file() for name in SWEEP_FILES)


def _folder(arguments: Arguments) -> Path:
    words = arguments.overrides
    if len(words) != 1 or arguments.is_multirun:
        raise UsageError(
            "report takes the folder of one run or sweep, as inferkit report outputs/..."
        )
    folder = Path(words[0])
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    return folder
