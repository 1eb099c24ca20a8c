"""The page as a file, and in a browser."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import needs_chromium, open_tab
from logged_runs import write_run

from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.page.page import MAX_EVENTS, write_page

EVIL = "</script><script>document.title='run'</script><img src=x onerror=document.title='run'>"
METRICS = {
    "reward/mean": [0.25, 0.5, 0.75],
    "reward/std": [0.5, 0.25, 0.25],
    "reward/math/mean": [0.25, 0.5, 0.75],
    f"reward/{EVIL}/mean": [0.25, 0.5, 0.75],
    "policy/loss": [0.1, 0.0, -0.1],
    "val/accuracy": [0.5, None, 0.75],
    "timing/step_duration_s": [2.0, 2.5, 2.0],
    "timing/generation_duration_s": [1.0, 1.5, 1.0],
}
NUM_CHARTS = 6
READABLE = 4.5
"""The contrast that WCAG 2.2, success criterion 1.4.3, asks of a text."""
TEXTS = """(() => {
  const isText = (node) => node.nodeType === 3 && node.data.trim();
  const hasText = (one) => [...one.childNodes].some(isText);
  const isShown = (one) => one.checkVisibility() && !one.disabled && !one.closest("script, style");
  const colors = (element) => {
    const style = getComputedStyle(element);
    let behind = element;
    while (behind.parentElement && /, 0\\)$/.test(getComputedStyle(behind).backgroundColor))
      behind = behind.parentElement;
    const text = element instanceof SVGElement ? style.fill : style.color;
    return [text, getComputedStyle(behind).backgroundColor];
  };
  const place = (element) => element.closest("section")?.id || "header";
  const name = (element) => `${element.tagName}.${element.getAttribute("class") || ""}`;
  return [...document.body.querySelectorAll("*")].filter(hasText).filter(isShown)
    .map((one) => [place(one), name(one), ...colors(one)]);
})()"""
"""Of every text that is shown: its section, its element, its colour, that of what is behind it."""
PLACES = {"header", "summary", "curves", "events", "completions", "entry"}
NUM_EMPTY = """[...document.querySelectorAll('#events td:empty')]
  .filter((one) => one.checkVisibility()).length"""
"""Messages of events that have none: a start."""
LAST_TICK = "[...document.querySelector('.plot').querySelectorAll('.xtick')].at(-1).textContent"
AXIS = "document.querySelector('[data-axis=%s]').click()"
PLACES_OF_POINTS = "document.querySelector('.plot').data.map((trace) => [...trace.x])"
EVENTS = [
    {"step": 0, "kind": "start"},
    {"step": 2, "kind": "alert", "cause": EVIL, "message": f"Half are truncated. {EVIL}"},
    {"step": 3, "kind": "crash", "message": EVIL},
]
COMPLETIONS = {
    step: [
        {"completion": f"plain {step}", "reward": 0.25 * step},
        {"completion": EVIL, "prompt": EVIL, "prompt_id": EVIL, "detail/math": EVIL, "reward": 9.0},
        {"completion": "long", "finish_reason": "length", "valid": False, "reward": None},
    ]
    for step in range(3)
}


class Parsed(HTMLParser):
    """The elements of a page, with their attributes, and the texts of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._is_script = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._is_script = False

    def handle_data(self, data):
        if self._is_script:
            self.scripts[-1] += data
        else:
            self.text += data


def make_run(path: Path, **changes) -> Path:
    given = {"events": EVENTS, "completions": COMPLETIONS} | changes
    return write_run(path, METRICS, **given)


def make_evaluated_run(path: Path) -> Path:
    """Write the run of `make_run` with a row before its first step, where it was evaluated."""
    rows = {name: [None, *values] for name, values in METRICS.items()}
    rows |= {"val/accuracy": [0.5, None, None, 0.75]}
    return write_run(path, rows, events=EVENTS, completions=COMPLETIONS, first_step=-1)


def make_phases(directory: Path) -> Path:
    return write_run(directory / "run" / "0", METRICS | {"curriculum/phase": [1, 1, 2]})


def make_comparison(directory: Path) -> Path:
    """Write two runs with long names and return the page that compares them."""
    runs = [make_run(directory / ("a_long_name" * 8) / name) for name in "01"]
    return make_page(directory / "comparison-1.html", *runs)


def make_page(path: Path, *run_dirs: Path, **settings) -> Path:
    write_page(load_runs(run_dirs), path, **settings)
    return path


def parse(page: Path) -> Parsed:
    return Parsed(page.read_text())


def test_texts_of_a_run_are_no_elements_of_the_page(tmp_path):
    page = parse(make_page(tmp_path / "report.html", make_run(tmp_path / "run" / "0")))
    tags = [tag for tag, _ in page.elements]
    assert (tags.count("script"), tags.count("img")) == (3, 0)
    data = json.loads(page.scripts[0])
    assert data["completions"]["rows"][1]["completion"] == EVIL
    assert page.text.count(EVIL) >= 3


def test_only_the_page_s_own_scripts_may_run_and_nothing_is_fetched(tmp_path):
    page = parse(make_page(tmp_path / "report.html", make_run(tmp_path / "run" / "0")))
    policies = [found["content"] for _, found in page.elements if "http-equiv" in found]
    nonces = {found["nonce"] for tag, found in page.elements if "nonce" in found}
    (policy,), (nonce,) = policies, nonces
    assert policy.startswith(f"default-src 'none'; script-src 'nonce-{nonce}';")
    linked = [found for _, found in page.elements if found.keys() & {"src", "href", "srcset"}]
    assert linked == []
    assert "http" not in page.scripts[2]


def test_a_page_is_moved_into_place_with_a_nonce_of_its_own(tmp_path):
    run = make_run(tmp_path / "run" / "0")
    first = make_page(tmp_path / "report.html", run).read_text()
    second = make_page(tmp_path / "report.html", run).read_text()
    assert first != second
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_the_newest_events_are_in_the_table(tmp_path):
    events = [
        {"step": 1, "kind": "alert", "message": f"number {n};"} for n in range(MAX_EVENTS + 5)
    ]
    page = parse(make_page(tmp_path / "report.html", make_run(tmp_path / "r" / "0", events=events)))
    assert f"The newest {MAX_EVENTS} of {MAX_EVENTS + 5}." in page.text
    assert "number 4;" not in page.text
    assert "number 5;" in page.text


def test_a_run_with_metrics_only_has_a_page(tmp_path):
    run = write_run(tmp_path / "run" / "0", {"mine": [0.5]})
    page = parse(make_page(tmp_path / "report.html", run, read_up_to=1))
    assert "Only the first 1 steps of each run are shown." in page.text
    assert "None were recorded." in page.text
    assert "None were logged." in page.text


def contrast(*colors: str) -> float:
    """Return the contrast of two colours as the browser writes them, by WCAG 2.2's definition."""
    low, high = sorted(luminance(one) for one in colors)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    shares = [int(one) / 255 for one in re.findall(r"\d+", color)[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def browse(tmp_path: Path, look, *pages: Path) -> None:
    """Look at the first page in a browser, which must have no error and ask for nothing.

    Args:
        pages: All pages that are opened.
    """

    async def visit():
        async with open_tab(tmp_path / "profile") as tab:
            await tab.open(pages[0].as_uri())
            await look(tab)
            assert tab.errors == []
            kinds = {url.split(":")[0] for url in tab.requests}
            assert kinds <= {"file", "about", "data", "blob"}
            files = {url.split("#")[0] for url in tab.requests if url.startswith("file:")}
            assert files == {page.as_uri() for page in pages}

    asyncio.run(visit())


def test_the_page_has_the_steps_at_which_the_phases_of_a_curriculum_begin(tmp_path):
    data = json.loads(parse(make_page(tmp_path / "report.html", make_phases(tmp_path))).scripts[0])
    assert [run["phases"] for run in data["runs"]] == [[3]]


@pytest.mark.slow
@needs_chromium
def test_a_browser_draws_a_line_before_the_first_step_of_a_phase(tmp_path):
    page = make_page(tmp_path / "report.html", make_phases(tmp_path))
    lines = "document.querySelector('.plot').layout.shapes.map((one) => one.x0)"

    async def look(tab):
        assert await tab.evaluate(lines) == [2.5]
        await tab.evaluate(AXIS % "time")
        await tab.wait_for(f"{LAST_TICK}.endsWith(' s')")
        assert await tab.evaluate(lines) == [3.0]  # the end of step 2, 1.5 s a step

    browse(tmp_path, look, page)


@pytest.mark.slow
@needs_chromium
def test_a_browser_draws_the_charts_and_browses_the_completions(tmp_path):
    page = make_page(tmp_path / "report.html", make_evaluated_run(tmp_path / "run" / "0"))
    rows = "document.querySelectorAll('#rows tr.row').length"
    first = "document.querySelector('#rows tr.row').textContent"

    def type_in(text: str) -> str:
        element = "document.getElementById('search')"
        return f"{element}.value = {json.dumps(text)}; {element}.dispatchEvent(new Event('input'))"

    async def look(tab):
        drawn = await tab.evaluate("document.querySelectorAll('.plot .main-svg .trace').length")
        assert drawn >= NUM_CHARTS
        assert await tab.evaluate("document.body.dataset.drawn") == str(NUM_CHARTS)
        assert await tab.evaluate("document.querySelectorAll('.plot .shapelayer path').length") > 0
        assert await tab.evaluate(PLACES_OF_POINTS) == [[0, 3], [2, 3]]
        await tab.evaluate(AXIS % "time")
        await tab.wait_for(f"{LAST_TICK}.endsWith(' s')")
        assert await tab.evaluate(PLACES_OF_POINTS) == [[0, 4.5], [3, 4.5]]  # 1.5 s a step
        assert await tab.evaluate("location.hash") == "#axis=time"
        await tab.evaluate(AXIS % "steps")
        assert await tab.evaluate(rows) == 9
        await tab.evaluate(type_in("PLAIN 1"))
        assert await tab.evaluate(rows) == 1
        assert "plain 1" in await tab.evaluate(first)
        assert await tab.evaluate("location.hash") == "#q=PLAIN+1"
        await tab.evaluate(type_in("onerror"))
        assert await tab.evaluate(rows) == 3
        await tab.evaluate("document.querySelector('#rows tr.row').click()")
        detail = await tab.evaluate("document.querySelector('tr.detail').textContent")
        assert EVIL in detail
        assert "step_000002.parquet" in detail
        assert await tab.evaluate("document.title") == "run/0"
        await tab.evaluate(type_in(""))
        await tab.evaluate("document.querySelectorAll('#rows th button')[4].click()")
        assert "9" in await tab.evaluate(first)
        assert (
            await tab.evaluate("document.querySelector('th[aria-sort]').ariaSort") == "descending"
        )

    browse(tmp_path, look, page)


@pytest.mark.slow
@needs_chromium
def test_a_link_keeps_what_is_filtered_and_a_live_page_reloads_with_it(tmp_path):
    page = make_page(tmp_path / "report.html", make_run(tmp_path / "run" / "0"), reload_seconds=2)

    async def look(tab):
        await tab.open(f"{page.as_uri()}#axis=time&kind=truncated&step=2")
        count = "document.getElementById('count')?.textContent === '1 of 9 rows'"
        shown = f"{count} && document.querySelector('.plot')?.layout?.xaxis.ticksuffix === ' s'"
        await tab.wait_for(f"{shown} && (window.isOld = true)")
        await tab.wait_for(f"{shown} && !window.isOld")

    browse(tmp_path, look, page)


@pytest.mark.slow
@needs_chromium
def test_a_browser_compares_runs_hides_one_and_names_the_stages_that_have_room(tmp_path):
    page = make_comparison(tmp_path)
    lines = "document.querySelectorAll('.plot .scatterlayer .trace').length"
    names = "document.querySelector('.plot').layout.annotations.map((one) => one.text)"
    short = write_run(tmp_path / "sft", {"val/accuracy": [0.25]})
    config = {"model": {"policy": {"path": str(short / "final")}}}
    long = write_run(tmp_path / "grpo", {"val/accuracy": [0.5] * 40}, config=config)
    stages = make_page(tmp_path / "stages.html", short, long)

    async def look(tab):
        before = await tab.evaluate(lines)
        await tab.evaluate("document.querySelector('#legend button').click()")
        await tab.wait_for(f"{lines} < {before}")
        assert await tab.evaluate("document.querySelectorAll('#legend button').length") == 2
        await tab.open(stages.as_uri())
        assert await tab.evaluate(names) == [load_runs([long])[0].label]

    browse(tmp_path, look, page, stages)


@pytest.mark.slow
@needs_chromium
def test_a_page_fits_a_phone_and_is_readable_by_day_and_by_night(tmp_path):
    alone = make_page(tmp_path / "report.html", make_run(tmp_path / "run" / "0"))
    pages = [make_comparison(tmp_path), alone]
    num_starts = dict(zip(pages, (2, 1), strict=True))

    async def look(tab):
        for page, width, is_dark in itertools.product(pages, (390, 1400), (False, True)):
            view = f"{page.stem}, {width} wide, {'dark' if is_dark else 'light'}"
            await tab.open(f"{page.as_uri()}#", width=width, is_dark=is_dark)
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width, view
            assert await tab.evaluate(NUM_EMPTY) == (width > 390) * num_starts[page], view
            texts = await tab.evaluate(TEXTS)
            assert {place for place, *_ in texts} == PLACES, view
            bad = {tuple(one) for one in texts if contrast(*one[2:]) < READABLE}
            assert not bad, (view, bad)

    browse(tmp_path, look, *pages)
