"""Reports in a real browser: needs Chromium (Debian: apt-get install chromium)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferkit.config.arguments import parse_arguments
from inferkit.inspect.report.verb import add_options, run
from tests.inspect.report.chromium import Tab, find_browser, open_browser
from tests.inspect.report.reported import write_reported_run, write_reported_sweep

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_browser() is None, reason="no browser is installed"),
]

SHOWN_KEYS = "[...document.querySelectorAll('.keys tbody tr')].filter(r => r.offsetParent).length"
CELLS = "[...document.querySelectorAll('#cells tbody tr')].map(r => r.cells[0].textContent.trim())"
TOO_WIDE = """
[...document.querySelectorAll("body *")]
  .filter(e => e.getBoundingClientRect().right > WIDTH && !e.closest(".wide > *, nav > *"))
  .map(e => e.outerHTML.slice(0, 120))
"""
"""Elements that stick out, beside those that can be moved."""
WIDTHS = (320, 480, 800, 1280, 1920)
SCREENSHOTS = "REPORT_SCREENSHOTS"
"""A folder that keeps what the browser shows, to be looked at."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {
        "run": write_reported_run(tmp_path_factory.mktemp("run")),
        "sweep": write_reported_sweep(tmp_path_factory.mktemp("sweep")),
    }
    for folder in folders.values():
        assert run(parse_arguments([str(folder)], add_options)) == 0
    return {name: folder / "report.html" for name, folder in folders.items()}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_it_opens_from_disk_and_asks_the_network_for_nothing(
    tab: Tab, reports: dict[str, Path], name: str
) -> None:
    tab.requests.clear()
    tab.complaints.clear()

    tab.open(reports[name])

    asked = {url for url in tab.requests if not url.startswith("data:")}
    assert asked == {reports[name].as_uri()}
    assert tab.complaints == []
    assert not tab.value("document.title").startswith("broken in")
    assert tab.value("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


@pytest.mark.parametrize("name", ["run", "sweep"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_every_width(tab: Tab, reports: dict[str, Path], name: str, width: int) -> None:
    tab.open(reports[name], width=width)

    _keep_screenshot(tab, f"{name}-{width}")
    assert tab.value(TOO_WIDE.replace("WIDTH", str(width))) == []
    assert tab.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_is_light_or_dark_as_the_reader_likes(
    tab: Tab, reports: dict[str, Path], is_dark: bool
) -> None:
    tab.open(reports["sweep"], is_dark=is_dark)

    colour = tab.value("getComputedStyle(document.body).backgroundColor")
    red = int(colour.removeprefix("rgb(").partition(",")[0])
    assert (red < 64) if is_dark else (red > 192)
    _keep_screenshot(tab, f"sweep-{'dark' if is_dark else 'light'}")


def test_keys_are_filtered(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["run"])

    few = tab.value(SHOWN_KEYS)
    _type(tab, "COMMAND line, scheduler.max_new 4")
    assert tab.value(SHOWN_KEYS) == 1
    _type(tab, "conf/parallel/tp2.yaml")
    assert tab.value(SHOWN_KEYS) > 1
    _type(tab, "nothing like it")
    assert tab.value(SHOWN_KEYS) == 0
    _type(tab, "")
    tab.value("document.getElementById('defaults').click()")
    assert tab.value(SHOWN_KEYS) > 100 > few > 5


def test_cells_are_sorted(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["sweep"])
    assert tab.value(CELLS) == ["#0", "#1 *", "#2"]

    _click_heading(tab, "seconds")
    assert tab.value(CELLS) == ["#2", "#1 *", "#0"]
    _click_heading(tab, "tokens/s")
    assert tab.value(CELLS) == ["#0", "#1 *", "#2"]
    _click_heading(tab, "tokens/s")
    assert tab.value(CELLS) == ["#1 *", "#0", "#2"]  # what has no figure stays last


def test_without_its_script_everything_is_there(tab: Tab, reports: dict[str, Path]) -> None:
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(reports["run"])
        assert tab.value(SHOWN_KEYS) > 100
        assert tab.value("document.querySelector('.tools').hidden")
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)


def test_on_paper_nothing_is_folded(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["run"])

    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value("document.querySelectorAll('details:not([open])').length") == 0
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value("document.querySelectorAll('details:not([open])').length") == 1


def _type(tab: Tab, text: str) -> None:
    filter_of = "document.getElementById('filter')"
    tab.value(f"{filter_of}.value = {text!r}; {filter_of}.dispatchEvent(new Event('input'))")


def _click_heading(tab: Tab, text: str) -> None:
    headings = "[...document.querySelectorAll('#cells th button')]"
    tab.value(f"{headings}.find(b => b.textContent === {text!r}).click()")


def _keep_screenshot(tab: Tab, name: str) -> None:
    folder = os.environ.get(SCREENSHOTS)
    if folder:
        import base64

        shot = tab.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(shot))
