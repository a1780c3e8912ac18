"""HTML and SVG by jinja: every text is escaped here, and only here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def _printable(value: Any) -> Any:
    """Return text without characters that neither HTML nor SVG may hold; other values as they are."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in value)


_TEMPLATES = Environment(
    loader=PackageLoader("agentspec.report.views"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_printable,
)


def render(template: str, **values: Any) -> Markup:
    """Return a template of this package, filled in."""
    return Markup(_TEMPLATES.get_template(template).render(values))  # autoescape is on


@dataclass(frozen=True)
class Element:
    """An element of a drawing: tag, attributes, text, and the elements within it."""

    tag: str
    attributes: dict[str, Any]
    text: str = ""
    children: tuple[Element, ...] = ()

    @property
    def shown(self) -> dict[str, Any]:
        """Printable attributes: ``xmlattr`` escapes them, but its result passes no ``finalize``."""
        return {name: _printable(value) for name, value in self.attributes.items() if value is not None}

    def __html__(self) -> str:
        """Return the element as markup, as markupsafe asks for it."""
        return render("element.jinja", element=self).strip()
