import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.arguments import UsageError, parse_arguments
from inferkit.core.errors import ConfigError
from inferkit.inspect.report.figures import figure_text
from inferkit.inspect.report.page import Failure, Page, link_to, render
from inferkit.inspect.report.requests import long_text, requests_table
from inferkit.inspect.report.verb import add_options, run
from tests.inspect.report.reported import EVIL, write_reported_run, write_reported_sweep

VOID = {"meta", "img", "input"}


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.attributes if name == tag]

    @property
    def whole(self) -> str:
        shown = (text for tag, texts in self.texts.items() for text in texts)
        return "\n".join(shown)


def written(folder: Path, *words: str, output: Path | None = None) -> str:
    """The page that the verb writes."""
    assert run(parse_arguments([str(folder), *words], add_options)) == 0
    return (output or folder / "report.html").read_text("utf-8")


@pytest.fixture(scope="module", autouse=True)
def nothing_was_fetched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The sizes of the embedded model are not known, wherever this runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reported_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run_html(run_dir: Path) -> str:
    return written(run_dir)


@pytest.fixture(scope="module")
def run_page(run_html: str) -> Reader:
    return Reader(run_html)


@pytest.fixture(scope="module")
def sweep_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reported_sweep(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def sweep_page(sweep_dir: Path) -> Reader:
    return Reader(written(sweep_dir))


def page_of(**parts: Any) -> Reader:
    """A page that has just these parts."""
    return Reader(render(Page(title="x", status="ok", is_ok=True, **parts)))


def test_a_run_shows_how_it_ended_and_its_figures(run_page: Reader) -> None:
    assert run_page.texts["title"] == ["SmolLM2-135M-Instruct: offline run"]
    assert "inferkit parallel=tp2 scheduler.max_new_tokens=4" in run_page.texts["pre"]
    assert "took 3.25 s" in run_page.texts["span"]
    assert "123" in run_page.texts["b"]
    assert {"ttft_s", "200 ms"} <= {*run_page.texts["th"], *run_page.texts["td"]}
    assert "expert_load.layers" not in run_page.whole


def test_a_run_shows_its_configuration_with_origins(run_page: Reader) -> None:
    assert "scheduler.max_new_tokens" in run_page.texts["code"]
    assert "command line, scheduler.max_new_tokens=4" in run_page.texts["td"]
    assert re.search(r", default, inferkit/config/schema.py:\d+", run_page.whole)
    assert "parallel=tp2, conf/parallel/tp2.yaml:2" in run_page.texts["td"]
    kinds = [row.get("class") for row in run_page.of("tr")]
    assert kinds.count("set") == 1
    assert kinds.count("default") > 50


def test_a_run_shows_what_follows_and_where_it_was_made(run_page: Reader) -> None:
    assert "world_size / attn_tp_size = 2 / 2" in run_page.texts["td"]
    assert any(text.startswith("inferkit 0") for text in run_page.texts["dd"])


def test_nothing_is_loaded_from_elsewhere(run_page: Reader, sweep_page: Reader) -> None:
    for page in (run_page, sweep_page):
        loads = [
            value or ""
            for tag, attributes in page.attributes
            for name, value in attributes.items()
            if name in ("src", "href", "action", "data", "poster", "srcset")
        ]
        assert loads
        assert all(re.match(r"data:image/png;base64,|#\w+$|\d+/$", value) for value in loads)
        assert not re.search(r"url\(|@import", page.texts["style"][0])


def test_texts_of_others_are_texts(run_page: Reader, sweep_page: Reader) -> None:
    assert f"user: {EVIL}" in run_page.texts["pre"]
    assert len(run_page.of("script")) == 1
    assert not any("onerror" in attributes for _, attributes in run_page.attributes)
    assert f": rank 0 {EVIL}" in sweep_page.texts["p"]
    assert len(sweep_page.of("script")) == 1


def test_the_policy_allows_our_own_script_and_style_and_nothing_else(run_html: str) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', run_html)
    assert policy.startswith("default-src 'none'; img-src data:;")
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", run_html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert " style=" not in run_html


def test_pictures_are_in_the_file(run_page: Reader, run_dir: Path) -> None:
    (picture,) = run_page.of("img")

    data = (picture["src"] or "").removeprefix("data:image/png;base64,")
    assert base64.b64decode(data) == (run_dir / "steps.png").read_bytes()
    assert picture["alt"]


def test_long_texts_are_folded(run_page: Reader) -> None:
    assert len(run_page.of("details")) == 1
    assert any(len(text) > 1900 for text in run_page.texts["pre"])
    assert long_text("x" * 25_000).whole.endswith("\n... 5,000 more characters")


def test_a_run_that_did_not_come_to_its_end_is_shown_as_far_as_it_goes(
    run_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run_dir, tmp_path / "run"))
    for name in ("metrics.json", "origins.json", "generations.jsonl", "steps.png"):
        (folder / name).unlink()
    error = {"error": "worker 0 died", "traceback": "Traceback (most recent"}
    (folder / "result.json").write_text(json.dumps({"status": "failed", **error}))

    run_page = Reader(written(folder))

    assert "failed" in run_page.texts["span"]
    assert ": worker 0 died" in run_page.texts["p"]
    assert "Traceback (most recent" in run_page.texts["pre"]
    assert "not recorded" in run_page.texts["td"]
    assert run_page.of("img") == []


def test_secrets_do_not_get_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "Zx81-marker-Qq")

    page = page_of(errors=[Failure(title="failed", text="no access with Zx81-marker-Qq")])

    assert page.texts["p"] == [": no access with <secret MY_API_KEY>"]


def test_characters_that_turn_or_break_a_page_are_replaced() -> None:
    text = "a\0b\u202ec\x1b[1m\ud800 \u00e9\u2713"

    page = page_of(errors=[Failure(title="failed", text=text)])

    assert page.texts["p"] == [": a\ufffdb\ufffdc\ufffd[1m\ufffd \u00e9\u2713"]


def test_the_times_of_a_load(tmp_path: Path) -> None:
    times = {"ttft_s": 0.25, "tpot_s": 0.01, "e2e_s": 1.0, "num_prompt_tokens": 8}
    lines = [
        {"request_id": 1, "finish_reason": "failed", "error": EVIL, **dict.fromkeys(times)},
        {"request_id": 0, "finish_reason": "length", "error": None, "token_ids": [1], **times},
    ]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")

    page = page_of(requests=requests_table(tmp_path))

    good = ["0", "8", "1", "length", "250", "10", "1000"]
    assert page.texts["td"] == [*good, "1", "0", f"failed: {EVIL}"]
    assert [row.get("class") for row in page.of("tr")] == [None, None, "bad"]


def test_a_sweep_shows_its_cells(sweep_page: Reader) -> None:
    assert sweep_page.texts["title"] == ["SmolLM2-135M-Instruct: sweep of 3 cells"]
    assert "2 of 3 cells ok" in sweep_page.texts["span"]
    assert "* best by output_tokens_per_s: #1 with scheduler.batch_size=2" in sweep_page.texts["p"]
    assert [
        row.get("class") for row in sweep_page.of("tr") if row.get("class") in ("best", "bad")
    ] == [
        "best",
        "bad",
    ]
    assert "Traceback of the cell" in sweep_page.texts["pre"]
    assert any(text.startswith("Of cell #1, the best") for text in sweep_page.texts["p"])
    assert "sortable" in [table.get("class") for table in sweep_page.of("table")]


def test_a_sweep_without_pictures_gets_them_for_the_report(
    sweep_page: Reader, sweep_dir: Path
) -> None:
    pytest.importorskip("matplotlib")

    assert len(sweep_page.of("img")) == 2
    assert not list(sweep_dir.glob("*.png"))


def test_links_lead_to_the_cells_from_wherever_the_report_is(
    sweep_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a folder" / "mine.html"

    page = Reader(written(sweep_dir, "--output", str(output), output=output))

    links = [
        link["href"] or "" for link in page.of("a") if not (link["href"] or "").startswith("#")
    ]
    assert len(links) == 3
    assert all((output.parent / link).resolve().parent == sweep_dir for link in links)
    assert link_to(tmp_path / "b c", output) == "../b%20c"


def test_the_verb_says_where_the_report_is(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse_arguments([str(run_dir), "--output", str(tmp_path)], add_options)) == 0

    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"


def test_what_cannot_be_reported_is_refused(run_dir: Path, tmp_path: Path) -> None:
    def report_of(*words: str) -> None:
        run(parse_arguments(words, add_options))

    with pytest.raises(UsageError, match="takes the folder of one run or sweep"):
        report_of()
    with pytest.raises(UsageError, match="takes the folder of one run or sweep"):
        report_of(str(run_dir), str(run_dir))
    with pytest.raises(ConfigError, match="there is no such folder"):
        report_of("outputs/gone")
    with pytest.raises(ConfigError, match="is no run directory"):
        report_of(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be written: "):
        report_of(str(run_dir), "--output", f"{run_dir}/result.json/x.html")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peak_memory_bytes", 3 * 2**20, "3.0 MiB"),
        ("wall_time_s", 12.34, "12.3 s"),
        ("steady_decode_mean_s", 0.0123, "12.3 ms"),
        ("output_tokens_per_s", 1234.5, "1234"),
        ("num_requests", 12345, "12,345"),
        ("name", "x", "x"),
    ],
)
def test_a_figure_has_the_unit_of_its_name(name: str, value: float | str, text: str) -> None:
    assert figure_text(name, value) == text


def test_of_many_failures_the_first_are_open() -> None:
    page = page_of(errors=[Failure(title=f"#{number} failed") for number in range(15)])

    assert page.texts["summary"] == ["and 3 more"]
    assert page.texts["b"] == [f"#{number} failed" for number in range(15)]
