"""Gluon kernels as plain Python on a CPU, a program after the other: Triton's interpreter knows Triton alone.

Layouts are not looked at: compiling checks them. Waiting is: a tile that is being copied is not a number
until it was waited for, and a product reads its operands in shared memory when it is waited for, so that they
are not overwritten too early. What threads do to one another is not: barriers are the compiler's, and a GPU's
test.
"""

from types import ModuleType, SimpleNamespace

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction


class Block(torch.Tensor):
    """A tensor in registers: assignments make a new one."""

    def __iadd__(self, other):
        return self + other

    def __imul__(self, other):
        return self * other


def block(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Block)


class Pointer:
    """Into the memory of a tensor, which need not be contiguous."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x):
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(torch.as_strided(x.detach(), (size,), (1,)))

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def places(self, mask):
        """Those that are visited, as they lie in memory; an access outside of it is an IndexError."""
        offset = torch.as_tensor(self.offset).as_subclass(torch.Tensor)
        if mask is None:
            return offset, torch.ones_like(offset, dtype=torch.bool)
        return torch.broadcast_tensors(offset, torch.as_tensor(mask).as_subclass(torch.Tensor))


def load(p, mask=None, other=0):
    offset, seen = p.places(mask)
    if bool((offset[seen] < 0).any()):
        raise IndexError("a place before the memory is read")
    found = torch.full(offset.shape, other, dtype=p.memory.dtype)
    found[seen] = p.memory[offset[seen]]
    return block(found)


def store(p, value, mask=None):
    offset, seen = p.places(mask)
    if bool((offset[seen] < 0).any()):
        raise IndexError("a place before the memory is written")
    p.memory[offset[seen]] = torch.as_tensor(value).as_subclass(torch.Tensor).expand(offset.shape)[seen]


class Shared:
    def __init__(self, memory):
        self.memory, self.dtype, self.shape = memory, memory.dtype, memory.shape

    def index(self, i):
        return Shared(self.memory[int(i)])

    def permute(self, order):
        return Shared(self.memory.permute(order))

    def slice(self, start, length, dim=0):
        return Shared(self.memory.narrow(dim, start, length))

    def load(self, layout):
        return block(self.memory.clone())

    def store(self, value):
        assert (value.dtype, value.shape) == (self.dtype, self.shape)
        self.memory.copy_(value.as_subclass(torch.Tensor))


def allocate_shared_memory(dtype, shape, layout):
    return Shared(torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype))


class Copies:
    """`async_copy`: copies arrive in the order in which their groups were committed."""

    def __init__(self):
        self.begun, self.groups = [], []

    def begin(self, tile, p, mask=None):
        assert tile.shape == torch.as_tensor(p.offset).shape
        tile.memory.fill_(torch.nan)
        self.begun.append((tile, load(p, mask)))

    def commit_group(self):
        self.groups.append(self.begun)
        self.begun = []

    def wait_group(self, pending):
        while len(self.groups) > pending:
            for tile, rows in self.groups.pop(0):
                tile.store(rows)


class Product:
    """One that may still be under way: a number only after waiting."""

    def __init__(self, a, b, acc):
        self.a, self.b, self.acc, self.done = a, b, acc, None

    def finish(self):
        acc = self.acc.done if isinstance(self.acc, Product) else self.acc
        a = self.a.memory if isinstance(self.a, Shared) else self.a
        self.done = block(a.float() @ self.b.memory.float() + acc)


class Products:
    """`warpgroup_mma` and waiting for it: products end in the order in which they were started."""

    def __init__(self):
        self.begun = []

    def begin(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        assert a.dtype == b.dtype
        self.begun.append(Product(a, b, acc if use_acc else torch.zeros(a.shape[0], b.shape[1])))
        return self.begun[-1]

    def wait(self, pending, products):
        """What is among the last `pending` that were started is no number yet."""
        while len(self.begun) > pending:
            self.begun.pop(0).finish()
        found = [x.done if isinstance(x, Product) and x.done is not None else x for x in products]
        return found[0] if len(found) == 1 else found


def assembly(text, constraints, args, **options):
    """The instructions that kernels ask for; a clock, which is not in its last half."""
    (x,) = args
    known = {"mov.b32": lambda: x, "mov.u32": lambda: 0 * x, "rcp.approx.ftz.f32": lambda: 1.0 / x}
    return known[text.split()[0]]()


def language(program):
    """What kernels call `gl`."""
    no_layout = lambda *args, **options: None  # noqa: E731
    return SimpleNamespace(
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        rsqrt=torch.rsqrt,
        exp=torch.exp,
        abs=torch.abs,
        where=torch.where,
        constexpr=constexpr,
        program_id=lambda axis: block(program["id"]),
        arange=lambda start, end, layout: block(torch.arange(start, end)),
        num_warps=lambda: program["warps"],
        static_range=range,
        full=lambda shape, value, dtype, layout: block(torch.full(tuple(shape), value, dtype=dtype)),
        zeros=lambda shape, dtype, layout: block(torch.zeros(tuple(shape), dtype=dtype)),
        to_tensor=block,
        convert_layout=lambda x, layout: x,
        reshape=lambda x, shape: x.reshape(tuple(shape)),
        permute=lambda x, order: x.permute(order),
        join=lambda a, b: torch.stack([a, b], -1),
        split=lambda x: x.unbind(-1),
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        min=lambda x, axis: x.amin(axis),
        maximum=lambda a, b: torch.fmax(block(a), block(b)),
        minimum=lambda a, b: torch.fmin(block(a), block(b)),
        inline_asm_elementwise=assembly,
        load=load,
        store=store,
        allocate_shared_memory=allocate_shared_memory,
        SliceLayout=no_layout,
        BlockedLayout=no_layout,
        SwizzledSharedLayout=no_layout,
        NVMMASharedLayout=SimpleNamespace(get_default_for=no_layout),
    )


def emulate(monkeypatch, modules: list[ModuleType]):
    """Kernels of these modules run on a CPU."""
    program: dict[str, int] = {}
    copies, products = Copies(), Products()
    names = {
        "gl": language(program),
        "async_copy": copies,
        "_copy": copies.begin,
        "fence_async_shared": lambda: None,
        "warpgroup_mma": products.begin,
        "warpgroup_mma_wait": products.wait,
    }

    def run(kernel, *args, grid, warmup, num_warps, enable_fp_fusion, **constants):
        args = [Pointer.to(x) if isinstance(x, torch.Tensor) else x for x in args]
        program["warps"] = num_warps
        for program["id"] in range(grid[0]):
            kernel.fn(*args, **constants)
            assert not copies.begun
            assert not copies.groups
            assert not products.begun

    monkeypatch.setattr(GluonJITFunction, "__call__", lambda kernel, *args: kernel.fn(*args))
    monkeypatch.setattr(GluonJITFunction, "run", run)
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in names:
                monkeypatch.setattr(module, name, names[name])
            elif isinstance(value, ConstexprFunction):
                monkeypatch.setattr(module, name, lambda *args: None)
            elif isinstance(value, constexpr):
                monkeypatch.setattr(module, name, value.value)
