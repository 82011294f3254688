"""Tests that the page is one file with the whole report, treats strings as text, and works in headless Chromium."""

import csv
import io
import json
import re

import chromium
import pytest
import views
from hostile_reports import HOSTILE, STEERING, hostile, hostile_experiments, hostile_swap
from reports import CROSS, synthetic_report
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from views import Tags, absent

from attnlens.records import AttentionRows
from attnlens.report import export
from attnlens.report.findings.heads import HeadTests
from attnlens.report.report import Report
from attnlens.report.sections.explorer import explorer
from attnlens.report.shapes import Shapes

MB = 1_000_000
ATTRIBUTES = "attributes charset class colspan content src alt http-equiv lang name id type hidden tabindex scope role"


def strings(value):
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(part)


@pytest.mark.usefixtures("without_layout")
def test_strings_from_strangers_are_text_without_control_characters():
    page = views.page(hostile())
    assert not STEERING.search(page)
    assert STEERING.search(HOSTILE)  # the control
    tags = Tags(page)
    assert {tag for tag, _ in tags.tags}.isdisjoint({"iframe", "a", "link", "object", "svg"})
    assert views.runs_its_own_script_alone(page)
    assert not views.runs_its_own_script_alone(page.replace("<main>", "<main><script>alert(1)</script>"))
    allowed = {*ATTRIBUTES.split(), "title", "placeholder", "autocomplete", "spellcheck"}
    attributes = {name for _, attributes in tags.tags for name in attributes}
    assert {name for name in attributes if not name.startswith("aria-")} <= allowed
    assert tags.text.count("<script>alert(1)</script>") > 10  # shown as what it is
    assert [attributes["src"][:11] for tag, attributes in tags.tags if tag == "img"] == ["data:image/"]
    data = next(text for attributes, text in tags.scripts if attributes.get("id") == "data")
    assert not {"<", ">", "&"} & set(data)
    assert not STEERING.search("".join(strings(json.loads(data))))
    text = hostile().to_json()
    assert not re.search("[\x7f-\x9f]", text), "JSON has them as escapes"
    assert json.loads(text)["model"]["id"] == HOSTILE, "the control: nothing is lost"


@pytest.mark.usefixtures("without_layout")
@pytest.mark.parametrize("report", [hostile_swap(), hostile_experiments()], ids=["swap", "experiments"])
def test_strings_from_strangers_steer_nothing_in_any_format(report, tmp_path):
    page, text, marks, rows = (write(report) for write in (views.page, views.summary, views.markdown, views.csv))
    for written in (page, text, marks, rows):
        assert not STEERING.search(written.replace("&#8203;", ""))
    assert views.runs_its_own_script_alone(page)
    assert "<" not in marks.replace("< 1e-4", "")
    assert "[red]b[/red]" in " ".join(text.split())
    cells = [cell for row in csv.reader(io.StringIO(rows)) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]
    paths = export.drawings(report, tmp_path / "pictures")
    assert len(paths) > 1
    assert all(path.parent == tmp_path / "pictures" and re.fullmatch(r"[\w.-]+", path.name) for path in paths)
    again = Report.model_validate_json(report.to_json())
    assert (again.to_json(), views.summary(again)) == (report.to_json(), text)


@pytest.mark.usefixtures("without_layout")
def test_the_page_shows_every_number_with_its_error_null_and_reason():
    report = synthetic_report(3, 4)
    page = views.page(report)
    for head in report:
        symmetry = head.measures["weights.symmetry"].value
        assert not absent(page, f">{head.layer}</th><th>{head.head}</th>", f">{symmetry:.3f}<")
    entropy = report.heads[0].measures["tokens.entropy"]
    headings = ("Most extreme heads (ranks, not tests)", "How this report was made")
    shown = (f"<td>{entropy.value:.3f}±{entropy.se:.2g}", "COMPLETE: 12 of 12 heads")
    assert not absent(page, *shown, *(f"<h2>{heading}</h2>" for heading in headings))
    assert absent(page, "3 layers × 4 heads", "�") == ["�"]
    page = views.page(synthetic_report(3, 2, parts=["encoder", "decoder", "cross"], missing=[(0, 1)]))
    assert not absent(page, f'title="{CROSS}">–<', '>1</th><th>0</th><th class="words">decoder</th>')
    reason = "the weights are not finite: bert.encoder.layer.0.attention.self head 1 (weights)"
    assert not absent(Tags(page).text, f"2 heads, because {CROSS}", reason)


@pytest.mark.usefixtures("without_layout")
def test_a_wide_table_is_split_by_group_and_negative_numbers_have_a_minus_sign():
    page = views.page(synthetic_report(3, 4))
    by_layer = page.partition("<h2>By layer</h2>")[2].partition("</section>")[0]
    groups = [re.findall('class="group"[^>]*>(.+?)<', table) for table in by_layer.split("</table>")[:-1]]
    assert groups == [["weights"], ["tokens"]]
    assert [table.count(">null<") for table in by_layer.split("</table>")] == [1, 0, 0], "no empty rows"
    assert not re.search(r"<td>-[0-9]", page)
    assert re.search(r"<td>−[0-9]", page), "the control"


def test_the_rest_of_attention_is_in_thousandths_like_the_weights():
    report = synthetic_report(1, 1)
    place = {name: getattr(report.heads[0], name) for name in ("site", "layer", "head", "kv_head", "part")}
    rows = AttentionRows(**place, sequence=0, keys=[[0, 1]], weights=[[0.5, 0.25]], rest=[0.25])
    body = report.inspection.model_copy(update={"attention": [rows]})
    shown = explorer(Shapes(report.model_copy(update={"inspection": body})))["attention"]["0.0"]
    assert (shown["weights"], shown["rest"]) == ([[500, 250]], [250])


def test_the_page_marks_the_heads_above_and_below_chance():
    report = synthetic_report(4, 8)
    measures = {measure["name"]: measure["signs"] for measure in explorer(Shapes(report))["measures"]}
    assert measures["weights.definiteness"] == HeadTests(Shapes(report)).signs["weights.definiteness"].tolist()
    assert {-1, 0, 1} == {*measures["weights.definiteness"]}
    assert measures["weights.norm"] == [], "the control: it is not tested"


@pytest.fixture(scope="module")
def browser():
    driver = chromium.started()
    chromium.sized(driver, 1280)
    yield driver
    driver.quit()


REPORT = synthetic_report(6, 5, missing=[(1, 2)])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the paths of a page, and of a page whose strings are all untrusted."""
    paths = [tmp_path_factory.mktemp("pages") / name for name in ("page.html", "hostile.html")]
    for path, report in zip(paths, (REPORT, hostile()), strict=True):
        path.write_text(views.page(report))
    return paths


@pytest.fixture
def shown(browser, pages):
    """Open the page; check after the test that it logged nothing and made no request."""
    chromium.opened(browser, pages[0])
    yield browser
    assert chromium.logged(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)") == []


def text(browser, name):
    return browser.find_element(By.ID, name).text


def pixels(browser):
    return browser.execute_script("return document.getElementById('map').toDataURL()")


def fragment(browser):
    return browser.current_url.partition("#")[2]


def rows(browser):
    return [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#body tr[data-head] th")]


def over_cell(browser, row, column):
    """Return actions that start with the pointer over a cell of the map."""
    place = "const {x, y} = document.getElementById('map').getBoundingClientRect(); scrollTo(0, scrollY + y - 80);"
    browser.execute_script(place)
    at = "const box = map.canvas.getBoundingClientRect(); return [box.x + map.left + (arguments[1] + .5) * map.wide,"
    x, y = browser.execute_script(f"{at} box.y + map.top + (arguments[0] + .5) * map.high]", row, column)
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    return actions


@chromium.needed
def test_pointer_menu_and_keys_explore_the_map_and_a_click_opens_a_head(shown):
    over_cell(shown, 0, 0).perform()
    measure = REPORT.heads[0].measures["weights.symmetry"]
    assert not absent(text(shown, "tip"), "null 0.0013 ± 0.0018", f"z {measure.z:.0f}")
    over_cell(shown, 1, 2).perform()
    assert not absent(text(shown, "tip"), "has no value", "the weights are not finite")
    cell = shown.find_element(By.ID, "cell")
    shown.execute_script("arguments[0].focus()", cell)
    cell.send_keys(Keys.HOME, Keys.PAGE_UP, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert "layer 1 head 1: symmetry" in text(shown, "tip"), "focus shows the same text as hovering"
    assert (cell.get_attribute("aria-label") or "").startswith("layer 1 head 1: symmetry")
    cell.send_keys(Keys.END, Keys.ENTER)
    assert text(shown, "who") == "Layer 1 head 4"
    before = pixels(shown)
    Select(shown.find_element(By.ID, "measure")).select_by_value("tokens.entropy")
    assert pixels(shown) != before
    over_cell(shown, 2, 3).perform()
    measure = next(head for head in REPORT if (head.layer, head.head) == (2, 3)).measures["tokens.entropy"]
    assert f"layer 2 head 3: entropy {measure.value:.3f} ± 0.0" in text(shown, "tip")
    assert "measure=tokens.entropy" in fragment(shown)
    over_cell(shown, 4, 1).click().perform()
    assert text(shown, "who") == "Layer 4 head 1"
    assert "head=4.1" in fragment(shown)
    charts = shown.find_elements(By.CSS_SELECTOR, "#panel svg[role=img]")
    labels = [chart.get_attribute("aria-label") or "" for chart in charts]
    assert any("content" in label for label in labels)
    assert sum("over index k" in label for label in labels) == len(REPORT.heads[0].curves)
    head = next(head for head in REPORT if (head.layer, head.head) == (4, 1))
    assert all(name.partition(".")[2].replace("_", " ") in text(shown, "numbers") for name in head.measures)


@chromium.needed
def test_a_column_sorts_the_table_and_a_filter_selects_heads(shown):
    values = {f"{h.layer} · {h.head}": h.measures["tokens.entropy"].value or 0.0 for h in REPORT}
    column = "#columns th[data-sort='tokens.entropy']"
    shown.find_element(By.CSS_SELECTOR, f"{column} button").click()
    assert rows(shown) == sorted(values, key=lambda name: -values[name])[: len(rows(shown))]
    assert shown.find_element(By.CSS_SELECTOR, column).get_attribute("aria-sort") == "descending"
    shown.find_element(By.CSS_SELECTOR, f"{column} button").click()
    assert rows(shown)[0] == min(values, key=lambda name: values[name])
    field = shown.find_element(By.ID, "filter")
    field.send_keys("entropy > 0.6")
    selected = {name for name, value in values.items() if value > 0.6}
    assert 0 < len(selected) < len(values)
    assert set(rows(shown)) == selected
    assert text(shown, "counted") == f"{len(selected)} of 30 heads"
    field.send_keys(", layer 2")
    assert set(rows(shown)) == {name for name in selected if name.startswith("2 ·")}
    field.send_keys(", nonsense < 1")
    assert "No measure is called “nonsense”" in text(shown, "counted")


@chromium.needed
def test_the_fragment_restores_the_view_and_the_switch_turns_the_theme(shown, pages):
    chromium.opened(shown, pages[0], "measure=tokens.entropy&head=3.4&sort=-tokens.entropy&filter=layer+3&theme=dark")
    assert Select(shown.find_element(By.ID, "measure")).first_selected_option.text == "entropy"
    assert text(shown, "who") == "Layer 3 head 4"
    assert {name[0] for name in rows(shown)} == {"3"}
    assert shown.execute_script("return document.documentElement.dataset.theme") == "dark"
    shown.execute_script("location.hash = 'head=0.1'")
    assert shown.execute_async_script("setTimeout(arguments[0], 50)") is None
    assert text(shown, "who") == "Layer 0 head 1", "a link within the page changes the view, too"
    chromium.opened(shown, pages[0], "measure=nothing&head=99.99&sort=%3Cscript%3E&theme=pink")
    assert len(rows(shown)) > 10, "names that the report lacks are ignored"
    chromium.opened(shown, pages[0])
    background = "return getComputedStyle(document.body).backgroundColor"
    before = shown.execute_script(background)
    shown.find_element(By.ID, "theme").click()
    assert shown.execute_script(background) != before
    assert "theme=dark" in fragment(shown)


@chromium.needed
def test_hostile_names_are_text_and_tokens_show_what_they_attend_to(browser, pages):
    chromium.opened(browser, pages[1])
    assert chromium.logged(browser) == []
    browser.execute_script("change({head: '0.0'})")
    everything = browser.execute_script("return document.body.innerText")
    assert not absent(everything, "=cmd|' /C calc'!A0", "</script><!--", "<script>alert(1)</script>")
    assert not {"\x1b", "\u202e", "\x9b"} & set(everything)
    assert {"\x1b", "\u202e", "\x9b"} <= set(HOSTILE), "the control"
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    chromium.opened(browser, pages[1], "head=0.0")
    browser.execute_script("document.querySelector('.queries button').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    shares = "attends to “</script><!--” 0.50, “=cmd|' /C calc'!A0” 0.30; to the rest 0.20."
    assert text(browser, "attends").endswith(shares)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".keys .lit")) == 2
    browser.execute_script("document.querySelector('.keys button').focus()")
    assert "is attended to by" in text(browser, "attends")
    browser.execute_script("change({head: '1.0'})")
    assert browser.find_elements(By.CSS_SELECTOR, ".attended") == [], "other heads' rows were not requested"


@chromium.needed
def test_no_serious_fault_of_accessibility_in_either_theme(shown, pages):
    for width, theme in ((390, "light"), (1280, "light"), (390, "dark"), (1280, "dark")):
        chromium.sized(shown, width)
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        red = shown.execute_script("return getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/)[0]")
        assert (float(red) > 128) == (theme == "light")
        assert shown.execute_script("return document.documentElement.scrollWidth") <= width
        assert chromium.faults(shown) == [], (width, theme)
    shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    shown.execute_script("document.body.append(document.createElement('button'))")
    assert [fault[1] for fault in chromium.faults(shown)] == ["button-name"], "the control: a planted fault"
    chromium.opened(shown, pages[1], "head=0.0")
    assert chromium.faults(shown) == []


@chromium.needed
def test_the_policy_refuses_what_is_not_the_page_s_own(browser, pages):
    chromium.opened(browser, pages[0])
    browser.execute_script("""
        const [script, image] = ["script", "img"].map((name) => document.createElement(name));
        script.textContent = "document.title = 'owned'";
        image.src = "https://example.org/x.png";
        document.body.append(script, image);
    """)
    assert browser.title != "owned"
    assert not absent(" ".join(chromium.logged(browser)), "script-src", "img-src")


@chromium.needed
@pytest.mark.parametrize(("layers", "heads", "most"), [(12, 12, 2 * MB), (80, 64, 8 * MB)])
def test_a_page_is_small_and_draws_its_table_in_slices(browser, tmp_path, layers, heads, most):
    path = tmp_path / "page.html"
    path.write_text(views.page(synthetic_report(layers, heads, head_dim=128, missing=[(3, 4)])))
    assert path.stat().st_size < most
    chromium.opened(browser, path)
    assert 10 < len(rows(browser)) < 80
    browser.execute_script("element('rows').scrollTop = 1e9")
    assert browser.execute_async_script("setTimeout(arguments[0], 100)") is None
    assert rows(browser)[-1] == f"{layers - 1} · {heads - 1}"
    assert chromium.logged(browser) == []
