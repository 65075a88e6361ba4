"""Drawing that draws nothing: the figures of a page stay as they were built."""

import importlib.abc
import importlib.machinery
import sys
import types


class Nothing:
    "Every attribute, call and item of it is nothing again."

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __getitem__(self, key):
        return self

    def __setitem__(self, key, value):
        pass

    def __setattr__(self, name, value):
        pass

    def __iter__(self):
        return iter((self, self))


NOTHING = Nothing()


class Grid(list):
    "The axes of several plots: as rows, by axes[i, j], and all of them as axes.flat."

    @property
    def flat(self):
        return [ax for row in self for ax in (row if isinstance(row, Grid) else [row])]

    @property
    def T(self):
        return Grid(map(Grid, zip(*self)))

    def __getitem__(self, key):
        if isinstance(key, tuple):
            row, column = key
            return [r[column] for r in self[row]] if isinstance(row, slice) else self[row][column]
        return list.__getitem__(self, key)


def subplots(nrows=1, ncols=1, **settings):
    "A figure and its axes, as many as matplotlib would make."
    if nrows == ncols == 1:
        return NOTHING, NOTHING
    if nrows == 1 or ncols == 1:
        return NOTHING, Grid([NOTHING] * max(nrows, ncols))
    return NOTHING, Grid(Grid([NOTHING] * ncols) for _ in range(nrows))


class Drawing(types.ModuleType):
    "A module of matplotlib: all its names are nothing."

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return subplots if name == "subplots" else NOTHING


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Every module of matplotlib is a Drawing."

    def find_spec(self, name, path=None, target=None):
        if name.startswith("matplotlib."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Drawing(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return NOTHING
