"""plotly.subplots: several plots in one figure."""

from .graph_objects import Figure, Part


def make_subplots(
    rows: int = 1,
    cols: int = 1,
    subplot_titles: tuple = (),
    horizontal_spacing: float | None = None,
    vertical_spacing: float | None = None,
) -> Figure:
    "A figure with a grid of axes."
    figure = Figure()
    figure.columns = cols
    across = 0.2 / cols if horizontal_spacing is None else horizontal_spacing
    down = 0.3 / rows if vertical_spacing is None else vertical_spacing
    width = (1 - across * (cols - 1)) / cols
    height = (1 - down * (rows - 1)) / rows
    titles = []
    for n in range(rows * cols):
        row, col = divmod(n, cols)
        end = "" if n == 0 else str(n + 1)
        left = col * (width + across)
        top = 1 - row * (height + down)
        x = Part(domain=[left, left + width], anchor=f"y{end}")
        y = Part(domain=[top - height, top], anchor=f"x{end}")
        dict.__setitem__(figure.layout, f"xaxis{end}", x)
        dict.__setitem__(figure.layout, f"yaxis{end}", y)
        if n < len(subplot_titles):
            place = {"x": left + width / 2, "y": top, "xref": "paper", "yref": "paper"}
            titles.append(Part(place, text=subplot_titles[n], showarrow=False, yanchor="bottom"))
    figure.layout["annotations"] = titles
    return figure
