"""What a stored picture shows: lines, marks and bars of an SVG by matplotlib, in the units of its axes.

The picture itself is read, ticks and paths, and none of the code that drew it.
"""

import math
import re
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


class Curve(NamedTuple):
    "One line, or one series of marks."

    colour: str
    x: list[float]
    y: list[float]


class Bar(NamedTuple):
    "A filled rectangle, from its lower to its upper edge."

    colour: str
    left: float
    right: float
    bottom: float
    top: float


class Panel(NamedTuple):
    title: str
    curves: list[Curve]
    bars: list[Bar]
    texts: list[str]

    def of(self, colour: str) -> list[Curve]:
        "The curves of one colour, in the order in which they were drawn."
        return [curve for curve in self.curves if curve.colour == colour]


class Scale(NamedTuple):
    "From points of the picture to the unit of an axis."

    slope: float
    offset: float
    is_log: bool

    def value(self, place: float) -> float:
        number = self.slope * place + self.offset
        return 10**number if self.is_log else number


def number_of(label: str) -> float | None:
    "A tick's label as a number: 1,000, −0.5 and .5 are numbers."
    try:
        return float(label.replace("−", "-").replace(",", "").strip())
    except ValueError:
        return None


def line_through(places: list[float], numbers: list[float]) -> tuple[float, float, float]:
    "Slope and offset through the first and the last tick, and how far the others are off it."
    slope = (numbers[-1] - numbers[0]) / (places[-1] - places[0])
    offset = numbers[0] - slope * places[0]
    error = max(abs(slope * p + offset - n) for p, n in zip(places, numbers))
    return slope, offset, error / abs(numbers[-1] - numbers[0])


def scale_of(ticks: list[tuple[float, float]]) -> Scale | None:
    "A linear or logarithmic axis, whichever its labelled ticks lie on."
    ticks = sorted(set(ticks))
    if len(ticks) < 2:
        return None
    places, numbers = [p for p, _ in ticks], [n for _, n in ticks]
    slope, offset, error = line_through(places, numbers)
    if error > 0.02 and min(numbers) > 0:
        slope, offset, error = line_through(places, [math.log10(n) for n in numbers])
        return Scale(slope, offset, True) if error < 0.02 else None
    return Scale(slope, offset, False) if error < 0.02 else None


def ticks_of(group: ElementTree.Element, letter: str) -> list[tuple[float, float]]:
    "Place and number of each labelled tick of one axis."
    found = []
    for tick in group.iter(f"{SVG}g"):
        if not tick.get("id", "").startswith(f"{letter}tick"):
            continue
        mark = next(tick.iter(f"{SVG}use"), None)
        text = next(tick.iter(f"{SVG}text"), None)
        if mark is None or text is None:
            continue
        number = number_of("".join(text.itertext()))
        if number is not None:
            found.append((float(mark.get(letter, "nan")), number))
    return found


def colour_of(element: ElementTree.Element, kind: str) -> str:
    found = re.search(rf"{kind}: (#[0-9a-f]{{6}}|none)", element.get("style", ""))
    return found[1] if found else "#000000"


def points_of(path: str) -> tuple[list[float], list[float]]:
    numbers = [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", path)]
    return numbers[0::2], numbers[1::2]


def frame_of(axes: ElementTree.Element) -> tuple[list[float], list[float]]:
    "The corners of a panel; nothing where its axis is switched off."
    path = next(axes.iter(f"{SVG}path"), None)
    return points_of("" if path is None else path.get("d", ""))


def panels(svg: str) -> list[Panel]:
    "The panels of a picture, from the first to the last that was drawn."
    root = ElementTree.fromstring(svg)
    groups = [g for g in root.iter(f"{SVG}g") if g.get("id", "").startswith("axes_")]
    scales = []
    for axes in groups:
        ticks: dict[str, list[tuple[float, float]]] = {"x": [], "y": []}
        for axis in axes:
            if axis.get("id", "").startswith("matplotlib.axis"):
                for letter in "xy":
                    ticks[letter] += ticks_of(axis, letter)
        scales.append({letter: scale_of(ticks[letter]) for letter in "xy"})
    for axes, own in zip(groups, scales):
        frame = frame_of(axes)
        for k, letter in enumerate("xy"):  # axes that share a scale label it once
            if own[letter] is not None or not frame[k]:
                continue
            for other, theirs in zip(groups, scales):
                beside = frame_of(other)
                if theirs[letter] and abs(min(beside[k]) - min(frame[k])) < 1:
                    own[letter] = theirs[letter]
    return [read_panel(axes, own) for axes, own in zip(groups, scales)]


def read_panel(axes: ElementTree.Element, scales: dict[str, Scale | None]) -> Panel:
    curves = []
    bars = []
    title = ""
    across, up = scales["x"], scales["y"]  # names on an axis have no scale: points are kept

    def unit(scale: Scale | None, places: list[float]) -> list[float]:
        return [scale.value(place) for place in places] if scale else places

    for group in axes:
        name = group.get("id", "")
        if name.startswith("text"):
            title = "".join(group.itertext()).strip()  # matplotlib draws the title last
        path = group.find(f"{SVG}path")
        if name.startswith("line2d"):
            uses = list(group.iter(f"{SVG}use"))
            if path is not None and "stroke: none" not in path.get("style", ""):
                x, y = points_of(path.get("d", ""))
                colour = colour_of(path, "stroke")
            elif uses:
                x = [float(use.get("x", "nan")) for use in uses]
                y = [float(use.get("y", "nan")) for use in uses]
                colour = colour_of(uses[0], "fill")
            else:
                continue
            curves.append(Curve(colour, unit(across, x), unit(up, y)))
        elif name.startswith("patch") and path is not None and up:
            colour = colour_of(path, "fill")
            x, y = points_of(path.get("d", ""))
            if colour not in ("none", "#000000") and len(x) in (4, 5):
                bottom, top = sorted((up.value(max(y)), up.value(min(y))))
                xs = unit(across, x)
                bars.append(Bar(colour, min(xs), max(xs), bottom, top))
    texts = ["".join(text.itertext()) for text in axes.iter(f"{SVG}text")]
    return Panel(title, curves, bars, texts)
