"""Markup as text, safe by construction: `tag` escapes every child that is not already `Html`."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

ENDS = {"meta": ">", "img": ">", "path": "/>", "rect": "/>", "use": "/>"}  # elements without content


class Html(str):
    """Markup that is already safe to put into a page."""

    __slots__ = ()


Child: TypeAlias = "Html | str | Iterable[Child] | None"


def render(child: Child) -> Html:
    """A child as safe markup: `Html` stays, other text is escaped, None vanishes, lists are joined."""
    if child is None:
        return Html("")
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return Html(html.escape(child, quote=False))
    return Html("".join(map(render, child)))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element: `tag("td", "a < b", class_="x")`.

    A trailing `_` of an attribute is dropped and an inner one becomes `-`; None and False leave it out, True
    writes its bare name.
    """
    written = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {attribute}")
        elif value is not None and value is not False:
            text = value if isinstance(value, str) else short(value)
            written.append(f' {attribute}="{html.escape(text)}"')
    opening = f"<{name}{''.join(written)}"
    return Html(opening + ENDS[name] if name in ENDS else f"{opening}>{render(children)}</{name}>")


class Shared:
    """Drawings inside `<svg>` that a page holds many times: written once, and referred to from every place.

    A call returns what to put in the drawing's place, `definitions` what the page must hold besides. Colours are not
    shared: a reference takes those around it.
    """

    LEAST = 40  # characters; a reference is hardly shorter than less

    def __init__(self) -> None:
        self.names: dict[Html, str] = {}

    def __call__(self, drawing: Html) -> Html:
        """A reference to the drawing, or the drawing itself if it is very short."""
        if len(drawing) < self.LEAST:
            return drawing
        name = self.names.setdefault(drawing, f"d{len(self.names)}")
        return tag("use", href=f"#{name}")

    def definitions(self) -> Html:
        """An `<svg>` of no size with every drawing that a call has referred to."""
        # Rules such as `.plot text` are matched where a drawing is defined, so the class stands here, too.
        drawings = [tag("g", drawing, id=name, class_="plot") for drawing, name in self.names.items()]
        return tag("svg", tag("defs", drawings), class_="shared", aria_hidden="true")


def short(value: float) -> str:
    """A coordinate with at most one decimal: more is below a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
