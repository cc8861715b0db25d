"""The forms of product that are compared on a GPU, in the interpreter."""

import importlib.util
from pathlib import Path

import pytest
import torch
from ops.triton.specification import DEVICE

pytest.importorskip("triton")
PROGRAM = Path(__file__).parents[3] / "benchmarks" / "products.py"


@pytest.fixture(scope="module")
def products():
    specification = importlib.util.spec_from_file_location("products", PROGRAM)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3)])
def test_every_form_computes_the_same(products, side, group, dtype, tolerance):
    tensors = products.draw(group, 2, 70, dtype)
    right = products.expected(*tensors)
    out = products.run(products.Form(side, group, 2, 1), tuple(x.to(DEVICE) for x in tensors))
    assert (out.cpu().double() - right).norm() < tolerance * right.norm()
