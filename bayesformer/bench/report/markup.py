"""Markup as text, safe by construction: `tag` escapes every child that is not already `Html`."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

ENDS = {"meta": ">", "img": ">", "path": "/>", "rect": "/>"}  # elements without content


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
        return Html(html.escape(child))
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


def short(value: float) -> str:
    """A coordinate with at most one decimal: more is below a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
