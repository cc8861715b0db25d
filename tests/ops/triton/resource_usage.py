"""Compile every kernel for sm_90, which needs no GPU, and print what each takes: JSON, a list of rows.

A process of its own: under Triton's interpreter nothing can be compiled.
"""

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from ops.triton.sass import overwritten, running
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from schoenbat.ops.triton import (
    bidirectional,
    bidirectional_map,
    bidirectional_sums,
    causal,
    causal_keys,
    causal_map,
    causal_sums,
    decode,
    decode_window,
    window,
    window_backward,
)
from schoenbat.ops.triton.launch import Tiles, tiles_for, tiles_of_sums
from schoenbat.ops.triton.launch_causal import tiles_for as causal_tiles_for
from schoenbat.ops.triton.launch_causal import tiles_of_keys, tiles_of_read
from schoenbat.ops.triton.launch_decode import NEAR_KEYS
from schoenbat.ops.triton.launch_map import tiles_of_map
from schoenbat.ops.triton.launch_window import tiles_for as window_tiles_for
from schoenbat.ops.triton.plan import GROUP, GROUP_OF_PAIRS

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
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


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
            partial = decoding or kernel in summing
            rows = name in ROWS - ({"p_tiles"} if decoding else set())
            rows = rows or (name in {"p_sums", "p_dsums"} and not partial)
            types[name] = f"*{INTEGERS.get(name, dtype if rows else 'fp32')}"
        else:
            types[name] = "fp32" if name in {"KEY_SCALE", "EPS"} else "i32"
        if name.startswith(("p_", "stride")):
            multiples[(index,)] = [["tt.divisibility", 16]]
    return types, multiples


def usage(kernel, constants, dtype, tiles):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, multiples = signature(kernel, constants, SHORT[dtype])
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=multiples)
    options = {name: value for name, value in tiles.compilation.items() if name != "BLOCK"}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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
        "registers": registers,
        "limit": tiles.registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
    }


def constants_for(width, quadratic, tiles, parts):
    return {
        "HEADS": 8,
        "GROUPS": 1,
        "MAPS": 1,
        "HAS_MASK": True,
        "HAS_STATE": True,
        "IS_QUERY": True,
        "PRECISION": "ieee",
        "IDENTITY": int(quadratic),
        "QUADRATIC": int(quadratic),
        "UNIT": 2,
        "SINGLE": quadratic and width == 64,
        "TRAINED": False,
        "PARTS": parts,
        "CHUNK": 1,
        "SPAN": 64,
        "IS_CAUSAL": False,
        "SEPARATE": False,
        "OVERLAPS": True,
        "ROWS": 64,
        "COLUMNS": 16,
        "AFTER": True,
        "DIM": width,
        "DV": width,
        "BLOCK_D": width,
        "BLOCK_V": width,
        "BLOCK": tiles.block,
        "GROUP": GROUP_OF_PAIRS if quadratic else GROUP,
    }


def attention_cases():
    """Kernels of all forms; what saves minutes: causal ones and windows for bfloat16 alone.

    Of wide heads with a window only what takes most.
    """
    for dtype, width, quadratic in itertools.product(
        (torch.bfloat16, torch.float32), (32, 64, 128, 256), (True, False)
    ):
        if (dtype == torch.float32 and width != 64) or (quadratic and width == 256):
            continue
        tiles = tiles_for(dtype, width, width, quadratic)
        yield bidirectional_sums, "summarize", dtype, width, quadratic, tiles_of_sums(tiles, width, width)
        for name in ("read", "read_backward", "key_backward"):
            yield bidirectional, name, dtype, width, quadratic, tiles
        if dtype == torch.float32:
            continue
        if quadratic and width == 64:
            for name in ("finish", "finish_backward"):
                yield bidirectional_sums, name, dtype, width, quadratic, tiles
        tiles = causal_tiles_for(dtype, width, width, quadratic)
        yield causal_sums, "accumulate", dtype, width, quadratic, tiles
        if quadratic and width == 64:
            yield causal_sums, "scan", dtype, width, quadratic, tiles
        yield causal, "read", dtype, width, quadratic, tiles_of_read(tiles, several=False)
        if quadratic and width == 64:
            yield causal, "read", dtype, width, quadratic, tiles_of_read(tiles, several=True)
        yield causal, "query_backward", dtype, width, quadratic, tiles
        yield causal_keys, "key_backward", dtype, width, quadratic, tiles_of_keys(tiles)
        if width in (32, 256):
            continue
        tiles = window_tiles_for(dtype, width, width, quadratic)
        yield window_backward, "key_backward", dtype, width, quadratic, tiles
        if width == 64:
            yield window, "read", dtype, width, quadratic, tiles
            yield window_backward, "query_backward", dtype, width, quadratic, tiles


def trained_cases():
    """Kernels of trained maps, for the rows that take more; identity features; wide heads."""
    dtype, keys = torch.bfloat16, {"IS_QUERY": False, "LINEAR": False}
    for width, quadratic, own in (
        (64, True, keys),
        (64, False, keys),
        (64, True, {"IS_QUERY": True, "LINEAR": True}),
        (128, True, keys),
    ):
        tiles = tiles_of_map(tiles_for(dtype, width, width, quadratic=False))
        yield bidirectional_map, dtype, width, quadratic, tiles, own
        tiles = tiles_of_map(causal_tiles_for(dtype, width, width, quadratic))
        yield causal_map, dtype, width, quadratic, tiles, own
    tiles = tiles_of_map(tiles_for(torch.float32, 64, 64, quadratic=False))
    yield bidirectional_map, torch.float32, 64, True, tiles, keys


def decoding_cases():
    """A query head to a key head, and several; wide heads with a window, in what takes most."""
    for quadratic, (rows, columns, warps) in itertools.product((True, False), ((2, 64, 2), (16, 32, 8))):
        tiles, own = Tiles(rows, warps, 2), {"ROWS": rows, "BLOCK_V": columns}
        yield decode.step, torch.float32, 64, quadratic, tiles, own
        tiles = tiles._replace(num_warps=max(4, warps))
        own = own | {"BLOCK": NEAR_KEYS, "HAS_LEAVING_MASK": True, "SEPARATE": rows > 2}
        if quadratic or rows == 2:
            yield decode_window.step, torch.bfloat16, 64, quadratic, tiles, own
        if quadratic and rows == 2:
            yield decode_window.step, torch.float32, 128, quadratic, tiles, own


def main():
    found = []
    for module, dtype, width, quadratic, tiles, own in trained_cases():
        form = module.__name__.rpartition(".")[-1]
        case = {"kernel": f"{form}.map_backward", "dtype": str(dtype), "width": width, "quadratic": quadratic}
        constants = constants_for(width, quadratic, tiles, 1) | own | {"GROUP": GROUP}
        found.append(case | own | usage(module.map_backward, constants, dtype, tiles))
    for module, name, dtype, width, quadratic, tiles in attention_cases():
        form = module.__name__.rpartition(".")[-1]
        case = {"kernel": f"{form}.{name}", "dtype": str(dtype), "width": width, "quadratic": quadratic}
        parts = (1 if quadratic and width <= 64 else 4) + form.startswith("causal")
        constants = constants_for(width, quadratic, tiles, parts)
        constants |= {"DV": min(width, 128), "BLOCK_V": min(width, 128)}
        if constants["SINGLE"] and form.startswith("bidirectional"):
            constants |= {"QUADRATIC": 16}  # pairs of a projection that is so wide
        if form == "causal":
            constants |= {"SINGLE": quadratic and width == 64 and tiles.registers is None}
        case |= {"single": constants["SINGLE"]}
        found.append(case | usage(getattr(module, name), constants, dtype, tiles))
    for kernel, dtype, width, quadratic, tiles, own in decoding_cases():
        name, constants = (
            kernel.__module__.rpartition(".")[-1],
            constants_for(width, quadratic, tiles, 1) | own,
        )
        case = {"kernel": f"{name}.step", "dtype": str(dtype), "width": width, "quadratic": quadratic}
        found.append(case | usage(kernel, constants, dtype, tiles))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
