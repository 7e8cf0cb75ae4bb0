"""Shared parts of the HTML pages: the base template and charts in its colours.

Every page extends `base.html`; `drawing` makes SVG charts that take their colours from the page,
and PNG files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_edit.tools.pages.drawing import COLORS, DARK_COLORS

BASE_FOLDER = Path(__file__).parent


def render(
    template: Path,
    values: Mapping[str, Any],
    filters: Mapping[str, Callable[..., str]] | None = None,
) -> str:
    """Render a template to a page that needs no other file and no network.

    Args:
        template: path; the template may extend `base.html`.
        values: variables of the template; text is escaped, `Markup` is not.
        filters: additional filters of the template, by name.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, BASE_FOLDER]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= filters or {}
    colors = {"colors": COLORS, "dark_colors": DARK_COLORS}
    page = environment.get_template(template.name).render(colors | dict(values)) + "\n"
    # Surrogate escapes, as in the name of a folder that is not valid UTF-8, cannot be encoded.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")
