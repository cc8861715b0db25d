"""What other tools do with a module: torch.export, ONNX, activation checkpointing, a whole encoder, FSDP2."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

from schoenbat import MaclaurinFeatures, MultiheadSchoenbAt, SchoenbAt, kernelized_attention, reseed

HEADS, WIDTH, LENGTH = 2, 6, 20


def make(**options) -> SchoenbAt:
    return SchoenbAt(WIDTH, HEADS, 16, **{"construction": "exact-low", "seed": 0, **options}).eval()


def inputs(length=LENGTH) -> list[torch.Tensor]:
    return [torch.randn(3, HEADS, length, WIDTH) for _ in range(3)]


class Fixed(nn.Module):
    """A module with its keyword arguments given, for exporters that take tensors alone."""

    def __init__(self, module: nn.Module, **options) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.module(query, key, value, **self.options)


def of_length(dim: int) -> dict[str, dict[int, Dim]]:
    length = Dim("length", min=1, max=4096)
    return {name: {dim: length} for name in ("query", "key", "value")}


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_exported_module_takes_any_length(is_causal):
    module = Fixed(make(construction="unbiased"), is_causal=is_causal)
    exported = torch.export.export(module, tuple(inputs()), dynamic_shapes=of_length(2)).module()
    for length in (LENGTH, 301, 1):
        tensors = inputs(length)
        torch.testing.assert_close(exported(*tensors), module(*tensors))


def test_an_exported_window():
    module = Fixed(make(window=3, center_keys="learned"), is_causal=True)
    with torch.no_grad():
        exported = torch.export.export(module, tuple(inputs())).module()
        tensors = inputs()
        torch.testing.assert_close(exported(*tensors), module(*tensors))


def test_an_exported_multihead_module():
    module = MultiheadSchoenbAt(HEADS * WIDTH, HEADS, batch_first=True, num_features=16, seed=0).eval()
    x = torch.randn(3, LENGTH, HEADS * WIDTH)
    exported = torch.export.export(module, (x, x, x), dynamic_shapes=of_length(1)).module()
    y = torch.randn(3, 150, HEADS * WIDTH)
    torch.testing.assert_close(exported(y, y, y)[0], module(y, y, y)[0])


class Exact(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return kernelized_attention(query, key, value)


@pytest.mark.parametrize(
    "module",
    [make(), make(window=3), make(window=3, separate_maps=True), Exact()],
    ids=["", "w", "maps", "exact"],
)
def test_what_is_exported_leaves_autocast(module):
    """As the module itself does: what is cast is the rows that go in."""
    arguments = tuple(x.bfloat16().float() for x in inputs())
    exported = torch.export.export(Fixed(module), arguments).module()
    with torch.autocast("cpu", torch.bfloat16):
        got = exported(*arguments)
    torch.testing.assert_close(got, Fixed(module)(*arguments))


@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_onnxruntime_gives_the_same(is_causal, tmp_path):
    """Bidirectional attention for any length; causal attention goes chunk by chunk through a known one."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, path = Fixed(make(), is_causal=is_causal), str(tmp_path / "attention.onnx")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(
            module,
            tuple(inputs(150)),
            dynamic_shapes=None if is_causal else of_length(2),
            dynamo=True,
            verbose=False,
        )
    program.save(path)
    session = runtime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    for length in (150,) if is_causal else (150, 333):
        tensors = inputs(length)
        (got,) = session.run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True)))
        expected = module(*tensors).detach()
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
def test_activation_checkpointing_changes_nothing(use_reentrant, options):
    module = make(dtype=torch.float64, trainable_features=True, **options).train()
    results = []
    for call in (module, lambda *x: checkpoint(module, *x, use_reentrant=use_reentrant)):
        module.zero_grad()
        torch.manual_seed(0)
        tensors = [x.double().requires_grad_() for x in inputs()]
        out = call(*tensors)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in tensors), *(p.grad for p in module.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def encoder(layers=3) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    layer.self_attn = MultiheadSchoenbAt(16, 2, batch_first=True, num_features=32)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def maps_of(model: nn.Module) -> list[torch.Tensor]:
    return [module.tail for module in model.modules() if isinstance(module, MaclaurinFeatures)]


def test_no_two_layers_share_a_map():
    """Layers built one by one have their own; an encoder copies one layer, and `reseed` tells them apart."""
    built = nn.ModuleList(MultiheadSchoenbAt(16, 2, num_features=32) for _ in range(3))
    copied = encoder()
    first, second, third = maps_of(copied)
    assert torch.equal(first, second)
    assert torch.equal(second, third)
    reseed(copied, 0)
    for model in (built, copied):
        maps = [x.double().sum().item() for x in maps_of(model)]
        assert len(set(maps)) == 3
    again = encoder()
    reseed(again, 0)
    assert all(torch.equal(a, b) for a, b in zip(maps_of(copied), maps_of(again), strict=True))


def test_an_encoder_learns_to_look_something_up():
    """Which of eight tokens bears the mark, asked at the first position: only attention can tell."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Linear(10, 16), "encoder": encoder(2), "head": nn.Linear(16, 8)})
    reseed(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    accuracy = []
    for _ in range(80):
        marked = torch.randint(8, (64,))
        names = torch.rand(64, 8).argsort(-1)
        x = torch.zeros(64, 9, 10)
        x[:, 1:, :8] = nn.functional.one_hot(names, 8).float()
        x[torch.arange(64), 1 + marked, 8] = 1
        x[:, 0, 9] = 1
        target = names[torch.arange(64), marked]
        padding = torch.zeros(64, 9, dtype=torch.bool)
        logits = model["head"](model["encoder"](model["embed"](x), src_key_padding_mask=padding)[:, 0])
        loss = nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.append((logits.argmax(-1) == target).float().mean().item())
    assert sum(accuracy[-20:]) / 20 > 0.9


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_parameters_can_be_sharded(mesh):
    """FSDP2 cuts parameters along their first dimension, which a scalar does not have."""
    options = {"center_keys": "learned", "window": 2, "separate_maps": True, "trainable_features": True}
    module = MultiheadSchoenbAt(16, 2, num_features=32, batch_first=True, **options)
    sharded, x = copy.deepcopy(module), torch.randn(2, 10, 16)
    fully_shard(sharded, mesh=mesh)
    for call in (module, sharded):
        call(x, x, x)[0].square().sum().backward()
    for one, other in zip(module.parameters(), sharded.parameters(), strict=True):
        assert one.dim() > 0
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)
