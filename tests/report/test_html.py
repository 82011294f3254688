"""Tests that the page is one file that shows the report, with other people's strings as nothing but text."""

from __future__ import annotations

import json
import re

import pytest
import views
from hostile_reports import HOSTILE, STEERING, hostile
from reports import CROSS, synthetic_report
from views import Tags


def test_strings_from_strangers_are_text_without_control_characters() -> None:
    page = views.page(hostile())
    assert not STEERING.search(page)
    assert STEERING.search(HOSTILE)  # the control
    found = Tags(page)
    assert {tag for tag, _ in found.tags}.isdisjoint({"iframe", "a", "link", "object", "svg"})
    assert views.runs_its_own_script_alone(page)
    assert not views.runs_its_own_script_alone(page.replace("<main>", "<main><script>alert(1)</script>"))
    allowed = {"class", "title", "colspan", "src", "alt", "charset", "http-equiv", "content", "lang", "name"}
    allowed |= {"id", "type", "hidden", "tabindex", "scope", "role", "placeholder", "autocomplete", "spellcheck"}
    named = {name for _, attributes in found.tags for name in attributes}
    assert {name for name in named if not name.startswith("aria-")} <= allowed
    assert found.text.count("<script>alert(1)</script>") > 10  # shown as what it is
    assert [attributes["src"][:11] for tag, attributes in found.tags if tag == "img"] == ["data:image/"]
    data = next(text for attributes, text in found.scripts if attributes.get("id") == "data")
    assert not {"<", ">", "&"} & set(data)
    assert not STEERING.search("".join(strings(json.loads(data))))


def strings(value):
    """Every string in what JSON holds."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(part)


def test_an_ordinary_page_keeps_its_letters() -> None:
    assert "�" not in views.page(synthetic_report(2, 2))


def test_every_number_stands_on_the_page_with_its_error_and_null() -> None:
    report = synthetic_report(3, 4)
    page = views.page(report)
    for head in report:
        assert f">{head.layer}</th><th>{head.head}</th>" in page
        assert f">{head.measures['weights.symmetry'].value:.3f}<" in page
    entropy = report.heads[0].measures["tokens.entropy"]
    assert f"<td>{entropy.value:.3f}±{entropy.se:.2g}" in page
    assert "0.0013 ± 0.0018" in page
    assert "3 layers" not in page
    assert "COMPLETE: 12 of 12 heads" in page


def test_what_is_missing_has_its_reason_in_the_cell_and_below() -> None:
    page = views.page(synthetic_report(3, 2, parts=["encoder", "decoder", "cross"], missing=[(0, 1)]))
    assert f'title="{CROSS}">–<' in page
    assert '>1</th><th>0</th><th class="words">decoder</th>' in page
    text = Tags(page).text
    assert f"2 heads, because {CROSS}" in text
    assert "the weights are not finite: bert.encoder.layer.0.attention.self head 1 (weights)" in text


@pytest.mark.parametrize("section", ["Most extreme heads (ranks, not tests)", "What is measured", "How it was made"])
def test_the_page_has_what_a_colleague_asks_for(section: str) -> None:
    assert f"<h2>{section}</h2>" in views.page(synthetic_report(2, 2))


def test_json_holds_what_would_steer_a_terminal_as_escapes() -> None:
    text = hostile().to_json()
    assert not re.search("[\x7f-\x9f]", text)
    assert HOSTILE in json.loads(text)["model"]["id"], "the control: nothing is lost"
