"""Which forms of a product are right on this GPU, and how fast they are: ``python benchmarks/products.py``.

The numerator of attention by a map of many degrees, in bfloat16, 32 heads of 16,384 rows, d = 64: a row's
features are products of its projections, one for each level of a group of features, and meet the sums of
that group. Compilers get such loops wrong for some tiles (docs/kernels.md). The forms differ in where the
features, which are computed, stand in a product: on the left, where tensor cores read them from registers, or
on the right, where they are read from shared memory. Each is run by a process of its own, which an illegal
access ends. Writes benchmarks/results/products-<gpu>.json.
"""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from schoenbat.experiments.measurement import time_replay
from schoenbat.report.results import device_name, write_results

DIM, HEADS, ROWS, BLOCK = 64, 32, 16_384, 64
# As many levels, and features, as an unbiased map of 128 features at scale 4 has, by the width of its groups.
LEVELS = {32: (3, 4, 5, 11), 64: (4, 11), 128: (11,)}
PROGRAMS, RUNS = 264, 20


@dataclass(frozen=True)
class Form:
    """How the product is compiled."""

    side: str
    """Where features stand: ``"left"``, in loops that Triton pipelines; ``"right"``, in others."""
    group: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FormRow(Form):
    """What became of it; the error is that of the output, as a share of its norm."""

    error: float | None = None
    bit_equal: bool | None = None
    """Whether all runs gave the same."""
    median: float | None = None
    ended: str = ""
    """The last words of a process that failed."""


FORMS = [
    *(
        Form("left", group, *how)
        for group, how in itertools.product((32, 64), ((2, 2), (4, 1), (4, 2), (4, 3)))
    ),
    *(Form("right", group, 4, 1) for group in (32, 64, 128)),
]


@triton.jit
def left(
    p_x, p_out, p_tiles, p_first, p_sums, N, TILES, SPLITS, num_groups,
    DIM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some tiles of outputs [BLOCK, DIM], from features [BLOCK, GROUP]."""
    i_split, i_h = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    o_n, o_d, o_g = tl.arange(0, BLOCK), tl.arange(0, DIM), tl.arange(0, GROUP)
    p_x += i_h.to(tl.int64) * N * DIM
    p_out += i_h.to(tl.int64) * N * DIM
    p_sums += i_h * num_groups * GROUP * DIM
    for i_tile in range(i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))):
        o_row = i_tile * BLOCK + o_n
        b_x = tl.load(p_x + o_row[:, None] * DIM + o_d[None, :], mask=o_row[:, None] < N, other=0.0)
        b_out = tl.zeros([BLOCK, DIM], tl.float32)
        for i_group in range(num_groups):
            b_phi = tl.full([BLOCK, GROUP], 1.0, tl.float32)
            for i_level in range(tl.load(p_first + i_group), tl.load(p_first + i_group + 1)):
                b_w = tl.load(p_tiles + i_level * DIM * GROUP + (o_d[:, None] * GROUP + o_g[None, :]))
                b_phi *= tl.dot(b_x, b_w, input_precision="ieee")
            b_sums = tl.load(p_sums + (i_group * GROUP + o_g)[:, None] * DIM + o_d[None, :])
            b_out += tl.dot(b_phi.to(b_x.dtype), b_sums, input_precision="ieee")
        p_tile = p_out + o_row[:, None] * DIM + o_d[None, :]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=o_row[:, None] < N)


@triton.jit
def right(
    p_x, p_out, p_tiles, p_first, p_sums, N, TILES, SPLITS, num_groups,
    DIM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same from features [GROUP, BLOCK], all tiles transposed; directions are loaded a level ahead."""
    i_split, i_h = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    o_n, o_d, o_g = tl.arange(0, BLOCK), tl.arange(0, DIM), tl.arange(0, GROUP)
    o_w = o_d[:, None] * GROUP + o_g[None, :]
    p_x += i_h.to(tl.int64) * N * DIM
    p_out += i_h.to(tl.int64) * N * DIM
    p_sums += i_h * num_groups * GROUP * DIM
    all_levels = tl.load(p_first + num_groups)
    for i_tile in range(i_split * TILES, tl.minimum((i_split + 1) * TILES, tl.cdiv(N, BLOCK))):
        o_row = i_tile * BLOCK + o_n
        b_x = tl.load(p_x + o_row[:, None] * DIM + o_d[None, :], mask=o_row[:, None] < N, other=0.0)
        b_x = tl.trans(b_x)
        b_out = tl.zeros([DIM, BLOCK], tl.float32)
        b_next = tl.load(p_tiles + o_w)
        i_group = 0
        while i_group < num_groups:
            b_phi = tl.full([GROUP, BLOCK], 1.0, tl.float32)
            i_level, last = tl.load(p_first + i_group), tl.load(p_first + i_group + 1)
            while i_level < last:
                b_w, i_level = b_next, i_level + 1
                b_next = tl.load(p_tiles + tl.minimum(i_level, all_levels - 1) * DIM * GROUP + o_w)
                b_phi *= tl.dot(tl.trans(b_w), b_x, input_precision="ieee")
            b_sums = tl.load(p_sums + (i_group * GROUP + o_g)[:, None] * DIM + o_d[None, :])
            b_out += tl.dot(tl.trans(b_sums), b_phi.to(b_x.dtype), input_precision="ieee")
            i_group += 1
        p_tile = p_out + o_row[None, :] * DIM + o_d[:, None]
        tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=o_row[None, :] < N)


def draw(group: int, heads: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows ``(heads, rows, d)``, directions ``(levels, d, group)``, first levels, sums ``(heads, F, d)``."""
    generator = torch.Generator().manual_seed(0)
    levels = LEVELS[group]
    x = torch.nn.functional.normalize(torch.randn(heads, rows, DIM, generator=generator), dim=-1)
    tiles = torch.randn(sum(levels), DIM, group, generator=generator)
    sums = torch.randn(heads, len(levels) * group, DIM, generator=generator)
    first = torch.tensor([0, *itertools.accumulate(levels)], dtype=torch.int32)
    return x.to(dtype), tiles.to(dtype), first, sums.to(dtype)


def expected(x: Tensor, tiles: Tensor, first: Tensor, sums: Tensor) -> Tensor:
    """In float64, from the same rounded numbers; features are rounded as the kernels round them."""
    starts = first.tolist()
    projected = [x.double() @ tile.double() for tile in tiles]
    features = [
        torch.stack(projected[begin:end]).prod(0).to(x.dtype) for begin, end in itertools.pairwise(starts)
    ]
    return torch.cat(features, dim=-1).double() @ sums.double()


def run(form: Form, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    x, tiles, first, sums = tensors
    heads, rows, _ = x.shape
    out = torch.full_like(x, torch.nan)
    all_tiles = triton.cdiv(rows, BLOCK)
    each = triton.cdiv(all_tiles, max(1, PROGRAMS // heads))
    splits = triton.cdiv(all_tiles, each)
    kernel = {"left": left, "right": right}[form.side]
    kernel[(heads * splits,)](
        *(x, out, tiles, first, sums, rows, each, splits, len(first) - 1),
        DIM=DIM,
        BLOCK=BLOCK,
        GROUP=form.group,
        num_warps=form.num_warps,
        num_stages=form.num_stages,
    )
    return out


def measure(form: Form) -> FormRow:
    """In this process."""
    x, tiles, first, sums = (x.cuda() for x in draw(form.group, HEADS, ROWS, torch.bfloat16))
    tensors = x, tiles, first, sums
    outs = [run(form, tensors) for _ in range(RUNS)]
    right_one = torch.cat([expected(x[i : i + 1], tiles, first, sums[i : i + 1]) for i in range(HEADS)])
    error = (outs[0].double() - right_one).norm() / right_one.norm()
    equal = all(torch.equal(out, outs[0]) for out in outs)
    median = time_replay(lambda: run(form, tensors)).median
    return FormRow(**asdict(form), error=error.item(), bit_equal=equal, median=median)


def measure_apart(form: Form) -> FormRow:
    """In a process of its own."""
    command = [sys.executable, __file__, json.dumps(asdict(form))]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        words = [line for line in process.stderr.splitlines() if line.strip()]
        return FormRow(**asdict(form), ended=words[-1][:200] if words else f"exit code {process.returncode}")
    return FormRow(**json.loads(process.stdout.splitlines()[-1]))


def table(rows: list[FormRow]) -> Table:
    shown = Table("features", "group", "warps", "stages", "error", "bit-equal", "ms", "ended")
    for row in rows:
        cells = row.side, *map(str, (row.group, row.num_warps, row.num_stages))
        figures = ["", "", ""]
        if row.error is not None and row.median is not None:
            figures = [f"{row.error:.1e}", str(row.bit_equal), f"{1e3 * row.median:.3f}"]
        shown.add_row(*cells, *figures, row.ended)
    return shown


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(asdict(measure(Form(**json.loads(sys.argv[1]))))))
        return
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    rows = list(track(map(measure_apart, FORMS), "measuring", total=len(FORMS), auto_refresh=False))
    device = torch.device("cuda")
    name = device_name(device).lower().replace(" ", "-")
    path = Path(__file__).parent / "results" / f"products-{name}.json"
    write_results(path, "products", {"levels": LEVELS, "runs": RUNS}, rows, device=device)
    Console(width=100).print(table(rows))


if __name__ == "__main__":
    main()
