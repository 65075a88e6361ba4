"""Figures on a phone: panels that stand side by side are stacked, and the text of a single one grows.

Nothing is drawn twice. A stacked panel is a window on the same drawing, `<use href="#axes_2">`, shown where the screen is narrow.
"""

import re
import xml.etree.ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"
SCREEN, LEAST = (
    350,
    10.0,
)  # CSS pixels: what a phone leaves for a figure, and the smallest text that is read without effort
Box = tuple[float, float, float, float]  # left, top, right, bottom


def box(group: ET.Element) -> Box | None:
    "What an axes covers: its background, or all its lines where it has none."
    ground = [g for g in group[:1] if (g.get("id") or "").startswith("patch")]
    for part in (*ground, group):
        points = [
            (float(x), float(y))
            for path in part.iter(SVG + "path")
            if path.get("id") is None
            for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d") or "")
        ]
        if points:
            xs, ys = zip(*points)
            return min(xs), min(ys), max(xs), max(ys)
    return None


def rows(boxes: dict[str, Box]) -> list[list[list[str]]]:
    "Axes in rows of columns, from the top left; those that share their place, twins, are one."
    found: list[list[list[str]]] = []
    for name in sorted(boxes, key=lambda n: (boxes[n][1], boxes[n][0])):
        left, top, right, bottom = boxes[name]
        row = next(
            (
                r
                for r in found
                if min(bottom, boxes[r[0][0]][3]) - max(top, boxes[r[0][0]][1])
                > 0.5 * (bottom - top)
            ),
            None,
        )
        if row is None:
            found.append(row := [])
        same = next(
            (
                c
                for c in row
                if min(right, boxes[c[0]][2]) - max(left, boxes[c[0]][0]) > 0.5 * (right - left)
            ),
            None,
        )
        if same is None:
            row.append([name])
        else:
            same.append(name)
    return [sorted(row, key=lambda column: boxes[column[0]][0]) for row in found]


def windows(svg: str) -> list[tuple[list[str], Box]]:
    "What to show of the drawing, one below the other: ids, and the part of the plane. Empty for a single panel."
    root = ET.fromstring(svg)
    width, height = (float(x) for x in root.get("viewBox", "").split()[2:])
    figure = next(g for g in root.iter(SVG + "g") if g.get("id") == "figure_1")
    boxes = {g.get("id"): box(g) for g in figure if (g.get("id") or "").startswith("axes")}
    if len(boxes) < 2 or None in boxes.values():
        return []
    above = [g.get("id") for g in figure if (g.get("id") or "").startswith(("legend", "text"))]
    layout = rows(boxes)
    made = []
    if max(map(len, layout)) < 2:
        return []
    for i, row in enumerate(layout):
        top = max(0.0, min(boxes[c[0]][1] for c in row) - 26) if i else 0.0
        bottom = (
            min(height, max(boxes[c[0]][3] for c in row) + 40) if i + 1 < len(layout) else height
        )
        for j, column in enumerate(row):
            left = boxes[row[j - 1][0]][2] + 3 if j else 0.0
            right = (
                min(boxes[row[j + 1][0]][0] - 3, boxes[column[0]][2] + 16)
                if j + 1 < len(row)
                else width
            )
            made.append((column, (left, top, right, bottom)))
    if above:
        made.append((above, (0.0, 0.0, width, min(b[1] for b in boxes.values()))))
    return made


def stacked(svg: str, prefix: str) -> str:
    "The panels one below the other, as HTML; `prefix` stands before the ids on the page."
    made = []
    for names, (left, top, right, bottom) in windows(svg):
        uses = "".join(f'<use href="#{prefix}{name}"/>' for name in names)
        made.append(
            f'<svg viewBox="{left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}" style="max-width:{(right - left) * 1.6:.0f}px">{uses}</svg>'
        )
    return f'<div class="stacked" aria-hidden="true">{"".join(made)}</div>' if made else ""


def text_factor(width: float) -> float:
    "By how much text of 10.5 units must grow to be `LEAST` pixels high when a drawing so wide is fitted to the screen."
    return round(min(1.5, max(1.0, LEAST / 10.5 * width / SCREEN)), 2)
