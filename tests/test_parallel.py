"""A sequence split over processes against the same sequence in one: outputs, gradients, and what is sent.

Four processes are started once and run every case, as one group and as two pairs; the test compares what they
wrote.
"""

import copy
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from oracle import assert_as_good_as_reference, make_map, rows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import schoenbat.parallel
from schoenbat import MaclaurinFeatures, RMFAState, SchoenbAt, rmfa
from schoenbat.collectives import sum_over_ranks
from schoenbat.normalization import PreSBN, synchronize_statistics

PROCESSES = 4
BATCH, HEADS, WIDTH, FEATURES = 2, 4, 6, 40
EVEN, UNEVEN, ONE_EMPTY, FIRST_EMPTY = (5, 5, 5, 5), (3, 7, 1, 150), (4, 0, 6, 5), (0, 9, 0, 2)


@dataclass(frozen=True)
class Case:
    """A call on a whole sequence, and the lengths of its shards."""

    name: str
    lengths: tuple[int, ...] = UNEVEN
    batch: int = BATCH
    heads: int = HEADS
    kv_heads: int = HEADS
    value_dim: int = WIDTH
    masked: str = ""  # "some" keys, "shard": also all of rank 1's, "all" of the first sequence
    construction: str = "exact-low"
    trainable: bool = False
    per_head: bool = False
    learned_scale: bool = False
    module: bool = False
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    keys_per_rank: tuple[int, ...] | None = None  # cross attention: keys and values of other lengths
    options: dict[str, bool | str] = field(default_factory=dict)


SHAPES = [
    Case("even shards", EVEN),
    Case("uneven shards"),
    Case("an empty shard", ONE_EMPTY),
    Case("an empty first shard", FIRST_EMPTY, construction="unbiased"),
    Case("key mask", masked="some"),
    Case("a masked shard", EVEN, masked="shard"),
    Case("a sequence without keys", EVEN, masked="all"),
    Case("grouped heads", kv_heads=2, value_dim=3, learned_scale=True, options={"enable_gqa": True}),
    Case("wide values", value_dim=9, construction="unbiased"),
    Case("trained map", construction="unbiased", trainable=True, masked="some"),
    Case("trained exact-low map for each head", EVEN, trainable=True, per_head=True, learned_scale=True),
    Case("trained map, an empty shard", ONE_EMPTY, trainable=True, learned_scale=True),
    Case("module", module=True, value_dim=3, masked="some"),
    Case("module with a trained map", ONE_EMPTY, module=True, trainable=True),
    Case("float32", dtype=torch.float32, value_dim=9, learned_scale=True),
    Case("float32, unbiased", EVEN, dtype=torch.float32, construction="unbiased", masked="some"),
    Case("float32 module", dtype=torch.float32, module=True, trainable=True),
]
CASES = [
    Case(**{**vars(case), "name": f"{case.name}, {kind}", "options": {**case.options, "is_causal": causal}})
    for case in SHAPES
    for kind, causal in (("bidirectional", False), ("causal", True))
] + [Case("cross attention", keys_per_rank=ONE_EMPTY, construction="unbiased")]


@dataclass
class Inputs:
    """The whole sequence with everything that gets a gradient."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: Tensor | None
    direction: Tensor  # gradients are those of the output's product with it
    attention: nn.Module  # the map, or a SchoenbAt

    @property
    def copied(self) -> list[Tensor]:
        """What every rank has a copy of."""
        return [*self.attention.parameters(), *([] if self.scale is None else [self.scale])]


def make(case: Case, world: int, dtype: torch.dtype) -> Inputs:
    """The same values in every process, rounded to the case's dtype whatever they are computed in."""
    length = sum(case.lengths[:world])
    keys = sum((case.keys_per_rank or case.lengths)[:world])
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(case.batch, keys, generator=generator) > 0.3 if case.masked else None
    if mask is not None:
        mask[:, case.lengths[0] : case.lengths[0] + case.lengths[1]] &= case.masked != "shard"
        mask[0] &= case.masked != "all"
    scale = 2 + torch.arange(case.heads) / 4 if case.learned_scale else None
    query, key, value, direction = (
        rows(*shape, seed=seed, dtype=case.dtype).to(case.device, dtype)
        for seed, shape in enumerate(
            [
                (case.batch, case.heads, length, WIDTH),
                (case.batch, case.kv_heads, keys, WIDTH),
                (case.batch, case.kv_heads, keys, case.value_dim),
                (case.batch, case.heads, length, case.value_dim),
            ]
        )
    )
    return Inputs(
        query.requires_grad_(),
        key.requires_grad_(),
        (value + 1).detach().requires_grad_(),  # values with a mean
        None if mask is None else mask.to(case.device),
        None if scale is None else scale.to(case.device, dtype).requires_grad_(),
        direction,
        _attention(case).to(case.device, dtype),
    )


def _attention(case: Case) -> nn.Module:
    shared = {"construction": case.construction, "dtype": case.dtype}
    if not case.module:
        return make_map(
            **shared, trainable=case.trainable, num_heads=case.kv_heads if case.per_head else None
        )
    module = SchoenbAt(
        WIDTH,
        HEADS,
        FEATURES,
        **shared,
        value_dim=case.value_dim,
        trainable_features=case.trainable,
        seed=0,
    )
    with torch.no_grad():
        module.rho += torch.linspace(-0.02, 0.02, HEADS)
        module.post.beta += 0.1
    return module


def gradients(out: Tensor, direction: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of its product with `direction`, zeros where nothing depends on one."""
    grads = torch.autograd.grad((out * direction).sum(), tensors, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def in_one_process(
    case: Case, world: int, dtype: torch.dtype, implementation: str
) -> dict[str, list[Tensor]]:
    inputs = make(case, world, dtype)
    arguments = inputs.query, inputs.key, inputs.value
    options = {**case.options, "key_mask": inputs.mask}
    if case.module:
        plain = rmfa

        def chosen(*args, **kwargs):
            return plain(*args, **kwargs, implementation=implementation)

        with mock.patch("schoenbat.modules.rmfa", chosen):
            out = inputs.attention(*arguments, **options)
    else:
        options |= {"scale": inputs.scale, "implementation": implementation}
        out = rmfa(*arguments, inputs.attention, **options)
    found = gradients(out, inputs.direction, [*arguments, *inputs.copied])
    return {"rows": found[:4], "copied": found[4:]}


def on_one_rank(case: Case, group: dist.ProcessGroup) -> dict[str, list[Tensor]]:
    """This rank's shard of the output and of the rows' gradients, and its part of the others."""
    rank, world = group.rank(), group.size()
    inputs = make(case, world, case.dtype)

    def shard(x: Tensor, lengths: tuple[int, ...], dim: int = -2) -> Tensor:
        return x.detach().split(list(lengths[:world]), dim)[rank]

    of_keys = case.keys_per_rank or case.lengths
    query = shard(inputs.query, case.lengths).requires_grad_()
    key, value = (shard(x, of_keys).requires_grad_() for x in (inputs.key, inputs.value))
    options = dict(case.options)
    if inputs.mask is not None:
        options["key_mask"] = shard(inputs.mask, of_keys, -1)
    if case.module:
        inputs.attention.process_group = group
        out = inputs.attention(query, key, value, **options)
    else:
        options["scale"] = inputs.scale
        out = schoenbat.parallel.rmfa(query, key, value, inputs.attention, group=group, **options)
    found = gradients(out, shard(inputs.direction, case.lengths), [query, key, value, *inputs.copied])
    return {"rows": found[:4], "copied": found[4:]}


@contextmanager
def messages() -> Iterator[list[int]]:
    """The bytes of every tensor that this process hands to a collective."""
    sizes: list[int] = []

    def counted(collective: Callable, position: int) -> Callable:
        def call(*args, **kwargs):
            sizes.append(args[position].nbytes)
            return collective(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_reduce", counted(dist.all_reduce, 0)),
        mock.patch.object(dist, "all_gather", counted(dist.all_gather, 1)),
    ):
        yield sizes


def sent(length: int, is_causal: bool, group: dist.ProcessGroup) -> dict[str, list[int]]:
    """Bytes of the messages of one layer's forward and backward pass over shards of about `length`."""
    features = make_map("unbiased", WIDTH, FEATURES, dtype=torch.float32)
    query, key, value = (
        rows(BATCH, HEADS, length + group.rank(), WIDTH, seed=seed, dtype=torch.float32).requires_grad_()
        for seed in range(3)
    )
    with messages() as forward:
        out = schoenbat.parallel.rmfa(query, key, value, features, group=group, is_causal=is_causal)
    with messages() as backward:
        out.sum().backward()
    return {"forward": forward, "backward": backward}


def failures(group: dist.ProcessGroup) -> dict[str, str]:
    """What wrong calls raise. All ranks make the same mistake, before they send anything."""
    features = make_map("exact-low")
    query, key = rows(1, 2, 4, WIDTH), rows(1, 2, 3, WIDTH)

    def call(q: Tensor = query, k: Tensor = query, **options) -> Callable[[], object]:
        return lambda: schoenbat.parallel.rmfa(q, k, k, features, **{"group": group, **options})

    calls = {
        "lengths": call(k=key, is_causal=True),
        "flag": call(is_causal="no"),
        "reference": call(implementation="reference"),
        "triton": call(implementation="triton"),
        "unknown": call(implementation="fast"),
        "no group": call(group=None),
        "second derivative": lambda: second_derivative(group),
        "batch": lambda: SchoenbAt(WIDTH, HEADS, normalization="batch", process_group=group),
    }
    raised = {}
    for name, wrong in calls.items():
        try:
            wrong()
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


def second_derivative(group: dist.ProcessGroup) -> None:
    x = torch.ones(1, 1, 3, requires_grad=True)
    (first,) = torch.autograd.grad(sum_over_ranks(x, group).square().sum(), x, create_graph=True)
    first.sum().backward()


def work(rank: int, folder: str) -> None:
    """Everything that a process does, first in a group of four, then in its pair."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), PROCESSES)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=60)
    )
    pairs = [dist.new_group([first, first + 1]) for first in range(0, PROCESSES, 2)]
    for group in (dist.group.WORLD, pairs[rank // 2]):
        assert group is not None
        found = {
            "cases": {case.name: on_one_rank(case, group) for case in CASES},
            "again": {case.name: on_one_rank(case, group) for case in CASES[:4]},
            "sent": [
                sent(length, is_causal, group) for is_causal in (False, True) for length in (1, 40, 900)
            ],
            "raised": failures(group),
            "counts": large_counts(group),
            "leading dimensions": leading_dimensions(group),
            "module": module_with_group(group),
            "statistics": statistics(group),
            "map": map_of_a_seed(rank),
        }
        torch.save(found, os.path.join(folder, f"{rank}-of-{group.size()}.pt"))
    torch.save(in_a_mesh(rank), os.path.join(folder, f"{rank}-in-a-mesh.pt"))
    dist.destroy_process_group()


def statistics(group: dist.ProcessGroup | None, ranks: int | None = None) -> list[Tensor]:
    """What ``normalization="batch"`` makes of this rank's part of a batch, or of all of it without a group.

    Outputs, gradients and running averages after two calls; the ranks have batches of different sizes, and
    all tokens of the last one are masked.
    """
    world = ranks if group is None else group.size()
    sizes = [1 + rank for rank in range(world)]
    rows_of = torch.arange(world).repeat_interleave(torch.tensor(sizes))
    mask = torch.rand(sum(sizes), 7, generator=torch.Generator().manual_seed(0)) > 0.3
    mask &= (rows_of < world - 1)[:, None]
    own = rows_of >= 0 if group is None else rows_of == group.rank()
    norm = PreSBN("batch", HEADS, WIDTH, dtype=torch.float64)
    if group is not None:
        synchronize_statistics(nn.ModuleList([norm]), group)
        norm = copy.deepcopy(norm)
    found = []
    for call in range(2):
        x, direction = (
            (1 + rows(sum(sizes), HEADS, 7, WIDTH, seed=2 * call + k)).detach()[own] for k in range(2)
        )
        found += gradients(norm(x.requires_grad_(), mask[own]), direction, [x])
    return [*found, norm.running_mean, norm.running_variance, norm.eval()(x).detach()]


def map_of_a_seed(rank: int) -> dict[str, Tensor]:
    """The map of a module, whatever the state of torch's generator."""
    torch.manual_seed(rank)
    return SchoenbAt(WIDTH, HEADS, FEATURES, seed=3).features.state_dict()


class Tagger(nn.Module):
    """A layer around SchoenbAt, whose sequences a group may share."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.project = nn.Linear(WIDTH, 3 * HEADS * WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.attention = SchoenbAt(
            WIDTH,
            HEADS,
            FEATURES,
            trainable_features=True,
            seed=0,
            dtype=torch.float64,
            process_group=group,
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind()
        return self.attention(query, key, value, is_causal=True).square().mean()


def in_a_mesh(rank: int) -> dict[str, dict[str, Tensor]]:
    """Gradients where two pairs of ranks share a batch, and the ranks of a pair its sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    x = tagger_input()[2 * (rank // 2) :][:2, 5 * (rank % 2) :][:, :5]
    wrapped = {
        "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
        "fsdp": lambda model: shard(model, mesh["dp", "sp"]._flatten()),
        "hsdp": lambda model: shard(model, mesh),
    }
    found = {}
    for name, wrap in wrapped.items():
        model = Tagger(mesh["sp"].get_group())
        whole = wrap(model)  # which reduces gradients as long as it is there
        whole(x).backward()
        found[name] = {
            name: getattr(parameter.grad, "full_tensor", lambda parameter=parameter: parameter.grad)()
            for name, parameter in model.named_parameters()
        }
    return found


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.attention, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tagger_input() -> Tensor:
    return rows(4, 10, WIDTH, seed=7)


def large_counts(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Counts of all and of the earlier ranks, of more keys than float32 or float64 could count."""
    state = RMFAState.zeros(make_map("exact-low"), BATCH, HEADS, WIDTH)
    state.count += 2**54 + 1 + group.rank()
    return (
        schoenbat.parallel._sum_over_ranks(state, group).count,
        schoenbat.parallel._sum_of_earlier_ranks(state, group).count,
    )


def leading_dimensions(group: dist.ProcessGroup) -> bool:
    """Whether shards with fewer or more dimensions give what they give as ``(B, H, n, d)``."""
    features = make_map("unbiased")
    x = rows(BATCH, HEADS, 5, WIDTH, seed=group.rank())
    mask = torch.arange(5) < 4

    def call(x: Tensor, *lead: int, **options) -> Tensor:
        key_mask = mask.expand(*lead, 5)
        return schoenbat.parallel.rmfa(x, x, x, features, group=group, key_mask=key_mask, **options)

    equal = []
    for is_causal in (False, True):
        whole = call(x, BATCH, is_causal=is_causal)
        for part, lead in ((x[1, 2], ()), (x[1], ()), (x[None, None], (1, 1, BATCH))):
            out = call(part, *lead, is_causal=is_causal)
            expected = whole if lead else whole[1, 2] if part.dim() == 2 else whole[1]
            equal.append(torch.allclose(out, expected.expand(out.shape), rtol=1e-12, atol=1e-12))
    return all(equal)


def module_with_group(group: dist.ProcessGroup) -> dict[str, bool]:
    module = SchoenbAt(WIDTH, HEADS, FEATURES, process_group=group)
    layers = nn.ModuleList([module])
    return {
        "copy": copy.deepcopy(layers)[0].process_group is group,
        "pickle": pickle.loads(pickle.dumps(module)).process_group is None,
        "state dict": not any("group" in name for name in module.state_dict()),
    }


def put_together(ranks: list[dict[str, list[Tensor]]]) -> list[Tensor]:
    """Output and gradients of the whole sequence: shards one after the other, parts added up."""
    got = [torch.cat(shards, -2) for shards in zip(*(r["rows"] for r in ranks), strict=True)]
    return got + [torch.stack(parts).sum(0) for parts in zip(*(r["copied"] for r in ranks), strict=True)]


def compare(case: Case, ranks: list[dict[str, list[Tensor]]]) -> None:
    """What ranks found against the specification on the whole sequence."""
    world, got = len(ranks), put_together(ranks)
    found = in_one_process(case, world, torch.float64, "reference")
    expected = [*found["rows"], *found["copied"]]
    if case.dtype == torch.float64:
        for a, b in zip(got, expected, strict=True):
            # Gradients that are zero up to rounding are sums of terms of order one.
            size = max(float(b.abs().max()), 1e-3) if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * size)
        return
    found = in_one_process(case, world, case.dtype, "reference")
    for a, same, b in zip(got, [*found["rows"], *found["copied"]], expected, strict=True):
        # Twice what is allowed elsewhere: the error of a scale's gradient, four numbers, is one draw.
        assert_as_good_as_reference(a, same, b, slack=4.0)


def message_sizes() -> tuple[int, int]:
    """Bytes of the sums in float32 and of the counts."""
    features = make_map("unbiased", WIDTH, FEATURES)
    monomials = sum(degree > 0 for degree in features.degrees)
    numbers = monomials * WIDTH + monomials + WIDTH + WIDTH
    return 4 * BATCH * HEADS * numbers, 8 * BATCH


def check_cases(ranks: list[dict]) -> None:
    wrong = {}
    for case in CASES:
        try:
            compare(case, [found["cases"][case.name] for found in ranks])
        except AssertionError as error:
            wrong[case.name] = str(error)
    assert not wrong, "\n".join(f"{len(ranks)} ranks, {name}: {error}" for name, error in wrong.items())


def check_repetition(found: dict) -> None:
    """Sums over ranks have a fixed order: the same bits again."""
    for name, second in found["again"].items():
        for a, b in zip(found["cases"][name]["rows"], second["rows"], strict=True):
            assert torch.equal(a, b), name


def check_messages(found: dict) -> None:
    sums, counts = message_sizes()
    for sizes in found["sent"]:
        assert sorted(sizes["forward"]) == [counts, sums]
        assert sizes["backward"] == [sums]


def check_counts(found: dict, rank: int, world: int) -> None:
    whole, earlier = found["counts"]
    assert whole.tolist() == [sum(2**54 + 1 + r for r in range(world))] * BATCH
    assert earlier.tolist() == [sum(2**54 + 1 + r for r in range(rank))] * BATCH


def check_errors(raised: dict[str, str]) -> None:
    expected = {
        "lengths": r"ValueError: causal .* as many queries as keys .* rank \d has 4 and 3; cut both",
        "flag": "ValueError: is_causal must be True or False, got 'no'",
        "reference": "NotImplementedError: implementation='reference' .* use 'auto', 'eager' or",
        "triton": "NotImplementedError: implementation='triton' cannot run this call: .*float64; use",
        "unknown": "ValueError: unknown implementation 'fast'",
        "no group": "TypeError: group must be",
        "second derivative": "RuntimeError: .*once_differentiable",
        "batch": "ValueError: normalization='batch'",
    }
    assert raised.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.match(pattern, raised[name], re.DOTALL), f"{name}: {raised[name]}"


def check_statistics(ranks: list[dict]) -> None:
    """Of all ranks together those of one process, and the running averages the same bits on each."""
    expected = statistics(None, len(ranks))
    for place, whole in enumerate(expected):
        parts = [found["statistics"][place] for found in ranks]
        if place in (4, 5):
            assert all(part.equal(parts[0]) for part in parts)
            torch.testing.assert_close(parts[0], whole)
        else:
            torch.testing.assert_close(torch.cat(parts), whole)


def check_mesh(ranks: list[dict]) -> None:
    model = Tagger(None)
    model(tagger_input()).backward()
    for found in ranks:
        for grads in found.values():
            for name, grad in grads.items():
                torch.testing.assert_close(
                    grad, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12, msg=name
                )


def test_split_over_processes(tmp_path: Path):
    # What every process needs is imported once: torch and its compiler take seconds.
    multiprocessing.set_forkserver_preload(["schoenbat", "torch._dynamo"])
    processes.start_processes(work, (str(tmp_path),), nprocs=PROCESSES, start_method="forkserver")
    for group in ((0, 1, 2, 3), (0, 1), (2, 3)):
        ranks = [torch.load(tmp_path / f"{rank}-of-{len(group)}.pt") for rank in group]
        check_cases(ranks)
        check_statistics(ranks)
        for rank, found in enumerate(ranks):
            check_counts(found, rank, len(group))
            check_repetition(found)
            check_messages(found)
            check_errors(found["raised"])
            assert found["leading dimensions"]
            assert all(found["module"].values()), found["module"]
            assert all(x.equal(ranks[0]["map"][name]) for name, x in found["map"].items())
    check_mesh([torch.load(tmp_path / f"{rank}-in-a-mesh.pt") for rank in range(PROCESSES)])


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("implementation", ["auto", "eager", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_group_of_one_is_the_plain_call(alone, is_causal, implementation):
    features = make_map("unbiased")
    query, key, value = (rows(BATCH, HEADS, 7, WIDTH, seed=seed) for seed in range(3))
    options = {"is_causal": is_causal, "implementation": implementation}
    with messages() as sizes:
        out = schoenbat.parallel.rmfa(query, key, value, features, group=alone, **options)
    assert torch.equal(out, rmfa(query, key, value, features, **options))
    assert not sizes


def test_module_with_a_group_of_one(alone):
    module = SchoenbAt(WIDTH, HEADS, FEATURES, process_group=alone)
    x = torch.randn(BATCH, HEADS, 7, WIDTH)
    split = module(x, x, x, is_causal=True)
    module.process_group = None
    assert torch.equal(split, module(x, x, x, is_causal=True))


def test_batch_statistics_are_refused_with_a_group(alone):
    with pytest.raises(ValueError, match=r"normalization='batch' .* a shard; use normalization='token'"):
        SchoenbAt(WIDTH, HEADS, normalization="batch", process_group=alone)
    module = SchoenbAt.paper(WIDTH, HEADS)
    module.process_group = alone
    x = torch.randn(BATCH, HEADS, 7, WIDTH)
    with pytest.raises(ValueError, match="normalization='batch'"):
        module(x, x, x)


@pytest.mark.parametrize("group", [None, -100, "WORLD"])
def test_what_is_not_a_group_is_refused(group):
    x = torch.randn(BATCH, HEADS, 7, WIDTH)
    features = MaclaurinFeatures(WIDTH, FEATURES, seed=0)
    with pytest.raises(TypeError, match=r"must be a torch\.distributed\.ProcessGroup .*init_process_group"):
        schoenbat.parallel.rmfa(x, x, x, features, group=group)
    if group is not None:
        with pytest.raises(TypeError, match="ProcessGroup"):
            SchoenbAt(WIDTH, HEADS, process_group=group)
