"""Plotly's figures as plain data for Plotly's script, which the page has already.

`title_text="…"` is short for `title={"text": "…"}`, as in plotly.
"""

WHOLE_NAMES = {"error_x", "error_y", "plot_bgcolor", "paper_bgcolor"}  # names with an underscore
FLAT = {"args", "customdata", "text", "x", "y", "z"}  # what is kept as it is given


def plain(value):
    "Numbers and lists instead of tensors."
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    if hasattr(value, "detach"):
        return value.detach().tolist()
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return value


def as_part(value):
    "A dict as Part; anything else as plain data."
    if isinstance(value, Part):
        return value
    return Part(value) if isinstance(value, dict) else plain(value)


class Part(dict):
    "A part of a figure: part.x and part['x'] are the same."

    def __init__(self, *given, **settings):
        super().__init__()
        for one in given:
            if one is not None:
                self.update_with(one)
        self.update_with(settings)

    def update_with(self, settings: dict) -> None:
        for key, value in settings.items():
            self[key] = value

    def __setitem__(self, key, value):
        path = [key] if key in WHOLE_NAMES else key.replace(".", "_").split("_")
        if len(path) > 1:
            below = self.get(path[0])
            if not isinstance(below, Part):
                below = Part() if below is None else Part(text=below)
                super().__setitem__(path[0], below)
            below["_".join(path[1:])] = value
            return
        if key in FLAT:
            value = plain(value)
        elif isinstance(value, dict) and not isinstance(value, Part):
            before = self.get(key)
            value = Part(before if isinstance(before, Part) else None, value)
        elif isinstance(value, list | tuple):
            value = [as_part(x) for x in value]
        super().__setitem__(key, value)

    def __getitem__(self, key):
        return super().__getitem__(key)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name, value):
        self[name] = value

    def update(self, *given, **settings):
        for one in (*given, settings):
            self.update_with(one)


class Trace(Part):
    "One curve."


class Scatter(Trace):
    def __init__(self, **settings):
        super().__init__(type="scatter", **settings)


class Bar(Trace):
    def __init__(self, **settings):
        super().__init__(type="bar", **settings)


class Frame(Part):
    "One picture of an animation."


class Figure:
    "Curves and a layout."

    def __init__(self, data=None, layout=None, frames=None):
        data = [] if data is None else data
        self.data = [
            x if isinstance(x, Part) else Trace(x)
            for x in (data if isinstance(data, list | tuple) else [data])
        ]
        self.layout = Part(layout)
        self.frames = frames or []

    def add_trace(self, trace, row=None, col=None):
        n = axis_number(self, row, col)
        if n > 1:
            trace["xaxis"], trace["yaxis"] = f"x{n}", f"y{n}"
        self.data.append(trace)
        return self

    def add_scatter(self, row=None, col=None, **settings):
        return self.add_trace(Scatter(**settings), row, col)

    def add_bar(self, row=None, col=None, **settings):
        return self.add_trace(Bar(**settings), row, col)

    def add_hline(self, y, row=None, col=None, **settings):
        line = {"type": "line", "y0": y, "y1": y, "x0": 0, "x1": 1, "xref": "x domain", "yref": "y"}
        settings.pop("annotation_text", None)
        self.layout["shapes"] = [*(self.layout.shapes or []), Part(line, settings)]
        return self

    def update_layout(self, *given, **settings):
        self.layout.update(*given, **settings)
        return self

    def update_xaxes(self, row=None, col=None, **settings):
        return update_axes(self, "xaxis", row, col, settings)

    def update_yaxes(self, row=None, col=None, **settings):
        return update_axes(self, "yaxis", row, col, settings)

    def show(self):
        from IPython.display import display

        display(self)

    def to_dict(self) -> dict:
        return {"data": self.data, "layout": self.layout, "frames": self.frames}


def axis_number(figure, row, col) -> int:
    if row is None:
        return 1
    return (row - 1) * figure.columns + col


def update_axes(figure, kind: str, row, col, settings: dict):
    "Settings of one axis, or of all of a figure."
    if row is None and col is None:
        names = [key for key in figure.layout if key.startswith(kind)] or [kind]
    else:
        n = axis_number(figure, row or 1, col or 1)
        names = [kind if n == 1 else f"{kind}{n}"]
    for name in names:
        if figure.layout.get(name) is None:
            dict.__setitem__(figure.layout, name, Part())
        figure.layout.get(name).update(settings)
    return figure
