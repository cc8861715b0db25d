"""Recovery of a converted model: what its softmax did, taught to its SchoenbAt layers."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from schoenbat.integrations.huggingface.attention import AttentionCall, own_scaling, record_attention
from schoenbat.integrations.huggingface.name import NAME
from schoenbat.learned_scale import SPEED
from schoenbat.modules import SchoenbAt

Batch = Mapping[str, Any]
Output = Callable[[Any, Batch], Tensor]


@dataclass
class Distillation:
    """The loss of every step of both stages."""

    attention: list[float] = field(default_factory=list)
    model: list[float] = field(default_factory=list)


def token_outputs(outputs: Any, batch: Batch) -> Tensor:
    """The last hidden states (or logits) of the tokens that are not padding, ``(tokens, width)``."""
    hidden = outputs.last_hidden_state if "last_hidden_state" in outputs else outputs.logits
    of_decoder = "encoder_last_hidden_state" in outputs  # whose tokens are not those of attention_mask
    mask = batch.get("decoder_attention_mask" if of_decoder else "attention_mask")
    if mask is None or mask.shape != hidden.shape[:2]:
        return hidden.flatten(0, -2)
    return hidden[mask.bool()]


@torch.enable_grad()
def distill(
    model: PreTrainedModel,
    data: Iterable[Batch],
    *,
    steps: tuple[int, int] = (100, 200),
    match_rate: float = 1e-2,
    attention_rate: float = 2e-3,
    rest_rate: float = 2e-4,
    output: Output = token_outputs,
    progress: bool = True,
) -> Distillation:
    """Bring a model that `convert` has just converted back towards what it was, in place.

    The teacher is the model itself with its softmax, as it stands at the call.

    1. Each layer's attention is matched to the teacher's on the teacher's own queries, keys and values
       (relative squared error, Adam); only SchoenbAt's parameters are trained: scale, degree weights, maps,
       post-SBN.
    2. Everything but the embeddings is trained on ``1 − cosine`` of the outputs plus the layers' relative
       squared error.

    Rates fall linearly to zero within each stage. Dropout is off throughout. A layer that a model calls
    several times is matched call by call; one that a batch reaches not at all or with a dense mask is left
    out.

    Args:
        model: converted with parameters to train: ``scale="learned", post=True, trainable_features=True``.
        data: batches of model inputs; gone through again and again.
        steps: of the two stages.
        match_rate: learning rate of the first stage.
        attention_rate: of SchoenbAt's parameters in the second.
        rest_rate: of all other parameters in the second.
        output: what is compared, as rows, from the model's outputs and the batch.
        progress: show a bar.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from schoenbat.integrations.huggingface import convert
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = BertModel(config)
        >>> _ = convert(model, num_features=64, scale="learned", post=True, trainable_features=True)
        >>> batch = {"input_ids": torch.randint(100, (2, 10))}
        >>> len(distill(model, [batch], steps=(3, 2), progress=False).attention)
        3
    """
    if not isinstance(steps, tuple | list) or len(steps) != 2:
        raise TypeError(f"steps must be two numbers, one for each stage, got {steps!r}")
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise TypeError(
            "Adam cannot train float16 parameters; distil in float32 or bfloat16, then use .half()"
        )
    students = _students(model)
    if not any(True for attention in students.values() for _ in attention.parameters()):
        raise ValueError(
            "the model's SchoenbAt layers have no parameters to train; convert it with "
            'scale="learned", post=True, trainable_features=True'
        )
    batches = _forever(data, next(model.parameters()).device)
    result, was_training = Distillation(), model.training
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.eval()
    teacher = _teacher(model)
    try:
        with tqdm(total=sum(steps), disable=not progress, desc="distilling") as bar:
            losses = _match_layers(students, teacher, batches, steps[0], match_rate)
            result.attention = _follow(losses, bar, stage=1)
            rates = attention_rate, rest_rate
            losses = _match_model(model, students, teacher, batches, steps[1], rates, output)
            result.model = _follow(losses, bar, stage=2)
    finally:
        for parameter, requires_grad in wanted.items():
            parameter.requires_grad_(requires_grad)
        model.train(was_training)
    return result


def calibrate(model: PreTrainedModel, batch: Batch) -> None:
    """Fit centres, directions and scales of a converted model to one batch, layer by layer, without training.

    `SchoenbAt.calibrate` on the queries, keys and values of the model with its softmax. A good beginning for
    `distill`; causal layers, whose centre starts at 0, need one of the two.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from schoenbat.integrations.huggingface import convert
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = BertModel(config)
        >>> _ = convert(model, num_features=40)
        >>> calibrate(model, {"input_ids": torch.randint(100, (2, 10))})
    """
    teacher = _teacher(model)
    students = _students(model)
    _, calls = _run_teacher(teacher, students, _on(batch, next(model.parameters()).device))
    for name, attention in students.items():
        if name not in calls:
            continue
        call = _side_by_side(calls[name])
        attention.calibrate(
            call.query,
            call.key,
            call.value,
            key_mask=call.key_mask,
            is_causal=call.is_causal,
            target_scale=None if attention.query_norm else own_scaling(call.module, call.query.shape[-1]),
        )


def _follow(losses: Iterable[Tensor], bar: tqdm, stage: int) -> list[float]:
    """Take every step; a loss is read, which waits for the device, where the bar is drawn and at the end."""
    taken = []
    for loss in losses:
        taken.append(loss)
        if bar.update():
            bar.set_postfix(stage=stage, loss=f"{float(loss):.4f}")
    return torch.stack(taken).tolist() if taken else []


def _match_layers(
    students: Mapping[str, SchoenbAt], teacher: nn.Module, batches: Iterator[Batch], steps: int, rate: float
) -> Iterator[Tensor]:
    optimizer, schedule = _optimizer(_groups(students.values(), rate), steps)
    for _ in range(steps):
        _, calls = _run_teacher(teacher, students, next(batches))
        errors = [
            _relative_error(_attend_again(attention, call), call.output)
            for name, attention in students.items()
            for call in calls.get(name, ())
        ]
        yield _take_step(optimizer, schedule, torch.stack(errors).mean())


def _attend_again(attention: SchoenbAt, call: AttentionCall) -> Tensor:
    """What a student makes of its teacher's call, ``(B, n, H, d_v)``."""
    out = attention(
        call.query,
        call.key,
        call.value,
        key_mask=call.key_mask,
        is_causal=call.is_causal,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )
    return out.transpose(1, 2)


def _match_model(
    model: PreTrainedModel,
    students: Mapping[str, SchoenbAt],
    teacher: nn.Module,
    batches: Iterator[Batch],
    steps: int,
    rates: tuple[float, float],
    output: Output,
) -> Iterator[Tensor]:
    attention_rate, rest_rate = rates
    frozen = _embeddings(model)
    ours = {p for attention in students.values() for p in attention.parameters()}
    rest = [p for p in model.parameters() if p not in frozen and p not in ours]
    for parameter in frozen:
        parameter.requires_grad_(False)
    groups = [*_groups(students.values(), attention_rate), {"params": rest, "lr": rest_rate}]
    optimizer, schedule = _optimizer(groups, steps)
    for _ in range(steps):
        batch = next(batches)
        expected, targets = _run_teacher(teacher, students, batch)
        with record_attention() as calls:
            outputs = model(**batch)
        errors = [
            _relative_error(call.output, target.output)
            for name, of_layer in _by_name(model, calls).items()
            if name in targets
            for call, target in zip(of_layer, targets[name], strict=True)
        ]
        cosine = cosine_similarity(output(outputs, batch), output(expected, batch), dim=-1)
        yield _take_step(optimizer, schedule, 1 - cosine.mean() + torch.stack(errors).mean())


def _embeddings(model: PreTrainedModel) -> set[nn.Parameter]:
    """Of words, patches and positions; those of images are not all in an `nn.Embedding`."""
    found = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__:
            found |= set(module.parameters(recurse=False))
        if isinstance(module, PreTrainedModel):
            with suppress(NotImplementedError, AttributeError):  # models of sound have none
                found |= set(module.get_input_embeddings().parameters())
    return found


def _students(model: nn.Module) -> dict[str, SchoenbAt]:
    """SchoenbAt layers by the name of the attention module that carries them."""
    found = {name: getattr(module, NAME, None) for name, module in model.named_modules()}
    students = {name: module for name, module in found.items() if isinstance(module, SchoenbAt)}
    if not students:
        raise ValueError("this model has no SchoenbAt layers; call convert(model) first")
    return students


def _teacher(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it stands, with its softmax: attention modules without a SchoenbAt fall back to it."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    for module in teacher.modules():
        if isinstance(getattr(module, NAME, None), SchoenbAt):
            delattr(module, NAME)
    return teacher


@torch.no_grad()
def _run_teacher(
    teacher: nn.Module, students: Mapping[str, SchoenbAt], batch: Batch
) -> tuple[Any, dict[str, list[AttentionCall]]]:
    """The teacher's outputs, and its attention calls by the name of the module; one student's at least."""
    with record_attention() as calls:
        outputs = teacher(**batch)
    targets = _by_name(teacher, calls)
    if not students.keys() & targets.keys():
        raise ValueError(
            "this batch has nothing that a SchoenbAt layer could learn from: attention is not recorded under "
            "a dense mask or in a compiled model; give masks as (batch, length), and compile afterwards"
        )
    return outputs, targets


def _by_name(model: nn.Module, calls: Iterable[AttentionCall]) -> dict[str, list[AttentionCall]]:
    """The calls of each attention module in their order: one may stand in several places of a model."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, list[AttentionCall]] = {}
    for call in calls:
        found.setdefault(names[call.module], []).append(call)
    return found


def _side_by_side(calls: list[AttentionCall]) -> AttentionCall:
    """A layer's calls as one with a larger batch: the first, and those of its sizes and kind of mask."""
    alike = [call for call in calls if _kind(call) == _kind(calls[0])]
    masks = [call.key_mask.expand(len(call.key), -1) for call in alike if call.key_mask is not None]
    return replace(
        calls[0],
        query=torch.cat([call.query for call in alike]),
        key=torch.cat([call.key for call in alike]),
        value=torch.cat([call.value for call in alike]),
        key_mask=torch.cat(masks) if masks else None,
        output=torch.cat([call.output for call in alike]),
    )


def _kind(call: AttentionCall) -> tuple[Any, ...]:
    return call.query.shape, call.key.shape, call.is_causal, call.key_mask is None


def _relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).square().sum() / teacher.square().sum().clamp(min=1e-12)


def _groups(attentions: Iterable[SchoenbAt], rate: float) -> list[dict[str, Any]]:
    """SchoenbAt's parameters; scales are made to move faster than others, which a high rate must undo."""
    scales: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for attention in attentions:
        for name, parameter in attention.named_parameters():
            (scales if name in ("rho", "far_rho") else others).append(parameter)
    return [{"params": others, "lr": rate}, {"params": scales, "lr": rate / SPEED}]


def _optimizer(
    groups: list[dict[str, Any]], steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.Adam([group for group in groups if group["params"]])
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))


def _take_step(
    optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, loss: Tensor
) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()


def _forever(data: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in data:
            empty = False
            yield _on(batch, device)
        if empty:
            raise ValueError(
                "data gave no batches; pass a list or a DataLoader, which can be gone through again"
            )


def _on(batch: Batch, device: torch.device) -> Batch:
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch is what the model takes, by name, got {type(batch).__name__}")
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
