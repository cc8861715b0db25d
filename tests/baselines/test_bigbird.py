"""BigBird's attention against softmax with its mask, written out block by block."""

import math

import pytest
import torch
from oracle import gradients
from torch.nn.attention.flex_attention import flex_attention

from schoenbat.baselines import Softmax
from schoenbat.baselines.bigbird import BigBird

# Row 0 has holes, row 1 is left-padded, row 2 right-padded.
KEY_MASK = torch.stack([torch.arange(40) % 4 != 1, torch.arange(40) >= 9, torch.arange(40) < 23])


def inputs(n=40, batch=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 2, n, 6, generator=generator, dtype=dtype) for _ in range(3)]


def make(**options):
    return BigBird(6, 2, **{"block_size": 3, "num_random": 2, **options})


def seen_blocks(offsets, block, num_blocks):
    """The blocks that one block sees, as a set; the offsets are those of its random blocks."""
    ends = {0, num_blocks - 1}
    if block in ends:
        return set(range(num_blocks))
    seen = ends | {block - 1, block, block + 1}
    others = [j for j in range(num_blocks) if j not in seen]
    r = len(offsets)
    stretches = [others[i * len(others) // r : (i + 1) * len(others) // r] for i in range(r)]
    return seen | {part[int(u * len(part))] for part, u in zip(stretches, offsets, strict=True) if part}


def written_out(attention, query, key, value, is_causal):
    n, size = query.shape[2], attention.block_size
    num_blocks = math.ceil(n / size)
    visible = torch.zeros(2, n, n, dtype=torch.bool)
    for head in range(2):
        for i in range(n):
            seen = seen_blocks(attention.offsets[head, i // size].tolist(), i // size, num_blocks)
            for j in range(i + 1 if is_causal else n):
                visible[head, i, j] = j // size in seen
    logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return logits.softmax(-1) @ value


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [1, 3, 5, 19, 26, 40])
@pytest.mark.parametrize("num_random", [0, 2])
def test_equals_the_definition(is_causal, n, num_random):
    tensors = inputs(n)
    attention = make(num_random=num_random)
    torch.testing.assert_close(
        attention(*tensors, is_causal=is_causal), written_out(attention, *tensors, is_causal)
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("block_size", "num_random"), [(3, 10), (6, 3), (64, 3)])
@pytest.mark.parametrize("key_mask", [None, KEY_MASK])
def test_with_a_full_mask_it_is_softmax(is_causal, block_size, num_random, key_mask):
    tensors = inputs()
    got = make(block_size=block_size, num_random=num_random)(*tensors, key_mask=key_mask, is_causal=is_causal)
    expected = Softmax(6, 2)(*tensors, key_mask=key_mask, is_causal=is_causal)
    if key_mask is not None:
        expected = expected * key_mask[:, None, :, None]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_random", [0, 2])
@pytest.mark.parametrize("lengths", [(5, 40, 0), (40, 40, 40), (17, 18, 19)])
def test_in_place_is_gathered(is_causal, num_random, lengths):
    """FlexAttention, here uncompiled, sees the blocks that are gathered without it."""
    attention = make(block_size=8, num_random=num_random)
    length = torch.tensor(lengths).view(3, 1, 1, 1)
    tensors = inputs()
    real = torch.arange(40) < length.mT  # what stands beyond the length is of no use
    got = attention._attend_in_place(*tensors, length, is_causal, flex_attention)
    expected = attention._attend_gathered(*tensors, length, is_causal)
    got, expected = (torch.where(real.mT, x, 0.0) for x in (got, expected))
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="FlexAttention has no kernel for this CPU")
@pytest.mark.parametrize("is_causal", [False, True])
def test_in_place_compiles_without_gradients(is_causal):
    """Inductor must find nothing that the mask reads left to fuse into it, such as a sum of lengths."""
    attention = BigBird(16, 2, block_size=8, num_random=2)
    query, key, value = (torch.randn(3, 2, 72, 16) for _ in range(3))
    mask = torch.arange(72) < torch.tensor([[24], [72], [0]])

    def attend(query, key, value, mask):
        length = mask.sum(-1).view(-1, 1, 1, 1)
        return attention._attend_in_place(query, key, value, length, is_causal, flex_attention)

    with torch.no_grad():
        got = torch.compile(attend, fullgraph=True)(query, key, value, mask)
    expected = attention._attend_gathered(query, key, value, mask.sum(-1).view(-1, 1, 1, 1), is_causal)
    real = mask[:, None, :, None]
    torch.testing.assert_close(torch.where(real, got, 0.0), torch.where(real, expected, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [1, 63, 500, 2048])
def test_on_a_gpu_flex_attention_gives_what_the_definition_gives(is_causal, n):
    generator = torch.Generator().manual_seed(0)
    attention = BigBird(32, 2)
    tensors = [torch.randn(2, 2, n, 32, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.arange(n) < torch.tensor([[n], [1 + n // 3]])
    right = [x.requires_grad_() for x in tensors]
    expected = attention(*right, key_mask=mask, is_causal=is_causal)
    ours = [x.detach().float().cuda().requires_grad_() for x in tensors]
    got = attention.cuda()(*ours, key_mask=mask.cuda(), is_causal=is_causal)
    pairs = zip(
        [got, *torch.autograd.grad(got.square().sum(), ours)],
        [expected, *torch.autograd.grad(expected.square().sum(), right)],
        strict=True,
    )
    for a, b in pairs:
        # Where one token sees itself alone, gradients of query and key are zero but for rounding.
        assert (a.cpu().double() - b).norm() <= 1e-4 * b.norm().clamp(min=1.0)


@pytest.mark.gpu
def test_flex_attention_compiles_to_one_graph_on_a_gpu():
    generator = torch.Generator().manual_seed(0)
    n = 1000  # long enough that blocks are left out
    attention = BigBird(32, 2).cuda()
    tensors = [torch.randn(2, 2, n, 32, generator=generator).cuda().requires_grad_() for _ in range(3)]
    mask = torch.arange(n, device="cuda") < torch.tensor([[n], [n // 2]], device="cuda")
    compiled = torch.compile(attention, fullgraph=True)
    right, right_grads = gradients(lambda: attention(*tensors, key_mask=mask), tensors)
    got, got_grads = gradients(lambda: compiled(*tensors, key_mask=mask), tensors)
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    with torch.no_grad():  # as a validation does, after steps of training
        got = compiled(*tensors, key_mask=mask)
    assert (got - right).norm() <= 1e-4 * right.norm()


def test_with_a_sparse_mask_it_is_not():
    tensors = inputs()
    assert not torch.allclose(make()(*tensors), Softmax(6, 2)(*tensors), atol=1e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
def test_gradients(is_causal, block_size):
    tensors = [x[:1, :, :9, :3].clone().requires_grad_() for x in inputs()]
    attention = BigBird(3, 2, block_size=block_size, num_random=1)
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, key_mask=KEY_MASK[:1, :9], is_causal=is_causal), tensors
    )


def test_causal_does_not_see_the_future():
    before = inputs()
    after = [x.clone() for x in before]
    for x in after:
        x[:, :, 25:] += 1
    before, after = (make()(*tensors, is_causal=True) for tensors in (before, after))
    assert torch.equal(before[:, :, :25], after[:, :, :25])
    assert not torch.equal(before[:, :, 25:], after[:, :, 25:])


def test_random_blocks_are_fixed_by_the_seed():
    tensors = inputs()
    attention = make()
    first = attention(*tensors)
    torch.manual_seed(1)
    assert torch.equal(first, attention(*tensors))
    assert torch.equal(first, make(seed=0)(*tensors))
    assert not torch.equal(first, make(seed=1)(*tensors))


def test_state_dict_carries_the_random_blocks():
    tensors = inputs()
    attention, other = make(seed=3), make(seed=4)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(attention(*tensors), other(*tensors))


def test_heads_share_keys_and_values():
    query, key, value = inputs()
    shared = make()(query, key[:, :1], value[:, :1], enable_gqa=True)
    repeated = (x[:, :1].expand(-1, 2, -1, -1) for x in (key, value))
    assert torch.equal(shared, make()(query, *repeated))


def test_is_self_attention_only():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="as many queries as keys, got 10 and 40"):
        make()(query[:, :, :10], key, value)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)])
def test_on_a_gpu(is_causal, dtype, tolerance):
    tensors = [x.to(dtype).double().requires_grad_() for x in inputs()]
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in tensors]
    expected, expected_grads = gradients(
        lambda: make()(*tensors, key_mask=KEY_MASK, is_causal=is_causal), tensors
    )
    attention, mask = make().cuda(), KEY_MASK.cuda()
    got, got_grads = gradients(lambda: attention(*on_gpu, key_mask=mask, is_causal=is_causal).cpu(), on_gpu)
    for a, b in zip([got, *got_grads], [expected, *expected_grads], strict=True):
        assert (a.cpu().double() - b).norm() <= tolerance * b.norm()


def test_agrees_with_transformers():
    transformers = pytest.importorskip("transformers")
    package = transformers.models.big_bird.modeling_big_bird
    config = transformers.BigBirdConfig(
        hidden_size=12, num_attention_heads=2, block_size=4, num_random_blocks=2
    )
    layer = package.BigBirdBlockSparseAttention(config).double().eval()
    attention = make(block_size=4)

    def random_blocks(head, block):
        offsets = attention.offsets[head, block].tolist()
        return sorted(seen_blocks(offsets, block, 10) - seen_blocks([], block, 10))

    # In eval the package takes block 0 for all its random blocks.
    drawn = [[random_blocks(head, block) for block in range(1, 9)] for head in range(2)]
    layer._bigbird_block_rand_mask_with_head = lambda **_: drawn
    x = 4 * torch.randn(3, 40, 12, dtype=torch.float64)
    blocked, band, rows, columns = package.BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(3, 40, dtype=torch.float64), 4
    )
    expected, _ = layer(x, band, rows, columns, blocked, blocked)
    query, key, value = (
        project(x).unflatten(-1, (2, 6)).transpose(1, 2) for project in (layer.query, layer.key, layer.value)
    )
    torch.testing.assert_close(attention(query, key, value).transpose(1, 2).flatten(2), expected)
