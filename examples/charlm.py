"""A causal language model of bytes with long contexts: SchoenbAt against softmax at equal parameters.

Reviews (IMDb) and papers (ACL Anthology Network), shuffled and laid end to end with a zero byte between them,
are one stream; a model sees crops of it as long as its context and predicts every next byte. For each
attention: bits per byte on a held-out stream, training speed, peak memory on a GPU, and how long one more
byte takes when so many have been read already. Writes results/charlm.json.

    python examples/charlm.py --data data --context 8192 --steps 2000
    python examples/charlm.py --data data --attention schoenbat sdpa --window 64 --context 65536 --batch 1
    torchrun --nproc-per-node 8 examples/charlm.py --data data --context 32768 --strategy fsdp
    python examples/charlm.py --data data --context 256 --steps 20 --width 64 --layers 2     # a CPU, a minute

Positions are rotary, put on queries and keys before the attention: a learned table of 65,536 rows would have
as many parameters as the rest of the model, and no crop shorter than the context would train all of them. A
rotation keeps a row's norm, so rows are brought to norm 1 (normalization="l2") before or after it alike;
normalization="token" would subtract a mean over channels that the rotation has mixed with the position.

``--data`` holds imdb_reviews.parquet (columns text, split) and aan_papers.parquet (column text). Needs the
extra [cli].
"""

import argparse
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.fabric import Fabric
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from schoenbat import SchoenbAt
from schoenbat.adapters import rotate
from schoenbat.data.parquet import read_columns
from schoenbat.report.results import write_results
from schoenbat.training.processes import STRATEGIES, is_sharded, launch, make_fabric

VOCABULARY = 256
HELD_OUT_PAPERS = 0.05
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class CharLMRow:
    """What one attention did."""

    attention: str
    parameters: int
    bits_per_byte: float
    """On the held-out stream, each crop read from its beginning."""
    train_bits_per_byte: float
    """Mean of the last tenth of the steps."""
    bytes_per_second: float
    """In training, of all processes together; median over the steps after the first few."""
    peak_memory: int | None
    """Bytes, in training, of one GPU."""
    generation: list[dict[str, float]]
    """Seconds for one byte after ``position`` bytes, batch size 1."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder of the two Parquet files")
    add("--corpus", choices=("imdb", "aan", "both"), default="both")
    add("--attention", nargs="+", choices=("schoenbat", "sdpa"), default=["schoenbat", "sdpa"])
    add("--context", type=int, default=8192, help="bytes in a crop (default: %(default)s)")
    add("--steps", type=int, default=2000, help="of training (default: %(default)s)")
    add("--batch", type=int, default=4, help="crops in a step of each process (default: %(default)s)")
    add("--width", type=int, default=512, help="of the model (default: %(default)s)")
    add("--layers", type=int, default=6, help="(default: %(default)s)")
    add("--heads", type=int, default=8, help="(default: %(default)s)")
    add("--features", type=int, default=128, help="D, of SchoenbAt (default: %(default)s)")
    add("--window", type=int, help="exact attention to so many bytes back, linear beyond")
    add("--learning-rate", type=float, default=1e-3, help="(default: %(default)s)")
    add("--evaluation-crops", type=int, default=32, help="held-out crops (default: %(default)s)")
    add("--generate", type=int, default=32, help="bytes timed at each position (default: %(default)s)")
    add("--strategy", choices=STRATEGIES, default="auto", help="of torchrun's processes; auto: ddp")
    add("--precision", default="bf16-mixed" if torch.cuda.is_available() else "32-true")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("results/charlm.json"))
    return parser.parse_args(arguments)


def read_streams(folder: Path, corpus: str, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones, uint8: whole texts, shuffled, a zero byte after each."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    if corpus in ("imdb", "both"):
        for text, split in zip(
            *read_columns(folder / "imdb_reviews.parquet", ["text", "split"]), strict=True
        ):
            (train if split == "train" else held_out).append(text.encode())
    if corpus in ("aan", "both"):
        (papers,) = read_columns(folder / "aan_papers.parquet", ["text"])
        for paper in map(str.encode, papers):
            share = int.from_bytes(hashlib.sha256(paper).digest()[:4]) / 2**32
            (held_out if share < HELD_OUT_PAPERS else train).append(paper)
    return laid_end_to_end(train, seed), laid_end_to_end(held_out, seed)


def laid_end_to_end(texts: list[bytes], seed: int) -> Tensor:
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.frombuffer(bytearray(b"".join(texts[i] + b"\0" for i in order)), dtype=torch.uint8)


class Softmax(nn.Module):
    """Causal softmax attention with SchoenbAt's calls; its state are all keys and values so far."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The state is a buffer that doubles when it is full: no byte pays for a copy of all others."""
        used = 0 if state is None else state[1]
        after = used + key.shape[-2]
        buffer = None if state is None else state[0]
        if buffer is None or after > buffer.shape[-2]:
            grown = key.new_empty(2, *key.shape[:2], 2 * after, key.shape[-1])
            if buffer is not None:
                grown[..., :used, :] = buffer[..., :used, :]
            buffer = grown
        buffer[0, ..., used:after, :], buffer[1, ..., used:after, :] = key, value
        keys, values = buffer[..., :after, :].unbind()
        # Either the whole prompt at once or one byte after all others: a mask is never needed. Every byte is
        # another length, for which cuDNN would plan anew: milliseconds each.
        with sdpa_kernel(WITHOUT_PLANS):
            return F.scaled_dot_product_attention(query, keys, values, is_causal=not used), (buffer, after)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, state: Any, start: int, decode: bool) -> tuple[Tensor, Any]:
        projected = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = projected.permute(2, 0, 3, 1, 4).unbind()
        q, k = rotate(q, start), rotate(k, start)
        if decode:
            out, state = self.attention.step(q, k, v, state)
        else:
            out = self.attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x)), state


class CharLM(nn.Module):
    """Logits of the next byte, ``(B, n) -> (B, n, 256)``."""

    def __init__(self, attention: Callable[[], nn.Module], width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(attention(), width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(tokens, None, 0, decode=False)[0]

    def decode(
        self, tokens: Tensor, states: list[Any] | None, start: int, decode: bool = True
    ) -> tuple[Tensor, list[Any]]:
        """`forward` for bytes that follow `start` others, of which `states` remember what is needed."""
        x, after = self.embed(tokens), []
        for block, state in zip(self.layers, states or len(self.layers) * [None], strict=True):
            x, state = block(x, state, start, decode)
            after.append(state)
        return self.head(self.norm(x)), after


def build(name: str, options: argparse.Namespace) -> CharLM:
    def attention() -> nn.Module:
        if name == "sdpa":
            return Softmax()
        # Without post-SBN the only parameters beyond softmax's are a scale (and a far weight) for each head.
        sizes = options.width // options.heads, options.heads, options.features
        if options.window is None:
            return SchoenbAt(*sizes, normalization="l2", post=False)
        module = SchoenbAt(
            *sizes, normalization="l2", post=False, window=options.window, construction="exact-low"
        )
        # Far keys are many: if each weighed as much as a near one, an untrained head would see nothing else.
        # So heads begin with weights from 1, all keys alike, down to where all of them are one key's worth.
        module.set_far_weight(torch.logspace(0, -math.log10(options.context), options.heads))
        return module

    return CharLM(attention, options.width, options.layers, options.heads)


def crops(stream: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``(B, context)``."""
    rows = torch.stack([stream[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def bits(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten()) / math.log(2)


def train(
    fabric: Fabric, model: CharLM, stream: Tensor, options: argparse.Namespace
) -> tuple[Any, float, float]:
    """The trained model (as Fabric wraps it), bits per byte of the last tenth, and bytes a second."""
    wrapped = fabric.setup_module(model)
    of_parts = torch.optim.AdamW(wrapped.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
    optimizer: Any = fabric.setup_optimizers(of_parts)
    warmup = max(1, options.steps // 20)

    def share(step: int) -> float:
        falling = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
        return min((step + 1) / warmup, falling)

    schedule = torch.optim.lr_scheduler.LambdaLR(of_parts, share)
    generator = torch.Generator().manual_seed(options.seed + 1 + fabric.global_rank)
    losses, seconds = [], []
    with Progress(disable=fabric.global_rank > 0, transient=True) as progress:
        bar = progress.add_task("training", total=options.steps)
        for _ in range(options.steps):
            began = time.perf_counter()
            starts = torch.randint(len(stream) - options.context, (options.batch,), generator=generator)
            inputs, targets = (x.to(fabric.device) for x in crops(stream, starts, options.context))
            loss = bits(wrapped(inputs), targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
            progress.update(bar, advance=1, description=f"training, {losses[-1]:.3f} bits per byte")
    late = losses[-max(1, options.steps // 10) :]
    per_step = options.batch * options.context * fabric.world_size
    return wrapped, sum(late) / len(late), per_step / median(seconds[min(3, options.steps - 1) :])


@torch.no_grad()
def evaluate(fabric: Fabric, model: Any, stream: Tensor, options: argparse.Namespace) -> float:
    """Bits per byte of crops at even distances, a part of them on each process."""
    model.eval()
    last = len(stream) - options.context - 1
    starts = torch.linspace(0, last, options.evaluation_crops).long()
    total = torch.zeros(2, device=fabric.device, dtype=torch.float64)
    for first in range(0, len(starts), fabric.world_size):
        # A process that has none left calls as well: the others may need its part of the weights.
        number = first + fabric.global_rank
        start = starts[min(number, len(starts) - 1)]
        inputs, targets = (x.to(fabric.device) for x in crops(stream, start[None], options.context))
        result = torch.stack([bits(model(inputs), targets).double(), total.new_ones(())])
        total += result * (number < len(starts))
    total = fabric.all_reduce(total, reduce_op="sum")
    return float(total[0] / total[1])


def joined(sharded: CharLM, whole: CharLM) -> CharLM:
    """The whole model in every process: each generates on its own."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in sharded.state_dict().items()
    }
    whole.load_state_dict(state, assign=True)
    return whole


@torch.no_grad()
def time_generation(
    fabric: Fabric, model: CharLM, stream: Tensor, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Seconds for one more byte after 1, context / 4, ... bytes; each is drawn and fed back."""
    model.eval()
    rows = []
    for position in (options.context * step // 4 for step in range(5)):
        prompt = stream[: max(1, position)].long().to(fabric.device)[None]
        with fabric.autocast():
            logits, states = model.decode(prompt, None, 0)
            for count in range(options.generate + 2):
                if count == 2:  # the first ones warm up
                    wait(fabric)
                    began = time.perf_counter()
                token = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
                logits, states = model.decode(token, states, prompt.shape[1] + count)
            wait(fabric)
        seconds = (time.perf_counter() - began) / options.generate
        rows.append({"position": prompt.shape[1], "seconds": seconds})
    return rows


def wait(fabric: Fabric) -> None:
    if fabric.device.type == "cuda":
        torch.cuda.synchronize(fabric.device)


def measure(
    name: str, fabric: Fabric, streams: tuple[Tensor, Tensor], options: argparse.Namespace
) -> CharLMRow:
    on_gpu = fabric.device.type == "cuda"
    fabric.seed_everything(options.seed, verbose=False)  # the same weights and maps in every process
    model = build(name, options)
    parameters = sum(p.numel() for p in model.parameters())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(fabric.device)
    wrapped, in_training, speed = train(fabric, model, streams[0], options)
    memory = torch.cuda.max_memory_allocated(fabric.device) if on_gpu else None
    held_out = evaluate(fabric, wrapped, streams[1], options)
    if is_sharded(fabric):
        model = joined(model, build(name, options))
    generation = time_generation(fabric, model, streams[1], options)
    row = CharLMRow(name, parameters, held_out, in_training, speed, memory, generation)
    fabric.print(
        f"{name:10} {parameters:,} parameters, {held_out:.3f} bits per byte, {speed:,.0f} bytes/s"
        + (f", {memory / 2**30:.2f} GiB" if memory else "")
        + ", one more byte: "
        + ", ".join(f"{1e3 * r['seconds']:.1f} ms after {r['position']:,.0f}" for r in generation)
    )
    return row


def check(options: argparse.Namespace, streams: tuple[Tensor, Tensor]) -> None:
    if options.width % (2 * options.heads):
        raise SystemExit(f"--width {options.width} must be an even multiple of --heads {options.heads}")
    shortest = min(map(len, streams))
    if shortest < options.context + 2:
        raise SystemExit(f"--context {options.context} is longer than a stream of {shortest:,} bytes")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = make_fabric(accelerator, 1, options.strategy, options.precision)
    launch(fabric)
    streams = read_streams(options.data, options.corpus, options.seed)
    check(options, streams)
    fabric.print(f"{len(streams[0]):,} bytes to train on, {len(streams[1]):,} held out")
    rows = [measure(name, fabric, streams, options) for name in options.attention]
    if fabric.global_rank == 0:
        write_results(options.out, "charlm", vars(options), rows, device=fabric.device)


if __name__ == "__main__":
    main()
