"""The colours, computed: every text and every sign can be read by people who see little contrast (WCAG 2.2, AA)."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

CSS = (files("semel.console") / "static" / "console.css").read_text("utf-8")
TEXTS = [
    (text, ground)
    for text in ("text", "muted", "accent", "warn", "bad")
    for ground in ("ground", "card")
] + [("on-accent", "accent"), ("bad", "bad-ground"), ("text", "bad-ground")]  # fmt: skip
SIGNS = [("accent", "card"), ("edge", "card"), ("edge", "ground"), ("bad", "card"), ("warn", "card")]


def palette(scheme: str) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks[:2])
    assert light.keys() == dark.keys()
    return light if scheme == "light" else dark


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_formula() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_signs_can_be_read(scheme: str) -> None:
    colours = palette(scheme)
    for pairs, least in ((TEXTS, 4.5), (SIGNS, 3.0)):
        for one, other in pairs:
            found = contrast(colours[one], colours[other])
            assert found >= least, f"{scheme}: {one} on {other}: {found:.2f}"


def test_no_colour_is_written_beside_the_palette() -> None:
    rules = re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|rgb\(|hsl\(", rules) == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    for part in ("static", "templates"):
        for file in (files("semel.console") / part).iterdir():
            text = file.read_text("utf-8").replace("http://www.w3.org/", "")
            assert "http://" not in text, file.name
            assert "https://" not in text, file.name
            assert re.search(r"\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|@import", text) is None, file.name
