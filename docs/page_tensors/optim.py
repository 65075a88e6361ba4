"""Optimizers: SGD, Adam and LBFGS, step by step as torch takes them."""

import math
from collections.abc import Callable, Iterable

from .autograd import enable_grad
from .numbers import total
from .refusal import refuse, refuse_keywords
from .tensor import Tensor


class Optimizer:
    "Parameters, and how to step."

    def __init__(self, params: Iterable[Tensor], **settings):
        self.parameters = list(params)
        for p in self.parameters:
            if not isinstance(p, Tensor):
                refuse("an optimizer with groups of parameters")
            if not p.is_leaf:
                raise ValueError("can't optimize a non-leaf Tensor")
        if not self.parameters:
            raise ValueError("optimizer got an empty parameter list")
        self.param_groups = [{"params": self.parameters, **settings}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        "Forget the gradients."
        if not set_to_none:
            refuse("zero_grad(set_to_none=False)")
        for p in self.parameters:
            p.grad = None

    def learning(self) -> list[Tensor]:
        "Parameters that have a gradient."
        return [p for p in self.parameters if p.grad is not None]


def moved(p: Tensor, by: list) -> None:
    "p + by, in place."
    p.write(p.dtype.keep([x + d for x, d in zip(p.flat(), by)]))


class SGD(Optimizer):
    "p ← p − lr·g; with momentum μ: v ← μ·v + g, p ← p − lr·v."

    def __init__(self, params, lr: float = 1e-3, momentum: float = 0, **others):
        refuse_keywords("SGD", others)
        super().__init__(params, lr=lr, momentum=momentum)
        self.velocity: dict[Tensor, list] = {}

    def step(self, closure: Callable | None = None):
        "Take one step."
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        settings = self.param_groups[0]
        lr, momentum = settings["lr"], settings["momentum"]
        for p in self.learning():
            g = p.grad.flat()
            if momentum:
                before = self.velocity.get(p)
                if before is not None:
                    g = p.dtype.keep([momentum * v + gi for v, gi in zip(before, g)])
                self.velocity[p] = g
            moved(p, [-lr * gi for gi in g])
        return loss


class Adam(Optimizer):
    """m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²; p ← p − lr·m̂/(√v̂ + ϵ).

    m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ) at step t. Kingma and Ba (2015), algorithm 1.
    """

    def __init__(
        self, params, lr: float = 1e-3, betas: tuple = (0.9, 0.999), eps: float = 1e-8, **others
    ):
        refuse_keywords("Adam", others)
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.moments: dict[Tensor, tuple[int, list, list]] = {}

    def step(self, closure: Callable | None = None):
        "Take one step."
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        settings = self.param_groups[0]
        lr, (beta1, beta2), eps = settings["lr"], settings["betas"], settings["eps"]
        for p in self.learning():
            keep = p.dtype.keep
            g = p.grad.flat()
            t, m, v = self.moments.get(p, (0, [0.0] * len(g), [0.0] * len(g)))
            t += 1
            m = keep([mi + (1 - beta1) * (gi - mi) for mi, gi in zip(m, g)])
            v = keep([vi * beta2 + (1 - beta2) * gi * gi for vi, gi in zip(v, g)])
            self.moments[p] = t, m, v
            size = lr / (1 - beta1**t)
            root = math.sqrt(1 - beta2**t)
            moved(p, [-size * mi / (math.sqrt(vi) / root + eps) for mi, vi in zip(m, v)])
        return loss


class LBFGS(Optimizer):
    """Steps along −H·g, where H, the inverse of the curvature, is guessed from earlier steps.

    Nocedal and Wright (2006), algorithm 7.4. Without a line search.
    """

    def __init__(
        self,
        params,
        lr: float = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
        **others,
    ):
        refuse_keywords("LBFGS", others)
        if line_search_fn is not None:
            refuse("LBFGS(line_search_fn=…)")
        super().__init__(params, lr=lr)
        self.max_iter = max_iter
        self.max_eval = max_iter * 5 // 4 if max_eval is None else max_eval
        self.tolerance_grad = tolerance_grad
        self.tolerance_change = tolerance_change
        self.history_size = history_size
        self.changes: list[list] = []  # y, of the gradient, of earlier steps
        self.steps: list[list] = []  # s, of the parameters
        self.scale = 1.0
        self.iterations = 0
        self.direction: list = []
        self.length = 0.0
        self.last_gradient: list = []

    def gradient(self) -> list:
        "All gradients in a row."
        row = []
        for p in self.parameters:
            row += p.grad.flat() if p.grad is not None else [0.0] * p.shape.numel()
        return row

    def move(self, direction: list, length: float) -> None:
        start = 0
        for p in self.parameters:
            n = p.shape.numel()
            moved(p, [length * d for d in direction[start : start + n]])
            start += n

    def remember(self, g: list) -> None:
        "Keep what the last step has shown of the curvature."
        y = [a - b for a, b in zip(g, self.last_gradient)]
        s = [d * self.length for d in self.direction]
        ys = inner(y, s)
        if ys > 1e-10:
            if len(self.changes) == self.history_size:
                self.changes.pop(0)
                self.steps.pop(0)
            self.changes.append(y)
            self.steps.append(s)
            self.scale = ys / inner(y, y)

    def newton_direction(self, g: list) -> list:
        "−H·g, by two passes through the history."
        q = [-x for x in g]
        shares = []
        for y, s in zip(reversed(self.changes), reversed(self.steps)):
            share = inner(s, q) / inner(y, s)
            shares.append(share)
            q = [qi - share * yi for qi, yi in zip(q, y)]
        r = [self.scale * x for x in q]
        for y, s, share in zip(self.changes, self.steps, reversed(shares)):
            gap = share - inner(y, r) / inner(y, s)
            r = [ri + gap * si for ri, si in zip(r, s)]
        return r

    def step(self, closure: Callable):
        "Take up to max_iter steps; `closure` computes the loss and its gradients anew."
        lr = self.param_groups[0]["lr"]
        with enable_grad():
            first = closure()
        loss = float(first)
        evaluations = 1
        g = self.gradient()
        if max(map(abs, g)) <= self.tolerance_grad:
            return first
        for iteration in range(1, self.max_iter + 1):
            self.iterations += 1
            if self.iterations == 1:
                self.direction = [-x for x in g]
                self.length = min(1.0, 1.0 / sum(map(abs, g))) * lr
            else:
                self.remember(g)
                self.direction = self.newton_direction(g)
                self.length = lr
            self.last_gradient = g
            before = loss
            slope = inner(g, self.direction)
            if slope > -self.tolerance_change:
                break
            self.move(self.direction, self.length)
            if iteration == self.max_iter:
                break
            with enable_grad():
                loss = float(closure())
            g = self.gradient()
            evaluations += 1
            if evaluations >= self.max_eval or max(map(abs, g)) <= self.tolerance_grad:
                break
            if max(abs(d * self.length) for d in self.direction) <= self.tolerance_change:
                break
            if abs(loss - before) < self.tolerance_change:
                break
        return first


def inner(a: list, b: list) -> float:
    return total(map(float.__mul__, a, b))


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"torch.optim.{name}")
