"""Environments of templates: what goes into a page is escaped for its format."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from stack import templates

PACKAGE = "stack.tuning"


def test_html_values_are_escaped_unless_they_are_markup():
    template = templates.html(PACKAGE).from_string("<p>{{ text }}</p>")
    assert "<p>&lt;b&gt; &#34;x&#34;</p>" == template.render(text='<b> "x"')
    assert "<p><b></p>" == template.render(text=Markup("<b>"))


def test_markdown_values_are_escaped_and_stay_on_one_line():
    template = templates.markdown(PACKAGE).from_string("- {{ text }}\n")
    assert "- \\*a\\* \\<b\\> @\u200bc | d\n" == template.render(text="*a*\n<b> @c | d")


def test_a_bar_does_not_end_a_markdown_cell():
    assert "a \\| b" == templates.markdown(PACKAGE).from_string("{{ text | cell }}").render(text="a | b")


def test_a_fence_is_longer_than_those_in_the_code():
    text = "x\n````\ny"
    shown = templates.markdown(PACKAGE).from_string('{{ text | fenced("yaml") }}').render(text=text)
    assert "`````yaml\nx\n````\ny\n`````\n" == shown


@pytest.mark.parametrize("environment", [templates.html, templates.markdown])
def test_a_missing_value_is_an_error(environment):
    with pytest.raises(UndefinedError):
        environment(PACKAGE).from_string("{{ missing }}").render()
