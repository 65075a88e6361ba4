"""Which names a cell of a notebook defines, and which it uses: so that running one first runs what it needs."""

import ast
import builtins
import importlib
import re

CHANGES = {"append", "backward", "clear", "extend", "insert", "pop", "remove", "step", "update"}


class Names(ast.NodeVisitor):
    "What a cell defines for later cells, and what it uses of earlier ones."

    def __init__(self, source: str):
        self.defined: set[str] = set()
        self.used: set[str] = set()
        self.changed: set[str] = set()  # of earlier cells
        self.used_later: set[str] = set()  # by functions, when they are called
        self.visit(ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.M)))
        self.used |= self.used_later - self.defined

    def use(self, name: str) -> None:
        if name not in self.defined and not hasattr(builtins, name):
            self.used.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.use(node.id)
        else:
            self.defined.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.use(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.defined |= public_names(node.module)
                continue
            self.defined.add((alias.asname or alias.name).partition(".")[0])

    visit_ImportFrom = visit_Import

    def change(self, node: ast.AST) -> None:
        "What changes x is needed by later cells that use x, and needs x itself."
        if isinstance(node, ast.Name):
            if node.id not in self.defined:
                self.changed.add(node.id)
            self.use(node.id)
            self.defined.add(node.id)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Store):
            self.change(node.value)
        self.generic_visit(node)

    visit_Attribute = visit_Subscript

    def visit_Call(self, node: ast.Call) -> None:
        "x.append(…) and x.add_(…) change x."
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        self.generic_visit(node)
        if method in CHANGES or (method.endswith("_") and not method.startswith("_")):
            self.change(node.func.value)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.defined.add(node.name)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def of_scope(self, parameters: list[ast.arg], body: list[ast.AST]) -> None:
        "A function's own names are nobody else's."
        inner = Names("")
        inner.defined |= {parameter.arg for parameter in parameters}
        for part in body:
            inner.visit(part)
        own = inner.defined
        for part in body:  # a name may be used above its definition
            for node in ast.walk(part):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    own.add(node.id)
        self.used_later |= {name for name in inner.used - own if not hasattr(builtins, name)}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        self.defined.add(node.name)
        self.of_scope(parameters_of(node.args), node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        self.of_scope(parameters_of(node.args), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases):
            self.visit(part)
        self.defined.add(node.name)
        self.of_scope([], node.body)

    def visit_comprehension_of(self, node: ast.AST) -> None:
        inner = Names("")
        for generator in node.generators:
            inner.visit(generator.iter)
            inner.visit(generator.target)
            for condition in generator.ifs:
                inner.visit(condition)
        for part in ("key", "value", "elt"):
            if hasattr(node, part):
                inner.visit(getattr(node, part))
        for name in inner.used:
            self.use(name)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of


def public_names(module: str) -> set[str]:
    "What `from module import *` gives."
    return set(importlib.import_module(module).__all__)


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    "All parameters of a function, *args and **kwargs too."
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
