"""The SVG picture of reward curves."""

from __future__ import annotations

import xml.etree.ElementTree

from areno.report.picture import smoothed, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_curve_and_its_moving_average() -> None:
    picture = xml.etree.ElementTree.fromstring(svg("a < b", [1, 2, 3], {"": [0.0, 0.5, 1.0]}))
    raw, smooth = (line.attrib["points"].split() for line in picture.iter(f"{SVG}polyline"))
    assert len(raw) == len(smooth) == 3
    heights = [float(point.split(",")[1]) for point in raw]
    assert heights == sorted(heights, reverse=True)
    assert smoothed([0, 0, 9, 0, 0], reach=1) == [0, 3, 3, 3, 0]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[0] == "a < b"
    assert "" not in texts
    assert svg("title", [1], {"": [0.0]})


def test_two_curves_share_their_axes_and_have_names() -> None:
    picture = xml.etree.ElementTree.fromstring(svg("title", [1, 2], {"one": [0.0, 0.5], "two": [0.5, 1.0]}))
    one, _, two, _ = picture.iter(f"{SVG}polyline")
    assert one.attrib["stroke"] != two.attrib["stroke"]
    assert one.attrib["points"].split()[1].split(",")[1] == two.attrib["points"].split()[0].split(",")[1]
    names = [text for text in picture.iter(f"{SVG}text") if text.text in ("one", "two")]
    assert [name.attrib["fill"] for name in names] == [one.attrib["stroke"], two.attrib["stroke"]]
