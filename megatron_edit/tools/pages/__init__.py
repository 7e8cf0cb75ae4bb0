"""What the HTML pages of this project share: the look, and pictures that follow it.

`base.html` is the frame that every page extends; `drawing` makes pictures as SVG that take their
colours from the page, and as PNG files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_edit.tools.pages.drawing import COLORS, DARK_COLORS

FRAME = Path(__file__).parent


def render(
    template: Path,
    values: Mapping[str, Any],
    filters: Mapping[str, Callable[..., str]] | None = None,
) -> str:
    """From a template and values to a page that needs no other file and no network.

    Args:
        template: may extend `base.html`.
        values: what it shows; text is escaped, `Markup` is not.
        filters: of the template, by name.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, FRAME]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= filters or {}
    colors = {"colors": COLORS, "dark_colors": DARK_COLORS}
    page = environment.get_template(template.name).render(colors | dict(values)) + "\n"
    # A byte that is no text, as in a folder's name, comes as half a character.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")
