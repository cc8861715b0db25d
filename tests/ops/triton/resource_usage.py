"""Compile every kernel for sm_90, some for sm_89, which needs no GPU, and print what each takes: JSON rows.

With --others: for the dtypes and widths that are left out otherwise, which takes long. A process of its own:
under Triton's interpreter nothing can be compiled.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from ops.triton.sass import overwritten, reloaded, rewritten, running, serialized
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from schoenbat import MaclaurinFeatures
from schoenbat.ops.triton import launch_bidirectional_hopper, launch_causal_hopper
from schoenbat.ops.triton import plan as plan_module
from schoenbat.ops.triton import tiles as tiles_module
from schoenbat.ops.triton.axis import Axis, num_parts
from schoenbat.ops.triton.call import Shape, Unit
from schoenbat.ops.triton.hopper import bidirectional_wide, degrees, degrees_backward
from schoenbat.ops.triton.kernels import (
    bidirectional,
    bidirectional_map,
    bidirectional_sums,
    causal,
    causal_keys,
    causal_map,
    causal_sums,
    decode,
    decode_window,
    odd_power,
    window,
    window_backward,
)
from schoenbat.ops.triton.launch import parts_of_sums
from schoenbat.ops.triton.launch_decode import NEAR_KEYS
from schoenbat.ops.triton.layout import padded
from schoenbat.ops.triton.plan import make_plan, narrowed
from schoenbat.ops.triton.tiles import (
    Tiles,
    causal_tiles_for,
    causal_tiles_of_keys,
    causal_tiles_of_queries,
    causal_tiles_of_read,
    is_of_one_group,
    takes_wide_groups,
    tiles_for,
    tiles_of_gradients,
    tiles_of_map,
    tiles_of_read,
    tiles_of_sums,
    window_tiles_for,
)

CUOBJDUMP, NVDISASM = (
    Path(triton.__file__).parent / "backends/nvidia/bin" / name for name in ("cuobjdump", "nvdisasm")
)
INTEGERS = {
    "p_degrees": "i32",
    "p_first": "i32",
    "p_count": "i32",
    "p_new_count": "i32",
    "p_mask": "u8",
    "p_leaving_mask": "u8",
    "p_near_mask": "u8",
    "p_new_near_mask": "u8",
    "p_earlier": "i64",
}
ROWS = {
    "p_x",
    "p_dx",
    "p_rows",
    "p_query",
    "p_out",
    "p_grad",
    "p_dquery",
    "p_key",
    "p_value",
    "p_dkey",
    "p_dvalue",
    "p_tiles",
    "p_near",
    "p_far",
    "p_far_query",
    "p_far_key",
    "p_dfar_query",
    "p_dfar_key",
    "p_leaving_key",
    "p_leaving_value",
    "p_near_keys",
    "p_near_values",
    "p_new_near_keys",
    "p_new_near_values",
}
CPU = torch.device("cpu")
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def signature(kernel, constants, dtype):
    """Types of the arguments, and which of them are multiples of 16, as in a call with aligned tensors."""
    types, multiples = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        if name.startswith("p_"):
            decoding = kernel in (decode.step, decode_window.step)  # with a map and sums in float32
            summing = bidirectional_sums.summarize, causal_sums.accumulate, causal_sums.scan
            summing += degrees.summarize, bidirectional_wide.summarize, *HOPPER_CAUSAL
            partial = decoding or kernel in summing
            rows = name in ROWS - ({"p_tiles"} if decoding else set())
            rows = rows or (name in {"p_sums", "p_dsums"} and not partial)
            # Key heads that several query heads share get their gradients in float32, to be added up.
            rows = rows and not (name in {"p_dkey", "p_dvalue"} and constants.get("GROUPS", 1) > 1)
            types[name] = f"*{INTEGERS.get(name, dtype if rows else 'fp32')}"
        else:
            types[name] = "fp32" if name in {"KEY_SCALE", "EPS"} else "i32"
        if name.startswith(("p_", "stride")):
            multiples[(index,)] = [["tt.divisibility", 16]]
    return types, multiples


def usage(kernel, constants, dtype, tiles, arch):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, multiples = signature(kernel, constants, SHORT[dtype])
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(fn=kernel, signature=types, constexprs=places, attrs=multiples)
    options = {name: value for name, value in tiles.compilation.items() if name != "BLOCK"}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        printed, code = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ([CUOBJDUMP, "-res-usage"], [NVDISASM, "--print-code"])
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", printed).groups())
    return {
        "running": running(code),
        "overwritten": overwritten(code),
        "rewritten": rewritten(code),
        "serialized": serialized(code),
        "reloaded": reloaded(code),
        "registers": registers,
        "limit": tiles.registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
    }


def shape_of(width, dtype, value_dim=None):
    value_dim = value_dim or min(width, 128)
    return Shape(4, 8, 1, width, value_dim, padded(width), padded(value_dim), dtype)


HOPPER_CAUSAL = [
    kernel
    for name in ("causal_narrow", "causal", "causal_wide", "causal_degrees")
    for kernel in launch_causal_hopper.Kernels.named(name)
]


def plan_of(shape, quadratic, num_features, *, bidirectional=False):
    """Pairs beside identity features, or many degrees, as a call lays them out."""
    options = {"construction": "exact-low"} if quadratic else {"construction": "unbiased", "scale": 4.0}
    drawn = MaclaurinFeatures(shape.dim, num_features, **options, seed=0).map(shape.dtype)
    wide = bidirectional and takes_wide_groups(torch.empty(0, shape.dim), shape.dtype, shape.block_v)
    return make_plan(drawn.blocks, drawn.weight, shape.dtype, shape.block_d, bidirectional, wide)


def constants_for(shape, plan, tiles):
    """Of a call with a mask, pre-SBN and a state; what a kernel does not know is left out later."""
    return shape.constants(plan, tiles) | {
        "HEADS": 8,
        "GROUPS": 1,
        "HAS_MASK": True,
        "HAS_STATE": True,
        "HAS_FAR": True,
        "IS_QUERY": True,
        "UNIT": 2,
        "WHOLE": plan.whole,
        "SINGLE": False,
        "TRAINED": False,
        "PARTS": plan.num_groups + 1,
        "CHUNK": 1,
        "SPAN": 64,
        "IS_CAUSAL": False,
        "SEPARATE": False,
        "OVERLAPS": True,
        "ROWS": 64,
        "COLUMNS": 16,
        "AFTER": True,
    }


def attention_cases():
    """Kernels of all forms; what saves minutes: float32 for bidirectional ones and one width alone."""
    for width, quadratic, num_features in (
        *((32, True, 128), (64, True, 128), (64, True, 256), (128, True, 256)),
        *((32, False, 128), (64, False, 128), (128, False, 256), (256, False, 256)),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            if dtype == torch.bfloat16 or (width, num_features) == (64, 128):
                shape = shape_of(width, dtype)
                plan = plan_of(shape, quadratic, num_features, bidirectional=True)
                yield from bidirectional_cases(shape, plan)
        shape = shape_of(width, torch.bfloat16)
        yield from causal_cases(shape, plan_of(shape, quadratic, num_features))
        if (width, num_features) in ((64, 128), (128, 256)):
            yield from window_cases(shape, plan_of(shape, quadratic, num_features))


def bidirectional_cases(shape, plan):
    tiles = shape.tiles(plan)
    sums = dict(zip(("SEPARATE", "PARTS"), parts_of_sums(plan), strict=True))
    of_sums = tiles_of_sums(tiles, shape.block_d, shape.block_v)
    yield bidirectional_sums.summarize, shape, plan, of_sums, sums
    yield bidirectional.read, shape, plan, tiles_of_read(tiles, plan), {}
    for kernel in (bidirectional.read_backward, bidirectional.key_backward):
        yield kernel, shape, plan, tiles_of_gradients(tiles, plan), {}
    if plan.whole == 1 and shape.dim == 64 and shape.dtype == torch.bfloat16:
        yield bidirectional_sums.finish, shape, plan, tiles, {}
        yield bidirectional_sums.finish_backward, shape, plan, tiles, {}


def causal_cases(shape, plan):
    tiles = Axis.of(4096, 4096, shape, plan).tiles
    single = {"SINGLE": is_of_one_group(tiles, plan)}
    yield causal_sums.accumulate, shape, plan, tiles, single | {"PARTS": num_parts(tiles, plan)}
    if shape.dim in (64, 128) and plan.quadratic:
        yield causal_sums.scan, shape, plan, tiles, {"ROWS": 4096 // shape.block_v}
    yield causal.read, shape, plan, causal_tiles_of_read(tiles, plan), single
    yield causal.query_backward, shape, plan, causal_tiles_of_queries(tiles, plan), {}
    yield causal_keys.key_backward, shape, plan, causal_tiles_of_keys(tiles, plan), {}
    if plan.is_single or shape.dim == 32:  # many heads of them
        near = {"HAS_FAR": False, "HAS_STATE": False}
        yield causal.read, shape, plan, causal_tiles_of_read(tiles, plan), single | near
        yield causal.query_backward, shape, plan, causal_tiles_of_queries(tiles, plan), near
        yield causal_keys.key_backward, shape, plan, causal_tiles_of_keys(tiles, plan), near


def other_cases():
    """What `attention_cases` leaves out: all dtypes, values narrower than keys, narrow heads."""
    wide_and_narrow = (16, 16), (32, 16), (32, 32), (64, 32), (64, 64), (128, 64), (128, 128), (256, 128)
    for (width, value_dim), quadratic in itertools.product(wide_and_narrow, (True, False)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.float16 and (value_dim != width or width < 32):
                continue  # the same tiles as of bfloat16
            shape = shape_of(width, dtype, value_dim)
            plan = plan_of(shape, quadratic, 2 * width, bidirectional=True)
            yield from bidirectional_cases(shape, plan)
            plan = plan_of(shape, quadratic, 2 * width)
            yield from causal_cases(shape, plan)
            if width <= 128:
                yield from window_cases(shape, plan)


def hopper_causal_cases(width, num_features, own, *, quadratic=True):
    shape = shape_of(width, torch.bfloat16)
    plan = plan_of(shape, quadratic, num_features, bidirectional=not quadratic)
    constants = launch_causal_hopper.constants(shape, plan, 8, Unit()) | own
    tiles = Tiles(64, constants.pop("num_warps"), 1)
    for kernel in launch_causal_hopper.Kernels.of(shape, plan):
        yield kernel, shape, plan, tiles, constants


def hopper_cases():
    """What is simplest, and what takes most."""
    shape, tiles = shape_of(64, torch.bfloat16), Tiles(64, 4, 1)
    most = {"UNIT": 2, "GROUPS": 2, "MAPS": 4}
    for own in ({"p_mask": None, "p_count": None}, most | {"DIM": 48}):
        yield from hopper_causal_cases(32, 128, own | ({"DIM": 32} if "DIM" in own else {}))
        yield from hopper_causal_cases(64, 128, own)
        yield from hopper_causal_cases(64, 128, own, quadratic=False)
        yield from hopper_causal_cases(128, 256, own | ({"DIM": 112} if "DIM" in own else {}))
        plan = plan_of(shape, False, 128, bidirectional=True)
        constants = launch_bidirectional_hopper.constants_of_degrees(shape, plan, 8, Unit(), 1) | own
        wide = tiles._replace(num_warps=constants.pop("num_warps"))
        of_keys = {"p_row_scale": None, "p_row_weight": None, "p_mean_weight": None}
        yield degrees.summarize, shape, plan, wide, constants | of_keys
        yield degrees.summarize, shape, plan, wide, constants
        yield degrees.read, shape, plan, wide, constants
        yield degrees_backward.read_backward, shape, plan, wide, constants
        yield degrees_backward.key_backward, shape, plan, wide, constants
        yield from hopper_sums_cases(own | ({"DIM": 112} if "DIM" in own else {}), of_keys)


def hopper_sums_cases(own, of_keys):
    shape = shape_of(128, torch.bfloat16)
    plan = plan_of(shape, True, 256, bidirectional=True)
    constants = launch_bidirectional_hopper.constants_of_pairs(shape, plan, 8, Unit()) | own
    tiles = Tiles(128, constants.pop("num_warps"), 1)
    yield bidirectional_wide.summarize, shape, plan, tiles, constants | of_keys
    yield bidirectional_wide.summarize, shape, plan, tiles, constants


def window_cases(shape, plan):
    """Of wide heads only what takes most."""
    tiles = window_tiles_for(shape.dtype, shape.block_d, shape.block_v, plan.quadratic)
    yield window_backward.key_backward, shape, plan, tiles, {}
    if shape.dim == 64:
        yield window.read, shape, plan, tiles, {}
        yield window_backward.query_backward, shape, plan, tiles, {}


def trained_cases():
    """Kernels of trained maps, for the rows that take more; identity features; wide heads."""
    keys = {"IS_QUERY": False, "LINEAR": False}
    for width, quadratic, own in (
        (64, True, keys),
        (64, False, keys),
        (64, True, {"IS_QUERY": True, "LINEAR": True}),
        (128, True, keys),
        (256, True, keys),
    ):
        shape = shape_of(width, torch.bfloat16)
        plan = narrowed(plan_of(shape, quadratic, 2 * width))
        widths = shape.dtype, shape.block_d, shape.block_v
        tiles = tiles_of_map(tiles_for(*widths, False, CPU), shape.dtype)
        yield bidirectional_map.map_backward, shape, plan, tiles, own
        tiles = tiles_of_map(causal_tiles_for(*widths, quadratic, CPU), shape.dtype)
        yield causal_map.map_backward, shape, plan, tiles, own
    shape = shape_of(64, torch.float32)
    tiles = tiles_of_map(tiles_for(torch.float32, 64, 64, False, CPU), torch.float32)
    yield bidirectional_map.map_backward, shape, narrowed(plan_of(shape, True, 128)), tiles, keys


def decoding_cases():
    """A query head to a key head, and several; wide heads with a window, in what takes most."""
    for quadratic, (rows, columns, warps) in itertools.product((True, False), ((2, 64, 2), (16, 32, 8))):
        shape = shape_of(64, torch.float32)
        plan, tiles = plan_of(shape, quadratic, 128), Tiles(rows, warps, 2)
        own = {"ROWS": rows, "BLOCK_V": columns}
        yield decode.step, shape, plan, tiles, own
        tiles = tiles._replace(num_warps=max(4, warps))
        own = own | {"BLOCK": NEAR_KEYS, "HAS_LEAVING_MASK": True, "SEPARATE": rows > 2}
        if quadratic or rows == 2:
            yield decode_window.step, shape_of(64, torch.bfloat16), plan, tiles, own
        if quadratic and rows == 2:
            shape = shape_of(128, torch.float32)
            yield decode_window.step, shape, plan_of(shape, quadratic, 256), tiles, own


def odd_power_cases():
    """One tile of columns, and two of which the last has less."""
    for width, columns in ((64, 64), (200, 128)):
        shape = shape_of(width, torch.bfloat16)
        tiles = Tiles(2048 // columns, 4, 3)
        own = {"EPSILON": 1e-3, "WIDTH": width, "COLUMNS": columns}
        for kernel in (odd_power.forward, odd_power.backward):
            yield kernel, shape, plan_of(shape, True, width), tiles, own


def cases_of_less_memory():
    """Pairs, which take most; float32 as wide as it goes; values narrower and wider than keys."""
    for width, value_dim, dtype in (
        *((64, 64, torch.bfloat16), (64, 64, torch.float32), (128, 128, torch.bfloat16)),
        *((128, 64, torch.bfloat16), (64, 128, torch.bfloat16)),
    ):
        shape = shape_of(width, dtype, value_dim)
        yield from bidirectional_cases(shape, plan_of(shape, True, 2 * width, bidirectional=True))
        yield from causal_cases(shape, plan_of(shape, True, 2 * width))


def usages(cases, arch):
    for kernel, shape, plan, tiles, own in cases:
        constants = constants_for(shape, plan, tiles) | {"OVERLAPS": arch >= 90} | own
        case = {
            "arch": arch,
            "kernel": f"{kernel.__module__.removeprefix('schoenbat.ops.triton.')}.{kernel.__name__}",
            "dtype": str(shape.dtype),
            "width": shape.dim,
            "value_dim": shape.value_dim,
            "groups": plan.num_groups,
            "quadratic": plan.quadratic,
            "warps": tiles.num_warps,
        }
        yield case | own | usage(kernel, constants, shape.dtype, tiles, arch)


def main():
    if "--others" in sys.argv:
        print(json.dumps(list(usages(other_cases(), 90))))
        return
    found = list(
        usages(
            (*trained_cases(), *attention_cases(), *decoding_cases(), *odd_power_cases(), *hopper_cases()), 90
        )
    )
    for module in (plan_module, tiles_module):
        module.is_roomy = lambda device: False
    print(json.dumps([*found, *usages(cases_of_less_memory(), 89)]))


if __name__ == "__main__":
    main()
