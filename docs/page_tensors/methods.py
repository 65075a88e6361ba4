"""What a tensor can do: operators, and every operation as a method."""

from . import autograd, creation, elementwise, indexing, linear, printing, reductions, shaping
from .elementwise import in_place
from .refusal import NoSuchAttribute, refuse, refuse_keywords
from .tensor import Tensor
from .torch_names import TENSOR


# --- as one number ----------------------------------------------------------------------------
def as_bool(self: Tensor) -> bool:
    values = self.flat()
    if len(values) == 1:
        return bool(values[0])
    if not values:
        raise RuntimeError("Boolean value of Tensor with no values is ambiguous")
    raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")


def as_index(self: Tensor) -> int:
    if self.dtype.is_floating_point or self.shape.numel() != 1:
        raise TypeError("only integer tensors of a single element can be converted to an index")
    return int(self.flat()[0])


def as_float(self: Tensor) -> float:
    return float(creation.item(self))


def as_int(self: Tensor) -> int:
    return int(creation.item(self))


def length(self: Tensor) -> int:
    if self.ndim == 0:
        raise TypeError("len() of a 0-d tensor")
    return self.shape[0]


def rows(self: Tensor):
    if self.ndim == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(shaping.unbind(self, 0))


def contains(self: Tensor, number: object) -> bool:
    return any(elementwise.eq(self, number).flat())


def size(self: Tensor, dim: int | None = None):
    return self.shape if dim is None else self.shape[dim]


def numel(self: Tensor) -> int:
    return self.shape.numel()


def dim(self: Tensor) -> int:
    return self.ndim


def stride(self: Tensor) -> tuple:
    return self.strides


def type_as(self: Tensor, other: Tensor) -> Tensor:
    return creation.to_type(self, other.dtype)


def is_floating_point(self: Tensor) -> bool:
    return self.dtype.is_floating_point


def is_contiguous(self: Tensor) -> bool:
    from .tensor import is_contiguous as side_by_side

    return side_by_side(self.shape, self.strides)


# --- operators --------------------------------------------------------------------------------
def is_operand(x: object) -> bool:
    return isinstance(x, Tensor | int | float)


def operator(function):
    "a ∘ b; Python asks the other operand if it is neither a tensor nor a number."

    def left(self: Tensor, other: object):
        if not is_operand(other):
            if isinstance(other, str | list | tuple | dict | set) or other is None:
                raise TypeError(
                    f"unsupported operand type(s): 'Tensor' and '{type(other).__name__}'"
                )
            return NotImplemented
        return function(self, other)

    return left


def reversed_operator(function):
    "b ∘ a, where b is a number."

    def right(self: Tensor, other: object):
        return function(other, self) if is_operand(other) else NotImplemented

    return right


def equals(self: Tensor, other: object):
    return elementwise.eq(self, other) if is_operand(other) else NotImplemented


def differs(self: Tensor, other: object):
    return elementwise.ne(self, other) if is_operand(other) else NotImplemented


def unknown(self: Tensor, name: str):
    "A method that is not here is refused by its name."
    if name not in TENSOR:
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")
    raise NoSuchAttribute(
        f"this page has part of torch, and not `Tensor.{name}`: open the notebook"
    )


def where(self: Tensor, condition: Tensor, other: object) -> Tensor:
    return elementwise.where(condition, self, other)


def retain_grad(self: Tensor) -> None:
    if not self.is_leaf:
        refuse("Tensor.retain_grad")


def softmax(self: Tensor, dim: int, dtype=None, **others) -> Tensor:
    return reductions.softmax(self, dim, dtype=dtype, **others)


def log_softmax(self: Tensor, dim: int, dtype=None, **others) -> Tensor:
    refuse_keywords("log_softmax", others)
    return reductions.log_softmax(self, dim, dtype=dtype)


METHODS = {
    # as Python sees it
    "__bool__": as_bool,
    "__index__": as_index,
    "__float__": as_float,
    "__int__": as_int,
    "__len__": length,
    "__iter__": rows,
    "__contains__": contains,
    "__repr__": printing.text,
    "__str__": printing.text,
    "__format__": printing.formatted,
    "__getitem__": indexing.get,
    "__setitem__": indexing.put,
    "__getattr__": unknown,
    "__eq__": equals,
    "__ne__": differs,
    "__lt__": operator(elementwise.lt),
    "__le__": operator(elementwise.le),
    "__gt__": operator(elementwise.gt),
    "__ge__": operator(elementwise.ge),
    "__add__": operator(elementwise.add),
    "__radd__": operator(elementwise.add),
    "__sub__": operator(elementwise.sub),
    "__rsub__": reversed_operator(elementwise.sub),
    "__mul__": operator(elementwise.mul),
    "__rmul__": operator(elementwise.mul),
    "__truediv__": operator(elementwise.div),
    "__rtruediv__": reversed_operator(elementwise.div),
    "__floordiv__": operator(elementwise.floor_divide),
    "__rfloordiv__": reversed_operator(elementwise.floor_divide),
    "__mod__": operator(elementwise.remainder),
    "__pow__": operator(elementwise.pow_),
    "__rpow__": reversed_operator(elementwise.pow_),
    "__matmul__": linear.matmul,
    "__neg__": elementwise.neg,
    "__abs__": elementwise.absolute,
    "__invert__": elementwise.bitwise_not,
    "__and__": operator(elementwise.bitwise_and),
    "__rand__": operator(elementwise.bitwise_and),
    "__or__": operator(elementwise.bitwise_or),
    "__ror__": operator(elementwise.bitwise_or),
    "__xor__": operator(elementwise.bitwise_xor),
    "__rxor__": operator(elementwise.bitwise_xor),
    "__iadd__": operator(in_place(elementwise.add)),
    "__isub__": operator(in_place(elementwise.sub)),
    "__imul__": operator(in_place(elementwise.mul)),
    "__itruediv__": operator(in_place(elementwise.div)),
    "__ipow__": operator(in_place(elementwise.pow_)),
    "__iand__": operator(in_place(elementwise.bitwise_and)),
    "__ior__": operator(in_place(elementwise.bitwise_or)),
    # what it is
    "size": size,
    "numel": numel,
    "nelement": numel,
    "dim": dim,
    "stride": stride,
    "is_contiguous": is_contiguous,
    "is_floating_point": is_floating_point,
    "item": creation.item,
    "tolist": creation.tolist,
    # gradients
    "backward": autograd.backward,
    "requires_grad_": creation.requires_grad_,
    "retain_grad": retain_grad,
    "detach": creation.detach,
    # conversions
    "to": creation.to,
    "type_as": type_as,
    "double": creation.double,
    "float": creation.float_,
    "half": creation.half,
    "bfloat16": creation.bfloat16,
    "long": creation.long,
    "int": creation.int_,
    "bool": creation.bool_of,
    "cpu": creation.cpu,
    "clone": creation.clone,
    "contiguous": creation.contiguous,
    "copy_": creation.copy_,
    "fill_": creation.fill_,
    "zero_": creation.zero_,
    "new_zeros": creation.new_zeros,
    "new_ones": creation.new_ones,
    "new_full": creation.new_full,
    "new_tensor": creation.new_tensor,
    "tril": creation.tril,
    "triu": creation.triu,
    # number by number
    "exp": elementwise.exp,
    "expm1": elementwise.expm1,
    "log": elementwise.log,
    "log1p": elementwise.log1p,
    "sqrt": elementwise.sqrt,
    "rsqrt": elementwise.rsqrt,
    "square": elementwise.square,
    "neg": elementwise.neg,
    "abs": elementwise.absolute,
    "sign": elementwise.sign,
    "reciprocal": elementwise.reciprocal,
    "sin": elementwise.sin,
    "cos": elementwise.cos,
    "tanh": elementwise.tanh,
    "sigmoid": elementwise.sigmoid,
    "relu": elementwise.relu,
    "logit": elementwise.logit,
    "floor": elementwise.floor,
    "ceil": elementwise.ceil,
    "round": elementwise.round_,
    "add": elementwise.add,
    "sub": elementwise.sub,
    "mul": elementwise.mul,
    "div": elementwise.div,
    "pow": elementwise.pow_,
    "floor_divide": elementwise.floor_divide,
    "remainder": elementwise.remainder,
    "maximum": elementwise.maximum,
    "minimum": elementwise.minimum,
    "logaddexp": elementwise.logaddexp,
    "nextafter": elementwise.nextafter,
    "eq": elementwise.eq,
    "ne": elementwise.ne,
    "lt": elementwise.lt,
    "le": elementwise.le,
    "gt": elementwise.gt,
    "ge": elementwise.ge,
    "logical_and": elementwise.logical_and,
    "logical_or": elementwise.logical_or,
    "logical_xor": elementwise.logical_xor,
    "logical_not": elementwise.logical_not,
    "isnan": elementwise.isnan,
    "isfinite": elementwise.isfinite,
    "isinf": elementwise.isinf,
    "isneginf": elementwise.isneginf,
    "isposinf": elementwise.isposinf,
    "isclose": elementwise.isclose,
    "allclose": elementwise.allclose,
    "equal": elementwise.equal,
    "where": where,
    "clamp": elementwise.clamp,
    "clip": elementwise.clamp,
    "masked_fill": elementwise.masked_fill,
    "nan_to_num": elementwise.nan_to_num,
    # along dimensions
    "sum": reductions.sum_,
    "mean": reductions.mean,
    "prod": reductions.prod,
    "cumsum": reductions.cumsum,
    "var": reductions.var,
    "std": reductions.std,
    "norm": reductions.norm,
    "amax": reductions.amax,
    "amin": reductions.amin,
    "max": reductions.max_,
    "min": reductions.min_,
    "aminmax": reductions.aminmax,
    "argmax": reductions.argmax,
    "argmin": reductions.argmin,
    "any": reductions.any_,
    "all": reductions.all_,
    "logsumexp": reductions.logsumexp,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "sort": reductions.sort,
    "argsort": reductions.argsort,
    "unique": reductions.unique,
    "quantile": reductions.quantile,
    # products
    "matmul": linear.matmul,
    "mm": linear.mm,
    "mv": linear.mv,
    "dot": linear.dot,
    "outer": linear.outer,
    "addmm": linear.addmm,
    # shapes
    "view": shaping.view,
    "view_as": shaping.view_as,
    "reshape": shaping.reshape,
    "reshape_as": shaping.reshape_as,
    "flatten": shaping.flatten,
    "unflatten": shaping.unflatten,
    "squeeze": shaping.squeeze,
    "unsqueeze": shaping.unsqueeze,
    "permute": shaping.permute,
    "transpose": shaping.transpose,
    "t": shaping.t,
    "movedim": shaping.movedim,
    "flip": shaping.flip,
    "expand": shaping.expand,
    "expand_as": shaping.expand_as,
    "repeat": shaping.repeat,
    "repeat_interleave": shaping.repeat_interleave,
    "unbind": shaping.unbind,
    "split": shaping.split,
    "chunk": shaping.chunk,
    # places
    "select": indexing.select,
    "narrow": indexing.narrow,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter_add,
    "index_select": indexing.index_select,
    "index_copy_": indexing.index_copy_,
    "masked_scatter": indexing.masked_scatter,
    "masked_select": indexing.masked_select,
    "nonzero": indexing.nonzero,
    "diagonal": indexing.diagonal,
    "fill_diagonal_": indexing.fill_diagonal_,
    "bincount": indexing.bincount,
    # in place
    "add_": in_place(elementwise.add),
    "sub_": in_place(elementwise.sub),
    "mul_": in_place(elementwise.mul),
    "div_": in_place(elementwise.div),
    "pow_": in_place(elementwise.pow_),
    "exp_": in_place(elementwise.exp),
    "log_": in_place(elementwise.log),
    "sqrt_": in_place(elementwise.sqrt),
    "neg_": in_place(elementwise.neg),
    "clamp_": in_place(elementwise.clamp),
    "masked_fill_": in_place(elementwise.masked_fill),
    "scatter_": in_place(indexing.scatter),
    "scatter_add_": in_place(indexing.scatter_add),
    "addmm_": in_place(linear.addmm),
}
PROPERTIES = {"T": shaping.T, "mT": shaping.mT}

for name, function in METHODS.items():
    setattr(Tensor, name, function)
for name, function in PROPERTIES.items():
    setattr(Tensor, name, property(function))
