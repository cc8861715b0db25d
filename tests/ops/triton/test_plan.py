"""Maps as the kernels take them: what of a layout is kept, and for whom."""

import pytest
import torch
from ops.triton.specification import DEVICE
from oracle import gradients, make_map, rows

from schoenbat import rmfa

pytest.importorskip("triton")


def test_a_layout_that_was_first_needed_for_inference_serves_training():
    from schoenbat.ops.triton import plan

    for kept in plan._KEPT.values():
        kept.cache_clear()
    features = make_map("exact-low", 16, 53, trainable=True, dtype=torch.float32, device=DEVICE)
    x = rows(1, 1, 5, 16, dtype=torch.float32).to(DEVICE)
    with torch.inference_mode():
        before = rmfa(x, x, x, features, implementation="triton")
    out, grads = gradients(
        lambda: rmfa(x, x, x, features, implementation="triton"), list(features.parameters())
    )
    torch.testing.assert_close(out, before.clone())
    assert all(grad is not None for grad in grads)


def test_layouts_of_maps_that_are_drawn_again_and_again_are_let_go():
    from schoenbat.ops.triton import plan

    kept = plan._KEPT[plan._layout]
    for linear in range(1, kept.cache_info().maxsize + 10):
        plan._made_once(plan._layout, linear, 0, 0, (), 16, False, False, 0, torch.device("cpu"))
    assert kept.cache_info().currsize == kept.cache_info().maxsize
