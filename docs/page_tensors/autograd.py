"""How a gradient is found: remember each operation, then walk back from the result.

Every operation makes a tensor and, where a gradient may be asked for, a `Node`: from which tensors
it was made, and `pull`, a function that takes ∂L/∂output and returns ∂L/∂input for each input. This
is the chain rule, one operation at a time. `backward` begins with ∂L/∂L = 1, takes the newest node
first, so that all gradients that reach a node are there before the node is asked, and adds up what
arrives at each leaf.
"""

import heapq
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from itertools import count
from operator import add
from typing import ClassVar, NamedTuple

from .dtypes import dtype
from .refusal import refuse, refuse_keywords
from .tensor import Tensor, make

creation = count()  # a node is younger than all that it was made from


class Edge(NamedTuple):
    "Where a gradient goes: to an output of an older node, or to a leaf."

    node: "Node | None"
    index: int
    leaf: Tensor | None
    dtype: dtype


class Node:
    "One operation: what it was made from, and how a gradient goes back through it."

    __slots__ = ("edges", "name", "number", "outputs", "place", "pull", "reads")

    def __init__(self, name: str, inputs: Sequence, pull: Callable, reads: Sequence = ()):
        self.name = name
        self.number = next(creation)
        self.edges = [edge_to(x) for x in inputs]
        self.pull = pull  # ∂L/∂output → ∂L/∂input of each input, as lists; None: none
        self.reads = [(x.storage, x.storage.version) for x in reads]  # what `pull` looks at
        self.outputs = 1
        self.place = None if Mode.place is None else Mode.place()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __del__(self):
        """Hand on what the node holds, so that a long chain is freed in a loop.

        Otherwise Python frees a node within the freeing of the next, and a sum of a thousand terms
        is too deep for a browser.
        """
        Freed.waiting.append((self.edges, self.pull))
        self.edges = self.pull = None
        if not Freed.is_emptying:
            Freed.is_emptying = True
            while Freed.waiting:
                Freed.waiting.pop()
            Freed.is_emptying = False


class Freed:
    "What nodes held that nobody needs any more."

    waiting: ClassVar[list[tuple]] = []
    is_emptying = False


def edge_to(x: object) -> Edge | None:
    "The edge to an input, if it takes part in the gradient."
    if not isinstance(x, Tensor) or not x.requires_grad:
        return None
    return Edge(x.node, x.index, x if x.node is None else None, x.dtype)


# --- remembering ------------------------------------------------------------------------------
class Mode:
    "Are operations remembered at the moment, and with the place where each was made?"

    enabled = True
    place: Callable | None = None  # asked when a node is made


class set_grad_enabled(ContextDecorator):
    "Remember operations, or not: in a `with` block, or as a decorator."

    def __init__(self, mode: bool):
        self.before: list[bool] = []
        self.mode = mode

    def __enter__(self):
        self.before.append(Mode.enabled)
        Mode.enabled = self.mode

    def __exit__(self, *error):
        Mode.enabled = self.before.pop()


class no_grad(set_grad_enabled):
    "Do not remember operations inside."

    def __init__(self):
        super().__init__(False)


class enable_grad(set_grad_enabled):
    "Remember operations inside."

    def __init__(self):
        super().__init__(True)


def is_grad_enabled() -> bool:
    return Mode.enabled


def wants_gradient(*inputs: object) -> bool:
    "Has an operation with these inputs to be remembered?"
    if not Mode.enabled:
        return False
    for x in inputs:
        if x.__class__ is not float and isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def record(out: Tensor, name: str, inputs: Sequence, pull: Callable, reads: Sequence = ()) -> None:
    "Remember how `out` was made."
    out.node = Node(f"{name}Backward0", inputs, pull, reads)
    out.requires_grad = True


def adopt(target: Tensor, result: Tensor) -> None:
    "Put an operation's result in the place of `target`: a change in place."
    node = result.node
    if Mode.enabled and target.requires_grad and target.node is None:
        view = "a view of " if target.is_view else ""
        raise RuntimeError(
            f"{view}a leaf Variable that requires grad is being used in an in-place operation."
        )
    shared = target.is_view or target.storage.has_views
    if node is not None and shared:
        refuse("a change in place, with a gradient, of a tensor that has views")
    target.write(target.dtype.keep(list(result.flat())))
    if node is not None:
        version = (target.storage, target.storage.version)
        own = result.storage
        node.reads = [version if storage is own else (storage, n) for storage, n in node.reads]
        target.node = node
        target.index = result.index
        target.requires_grad = True


# --- walking back -----------------------------------------------------------------------------
def check_unchanged(node: Node) -> None:
    "Refuse a gradient that would read numbers which were changed since."
    for storage, version in node.reads:
        if storage.version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {node.name} reads it at version {version}, now it is at "
                f"version {storage.version}"
            )


def used(gradient: list) -> None:
    "What a node answers whose graph was not kept."
    raise RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors "
        "after they have already been freed). Specify retain_graph=True if you need to backward "
        "through the graph a second time or if you need to access saved tensors after calling "
        "backward."
    )


def leads_to(roots: Sequence[Node], wanted: set) -> set:
    "All nodes from which a wanted output or leaf can be reached."
    needed: dict[Node, bool] = {}
    stack = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            needed[node] = any(
                edge is not None
                and (
                    (edge.node, edge.index) in wanted
                    or edge.leaf in wanted
                    or needed.get(edge.node)
                )
                for edge in node.edges
            )
        elif node not in needed:
            needed[node] = False
            stack.append((node, True))
            for edge in node.edges:
                if edge is not None and edge.node is not None:
                    stack.append((edge.node, False))
    return {node for node, is_needed in needed.items() if is_needed}


class Walk:
    "Gradients on their way back: those that wait at nodes, and those that have arrived at leaves."

    def __init__(self):
        self.at_nodes: dict[Node, list] = {}  # one gradient per output, None so far
        self.at_leaves: dict[Tensor, list] = {}
        self.newest_first: list[tuple[int, Node]] = []  # a heap of the nodes that have a gradient

    def send(self, edge: Edge, g: list) -> None:
        "Add a gradient to those that have arrived at the same place."
        if edge.leaf is not None:
            self.at_leaves[edge.leaf] = together(self.at_leaves.get(edge.leaf), g, edge.dtype)
            return
        if edge.node not in self.at_nodes:
            self.at_nodes[edge.node] = [None] * edge.node.outputs
            heapq.heappush(self.newest_first, (-edge.node.number, edge.node))
        arrived = self.at_nodes[edge.node]
        arrived[edge.index] = together(arrived[edge.index], g, edge.dtype)

    def next_node(self) -> tuple[Node, list]:
        "The newest node, and all gradients that will ever reach it."
        _, node = heapq.heappop(self.newest_first)
        return node, self.at_nodes.pop(node)

    def go_through(self, node: Node, arrived: list, keep_graph: bool) -> None:
        "Ask a node for the gradients of its inputs, and send them on."
        check_unchanged(node)
        gradients = node.pull(arrived[0] if node.outputs == 1 else arrived)
        if not keep_graph and node.reads:
            node.pull = used
        for edge, g in zip(node.edges, gradients):
            if edge is not None and g is not None:
                self.send(edge, edge.dtype.keep(g))


def together(before: list | None, g: list, kind: dtype) -> list:
    "The sum of the gradients from all operations that use one tensor."
    return g if before is None else kind.keep(list(map(add, before, g)))


def walk_to_leaves(x: Tensor, gradient: list, keep_graph: bool) -> dict[Tensor, list]:
    "∂L/∂leaf of every leaf, from ∂L/∂x."
    walk = Walk()
    walk.send(edge_to(x), gradient)
    while walk.newest_first:
        walk.go_through(*walk.next_node(), keep_graph)
    return walk.at_leaves


def walk_to(
    wanted: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[list], keep_graph: bool
) -> list[list | None]:
    "∂L/∂x of each wanted tensor, or None, from ∂L/∂output; no node is asked in vain."
    places = [x if x.node is None else (x.node, x.index) for x in wanted]
    needed = leads_to([x.node for x in outputs if x.node is not None], set(places))
    found: dict[tuple[Node, int], list | None] = {}
    walk = Walk()
    for x, g in zip(outputs, gradients):
        walk.send(edge_to(x), g)
    while walk.newest_first:
        node, arrived = walk.next_node()
        found |= {(node, i): g for i, g in enumerate(arrived)}
        if node in needed:
            walk.go_through(node, arrived, keep_graph)
    return [walk.at_leaves.get(p) if isinstance(p, Tensor) else found.get(p) for p in places]


def first_gradient(x: Tensor, given: Tensor | None) -> list:
    "∂L/∂x to begin with: 1 for a scalar, else what the caller gives."
    if not x.requires_grad:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if given is None:
        if x.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return [1.0]
    if given.shape != x.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output[0] has a shape of {given.shape} and output[0] has a "
            f"shape of {x.shape}."
        )
    return x.dtype.keep(given.flat())


def backward(
    x: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **others,
) -> None:
    "Add ∂x/∂leaf to the `grad` of every leaf."
    refuse_keywords("backward", others)
    if create_graph:
        refuse("backward(create_graph=True)")
    gradients = walk_to_leaves(x, first_gradient(x, gradient), bool(retain_graph))
    for leaf, g in gradients.items():
        if leaf.grad is None:
            leaf.grad = make(list(g), leaf.shape, leaf.dtype)
        else:
            leaf.grad.write(leaf.dtype.keep(list(map(add, leaf.grad.flat(), g))))


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **others,
) -> tuple:
    "∂outputs/∂inputs, one tensor for each input. Several outputs are added up."
    refuse_keywords("autograd.grad", others)
    if create_graph:
        refuse("autograd.grad(create_graph=True)")
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    given = [None] * len(outputs) if given is None else given
    for x in inputs:
        if not x.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
    starts = [first_gradient(x, g) for x, g in zip(outputs, given)]
    found = walk_to(inputs, outputs, starts, bool(retain_graph))
    result = []
    for x, g in zip(inputs, found):
        if g is None and not allow_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        result.append(None if g is None else make(list(g), x.shape, x.dtype))
    return tuple(result)


# --- an operation of one's own ----------------------------------------------------------------
class Context:
    "What `forward` leaves for `backward`."

    def __init__(self, needs_input_grad: tuple):
        self.needs_input_grad = needs_input_grad
        self.saved: tuple = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved = tensors

    @property
    def saved_tensors(self) -> tuple:
        return self.saved

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value

    def __getattr__(self, name: str):
        if name in ("mark_dirty", "mark_non_differentiable", "save_for_forward"):
            refuse(f"Function.ctx.{name}")
        raise AttributeError(name)


class Function:
    "An operation with a derivative of its own: write `forward` and `backward`, call `apply`."

    @classmethod
    def apply(cls, *args):
        needs = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        context = Context(needs if Mode.enabled else (False,) * len(args))
        with no_grad():
            result = cls.forward(context, *args)
        if not wants_gradient(*args):
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        outputs = tuple(x.detach() if any(x is y for y in args) else x for x in outputs)

        def pull(arrived):
            if len(outputs) == 1:
                arrived = [arrived]
            given = []
            for g, x in zip(arrived, outputs):
                if g is None and context.materialize:
                    g = [0.0] * x.shape.numel()
                given.append(None if g is None else make(list(g), x.shape, x.dtype))
            with no_grad():
                pulled = cls.backward(context, *given)
            pulled = pulled if isinstance(pulled, tuple) else (pulled,)
            return [None if g is None else g.flat() for g in pulled]

        saved = [x for x in context.saved if x is not None]
        node = Node(f"{cls.__name__}Backward", args, pull, saved)
        node.outputs = len(outputs)
        for i, x in enumerate(outputs):
            if x.dtype.is_floating_point:
                x.node = node
                x.index = i
                x.requires_grad = True
        return outputs if isinstance(result, tuple) else outputs[0]


def once_differentiable(backward: Callable) -> Callable:
    "Gradients here are never differentiated again."
    return backward


# --- is a derivative right? -------------------------------------------------------------------
class GradcheckError(RuntimeError):
    "A derivative is not what differences of the function say."


def gradcheck(
    func: Callable,
    inputs: Tensor | Sequence,
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
    **others,
) -> bool:
    """Compare a gradient with (f(x + ε) − f(x − ε)) / 2ε, number by number.

    Raises GradcheckError where they differ by more than atol + rtol·|difference|.
    """
    refuse_keywords("autograd.gradcheck", others)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    learning = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not learning:
        raise ValueError(
            "gradcheck expects at least one input tensor to require gradient, but none of the them "
            "have requires_grad=True."
        )

    def outputs() -> list[Tensor]:
        result = func(*inputs)
        result = [result] if isinstance(result, Tensor) else list(result)
        return [x for x in result if x.dtype.is_floating_point]

    for i, x in enumerate(learning):
        numerical = slopes_by_differences(outputs, x, eps)
        for o, output in enumerate(outputs()):
            for k, analytical in enumerate(rows_of_derivative(output, x)):
                for slope, a in zip(numerical, analytical):
                    n = slope[o][k]
                    if abs(a - n) <= atol + rtol * abs(n):
                        continue
                    if not raise_exception:
                        return False
                    raise GradcheckError(
                        f"Jacobian mismatch for output {o} with respect to input {i},\n"
                        f"numerical:{n}\nanalytical:{a}\n"
                    )
    return True


def slopes_by_differences(outputs: Callable, x: Tensor, eps: float) -> list[list[list[float]]]:
    "For each number of x how fast each number of each output grows with it."

    def numbers() -> list[list]:
        with no_grad():
            return [list(output.flat()) for output in outputs()]

    values = list(x.flat())
    slopes = []
    for place, middle in enumerate(values):
        sides = []
        for moved in (middle + eps, middle - eps):
            x.write([*values[:place], moved, *values[place + 1 :]])
            sides.append(numbers())
        slopes.append(
            [[(up - down) / (2 * eps) for up, down in zip(*ends)] for ends in zip(*sides)]
        )
    x.write(values)
    return slopes


def rows_of_derivative(output: Tensor, x: Tensor) -> list[list[float]]:
    "∂output/∂x, a row for each number of the output."
    n = output.shape.numel()
    rows = []
    for k in range(n):
        gradient = None
        if output.requires_grad:
            start = [float(i == k) for i in range(n)]
            (gradient,) = walk_to([x], [output], [start], True)
        rows.append(gradient or [0.0] * x.shape.numel())
    return rows
