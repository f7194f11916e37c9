"""Colours of the page and of its marks, each for light and for dark."""

from __future__ import annotations

THEME = {  # name: (light, dark)
    "bg": ("#fdfcfa", "#14171a"),
    "panel": ("#f5f4f0", "#1b1f23"),
    "ink": ("#1d2125", "#e9e7e2"),
    "muted": ("#5a6169", "#a3a9b0"),
    "faint": ("#a9aeb3", "#5d646b"),
    "line": ("#e2e1dc", "#2c3136"),
    "link": ("#0a58a8", "#84b8f2"),
    "good": ("#006b4f", "#4fcba3"),
    "bad": ("#a83a10", "#f0925f"),
    "m": ("#646b73", "#a7adb4"),  # the baseline
}
PALETTE = (  # (light, dark) of the series: seven stay apart with any colour vision, which a test measures
    ("#044d8d", "#3e89fb"),
    ("#d27214", "#d98140"),
    ("#469c60", "#61f09d"),
    ("#7663ec", "#9d7ec1"),
    ("#654c04", "#e4d932"),
    ("#a01148", "#e3636f"),
    ("#03789a", "#9ae1f5"),
)


def colour_sheet() -> str:
    """Colours as CSS variables, dark where the reader or `data-theme` asks for it.

    The classes m, m0, m1, … set --c, the colour in which marks inside are drawn.
    """
    series = {f"m{i}": pair for i, pair in enumerate(PALETTE)}
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in (THEME | series).items()) for i in (0, 1))
    slots = "".join(f".{name}{{--c:var(--{name})}}" for name in ("m", *series))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f"{slots}"
    )
