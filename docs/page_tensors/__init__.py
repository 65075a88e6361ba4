"""Tensors for a page: part of torch in pure Python, and nothing that torch does otherwise.

Made for the lessons that run in a browser, where there is no torch. What is here has torch's names
and gives torch's numbers, texts and errors; what is not here is refused by name. Read it in this
order: `tensor` (a list, and how to read it), `autograd` (how a gradient is found), `elementwise`
(operations and their derivatives), then `shapes`, `shaping`, `indexing` and `reductions`.
"""

import math
import sys

from . import (
    autograd as autograd,
)
from . import (
    creation,
    dtypes,
    elementwise,
    indexing,
    linear,
    printing,
    randomness,
    reductions,
    shaping,
)
from . import (
    distributions as distributions,
)
from . import (
    methods as methods,
)
from . import (
    nn as nn,
)
from . import (
    optim as optim,
)
from . import (
    special as special,
)
from . import (
    testing as testing,
)
from . import (
    utils as utils,
)
from .autograd import (
    enable_grad as enable_grad,
)
from .autograd import (
    is_grad_enabled as is_grad_enabled,
)
from .autograd import (
    no_grad as no_grad,
)
from .autograd import (
    set_grad_enabled as set_grad_enabled,
)
from .refusal import NotOnThisPage as NotOnThisPage
from .refusal import refuse
from .shapes import Size as Size
from .shapes import broadcast_shapes as broadcast_shapes
from .tensor import Tensor
from .tensor import device as device
from .torch_names import TORCH

__version__ = "2.13.0+page"

# constants and types
inf = math.inf
nan = math.nan
pi = math.pi
e = math.e
dtype = dtypes.dtype
finfo = dtypes.finfo
promote_types = dtypes.promote_types
bool = dtypes.bool_  # noqa: A001
int32 = int = dtypes.int32  # noqa: A001
int64 = long = dtypes.int64
float16 = half = dtypes.float16
bfloat16 = dtypes.bfloat16
float32 = float = dtypes.float32  # noqa: A001
float64 = double = dtypes.float64

# new tensors
tensor = creation.tensor
as_tensor = creation.as_tensor
zeros = creation.zeros
ones = creation.ones
empty = creation.empty
full = creation.full
zeros_like = creation.zeros_like
ones_like = creation.ones_like
empty_like = creation.empty_like
full_like = creation.full_like
arange = creation.arange
linspace = creation.linspace
logspace = creation.logspace
eye = creation.eye
tril = creation.tril
triu = creation.triu
clone = creation.clone

# random numbers
Generator = randomness.Generator
default_generator = randomness.default_generator
manual_seed = randomness.manual_seed
rand = randomness.rand
randn = randomness.randn
rand_like = randomness.rand_like
randn_like = randomness.randn_like
randint = randomness.randint
randperm = randomness.randperm
bernoulli = randomness.bernoulli
multinomial = randomness.multinomial

# number by number
exp = elementwise.exp
expm1 = elementwise.expm1
log = elementwise.log
log1p = elementwise.log1p
sqrt = elementwise.sqrt
rsqrt = elementwise.rsqrt
square = elementwise.square
neg = negative = elementwise.neg
abs = absolute = elementwise.absolute  # noqa: A001
sign = elementwise.sign
reciprocal = elementwise.reciprocal
sin = elementwise.sin
cos = elementwise.cos
tanh = elementwise.tanh
sigmoid = elementwise.sigmoid
relu = elementwise.relu
logit = elementwise.logit
floor = elementwise.floor
ceil = elementwise.ceil
round = elementwise.round_  # noqa: A001
add = elementwise.add
sub = subtract = elementwise.sub
mul = multiply = elementwise.mul
div = divide = true_divide = elementwise.div
pow = elementwise.pow_  # noqa: A001
floor_divide = elementwise.floor_divide
remainder = elementwise.remainder
maximum = elementwise.maximum
minimum = elementwise.minimum
logaddexp = elementwise.logaddexp
nextafter = elementwise.nextafter
eq = elementwise.eq
ne = elementwise.ne
lt = elementwise.lt
le = elementwise.le
gt = elementwise.gt
ge = elementwise.ge
logical_and = elementwise.logical_and
logical_or = elementwise.logical_or
logical_xor = elementwise.logical_xor
logical_not = elementwise.logical_not
isnan = elementwise.isnan
isfinite = elementwise.isfinite
isinf = elementwise.isinf
isneginf = elementwise.isneginf
isposinf = elementwise.isposinf
isclose = elementwise.isclose
allclose = elementwise.allclose
equal = elementwise.equal
where = elementwise.where
clamp = clip = elementwise.clamp
masked_fill = elementwise.masked_fill
nan_to_num = elementwise.nan_to_num
result_type = elementwise.result_type

# along dimensions
sum = reductions.sum_  # noqa: A001
mean = reductions.mean
prod = reductions.prod
cumsum = reductions.cumsum
var = reductions.var
std = reductions.std
norm = reductions.norm
amax = reductions.amax
amin = reductions.amin
max = reductions.max_  # noqa: A001
min = reductions.min_  # noqa: A001
aminmax = reductions.aminmax
argmax = reductions.argmax
argmin = reductions.argmin
any = reductions.any_  # noqa: A001
all = reductions.all_  # noqa: A001
logsumexp = reductions.logsumexp
softmax = reductions.softmax
log_softmax = reductions.log_softmax
sort = reductions.sort
argsort = reductions.argsort
unique = reductions.unique
quantile = reductions.quantile

# products
matmul = linear.matmul
mm = linear.mm
mv = linear.mv
dot = linear.dot
outer = linear.outer
addmm = linear.addmm
cosine_similarity = nn.functional.cosine_similarity

# shapes
reshape = shaping.reshape
flatten = shaping.flatten
unflatten = shaping.unflatten
squeeze = shaping.squeeze
unsqueeze = shaping.unsqueeze
permute = shaping.permute
transpose = shaping.transpose
movedim = shaping.movedim
t = shaping.t
flip = shaping.flip
repeat_interleave = shaping.repeat_interleave
cat = concat = shaping.cat
stack = shaping.stack
unbind = shaping.unbind
split = shaping.split
chunk = shaping.chunk
meshgrid = shaping.meshgrid
cartesian_prod = shaping.cartesian_prod

# places
select = indexing.select
narrow = indexing.narrow
gather = indexing.gather
scatter = indexing.scatter
scatter_add = indexing.scatter_add
index_select = indexing.index_select
masked_scatter = indexing.masked_scatter
masked_select = indexing.masked_select
nonzero = indexing.nonzero
isin = indexing.isin
bincount = indexing.bincount
searchsorted = indexing.searchsorted

set_printoptions = printing.set_printoptions


def is_tensor(x: object) -> "bool":
    return isinstance(x, Tensor)


def is_floating_point(x: Tensor) -> "bool":
    return x.dtype.is_floating_point


def get_default_dtype() -> dtype:
    return float32


def is_autocast_enabled(device_type: str = "cpu") -> "bool":
    "Never, on this page."
    return False


class autocast:
    "Mixed precision: a name for annotations, and nothing that can be entered."

    def __init__(self, *given, **keywords):
        refuse("torch.autocast")


def set_num_threads(n: "int") -> None:
    "There is one thread on this page."


def get_num_threads() -> "int":
    return 1


def install() -> None:
    "Make `import torch` give this library."
    here = sys.modules[__name__]
    sys.modules["torch"] = here
    for name, module in {
        "autograd": autograd,
        "autograd.function": autograd,
        "distributions": distributions,
        "nn": nn,
        "nn.functional": nn.functional,
        "optim": optim,
        "special": special,
        "testing": testing,
        "utils": utils,
        "utils.checkpoint": utils,
        "utils._python_dispatch": utils,
    }.items():
        sys.modules[f"torch.{name}"] = module


def __getattr__(name: str):
    if name not in TORCH:
        raise AttributeError(f"module 'torch' has no attribute '{name}'")
    refuse(f"torch.{name}")
