"""Maps as the kernels take them: what of a layout is kept, and for whom."""

from functools import partial

import pytest
import torch
from ops.triton.specification import DEVICE
from oracle import gradients, make_map, rows

from schoenbat import RMFAState, rmfa, rmfa_step, rmfa_window

pytest.importorskip("triton")


def test_a_layout_that_was_first_needed_for_inference_serves_training():
    from schoenbat.ops.triton import layout

    for kept in layout._KEPT.values():
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
    from schoenbat.ops.triton import layout

    kept, form = layout._KEPT[layout._layout], layout.Form(16, False, False, 0)
    for linear in range(1, kept.cache_info().maxsize + 10):
        layout.layout_for(layout.Counts(linear, 0, 0, ()), form, torch.device("cpu"))
    assert kept.cache_info().currsize == kept.cache_info().maxsize


@pytest.mark.parametrize(("construction", "num_features"), [("exact-low", 256), ("unbiased", 100)])
def test_gpus_with_less_memory_have_smaller_tiles(monkeypatch, construction, num_features):
    from schoenbat.ops import fused
    from schoenbat.ops.triton import plan

    query = torch.zeros(1, 1, 1, 1, 64)

    def laid_out():
        features = make_map(construction, 64, num_features, dtype=torch.float32)
        tensors, _, flags = fused.lay_out(query, features.map(torch.float32), torch.float16, 64)
        return plan.Plan.of(tensors, flags)

    large = laid_out()
    assert (large.whole, large.is_wide) == ((3, False) if construction == "exact-low" else (0, True))
    for module in ("plan", "tiles"):
        monkeypatch.setattr(f"schoenbat.ops.triton.{module}.is_roomy", lambda device: False)
    small = laid_out()
    assert (small.whole, small.is_wide) == (0, False)


@pytest.mark.parametrize("widths", [(72, 16), (16, 72)])
def test_rows_that_smaller_gpus_have_no_memory_for_are_refused(smaller_gpu, widths):
    features = make_map("exact-low", widths[0], 40, dtype=torch.float32, device=DEVICE)
    query, value = (torch.zeros(1, 2, 5, width, device=DEVICE) for width in widths)
    sequences = query, query, value
    state = RMFAState.zeros(features, 1, 2, widths[1], device=DEVICE)
    calls = [
        partial(rmfa, *sequences, features),
        partial(rmfa, *sequences, features, is_causal=True),
        partial(rmfa_window, *sequences, features, 2),
        partial(rmfa_step, *sequences, features, state),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="wider than 64 do not fit the shared memory"):
            call(implementation="triton")
    half = partial(rmfa, *(x.half() for x in sequences), features)
    one_token = partial(rmfa_step, *(x[..., :1, :] for x in sequences), features, state)
    if widths[0] > 32:
        assert torch.equal(half(implementation="triton"), value.half())
    else:
        with pytest.raises(NotImplementedError, match="values wider than 64 do not fit the shared"):
            half(implementation="triton")
    with torch.no_grad():
        assert torch.equal(one_token(implementation="triton")[0], value[..., :1, :])


def test_gpus_with_too_little_memory_take_the_eager_path(monkeypatch):
    from schoenbat.ops.triton import shared_memory

    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    rows = torch.zeros(1, 2, 5, 16, device=DEVICE)
    monkeypatch.setattr(shared_memory, "is_enough", lambda device: False)
    with pytest.raises(NotImplementedError, match="it needs 99 KiB of shared memory"):
        rmfa(rows, rows, rows, features, implementation="triton")
    assert not rmfa(rows, rows, rows, features).any()


def test_how_much_memory_there_is_is_known_to_a_compiler(monkeypatch):
    from schoenbat.ops.triton import shared_memory

    monkeypatch.setattr(shared_memory, "HOPPER_MEMORY", 100)
    monkeypatch.setattr(shared_memory, "_shared_memory", lambda device: 99 + device.index)

    def call(x, device):
        return x + shared_memory.is_roomy(device)

    for index in (0, 1):
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1), torch.device("cuda", index)).item() == index
        torch.compiler.reset()


def test_a_wide_map_is_not_one_to_train():
    from schoenbat.ops.triton.plan import make_plan, narrowed

    feature_map = make_map("unbiased", 64, 100, dtype=torch.float32).map(torch.float32)
    with pytest.raises(ValueError, match="narrow groups"):
        narrowed(make_plan(feature_map.blocks, feature_map.weight, torch.float16, 64, wide=True))


@pytest.mark.parametrize(("head_dim", "num_features"), [(64, 256), (128, 256)])
def test_a_map_to_train_is_the_same_from_pairs_of_a_projection(head_dim, num_features):
    from schoenbat.ops.triton.plan import make_plan, narrowed

    feature_map = make_map("exact-low", head_dim, num_features, dtype=torch.float32).map(torch.float32)
    both = feature_map.blocks, feature_map.weight, torch.float16, head_dim
    projected, plain = (make_plan(*both, bidirectional=bidirectional) for bidirectional in (True, False))
    assert projected.quadratic > 1 == plain.quadratic
    assert torch.equal(narrowed(projected).tiles, narrowed(plain).tiles)


@pytest.mark.parametrize("num_features", [66, 100, 128, 129])
def test_levels_that_serve_few_features_share_tiles(num_features):
    """Every factor is in one of the tiles that are needed, and only once."""
    from schoenbat.ops.triton.layout import PACKED_TILES, Packing
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("unbiased", 64, num_features, dtype=torch.float32, scale=4.0).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 64, True, True)
    middle, _, *packed = plan.first.tolist()[1:]
    packing = Packing(*packed)
    needed = [
        *range(packing.short),
        *range(middle, packing.narrow),
        *range(plan.tiles.shape[1])[-PACKED_TILES:],
    ]
    factors = plan.tiles[0, needed].transpose(-2, -1).flatten(0, 1)
    factors = factors[factors.any(-1)]
    given = torch.cat(feature_map.blocks.maps, -1)[0].T
    assert sorted(factors.tolist()) == sorted(given.tolist())
    assert plan.held == packing.narrow + PACKED_TILES < plan.tiles.shape[1] - PACKED_TILES
    least = plan.degrees[plan.degrees > 0]
    assert torch.equal(least, least.sort().values)
    assert not plan.degrees[: plan.padding(len(least))[0]].any()
