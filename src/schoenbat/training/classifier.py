"""The small sequence classifier of the Long Range Arena comparisons, with any attention of the registry."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schoenbat.data.task import Task
from schoenbat.registry import build_attention, with_option, with_seed
from schoenbat.training.options import RunOptions

# Of the token embedding, on a GPU.
_COPIES = 32


class Classifier(nn.Module):
    """Token and learned position embeddings, two pre-norm layers, mean over positions, a two-layer head.

    It is the model of the paper's comparisons. With ``paired``, two sequences go through the same layers, and
    the head sees ``[x₀, x₁, x₀·x₁, x₀−x₁]``.

    Args:
        attention: a name with options, as ``schoenbat.build_attention`` takes it.
        vocab_size: the rows of the token embedding; token 0 is padding.
        num_classes: the number of labels.
        max_length: what sequences are padded to; shorter input gives the same logits as the padded one.
        dim: the width of the embeddings.
        num_heads: attention heads of ``dim / num_heads`` channels each.
        hidden_dim: the width inside the feed-forward parts and the head.
        num_layers: the number of layers.
        dropout: on the embeddings, on what each part of a layer adds, and on softmax attention's weights.
        paired: whether an example is two sequences.

    >>> import torch
    >>> model = Classifier("mean", vocab_size=16, num_classes=10, max_length=32)
    >>> model(torch.randint(1, 16, (4, 32))).shape
    torch.Size([4, 10])
    """

    def __init__(
        self,
        attention: str,
        *,
        vocab_size: int,
        num_classes: int,
        max_length: int,
        dim: int = 64,
        num_heads: int = 2,
        hidden_dim: int = 128,
        num_layers: int = 2,
        dropout: float = 0.1,
        paired: bool = False,
    ) -> None:
        super().__init__()
        self.max_length, self.paired = max_length, paired
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_length, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        text = with_option(attention, "dropout", dropout)  # of weights, which softmax alone has
        self.layers = nn.ModuleList(
            Layer(
                build_attention(with_seed(text), dim // num_heads, num_heads, max_length),
                dim,
                num_heads,
                hidden_dim,
                dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(
            nn.Linear(4 * dim if paired else dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_classes)
        )

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits ``(B, num_classes)`` of ``tokens`` ``(B, n)``, or ``(B, 2, n)`` where paired.

        ``mask``, of the same shape, is True where a token takes part; None stands for ``tokens != 0``.
        """
        if tokens.shape[-1] > self.max_length:
            raise ValueError(f"sequences of {tokens.shape[-1]} tokens, but max_length is {self.max_length}")
        if mask is None:
            mask = tokens != 0
        if not self.paired:
            return self.head(self.encode(tokens, mask))
        first, second = self.encode(tokens.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([first, second, first * second, first - second], -1))

    def encode(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """What the layers make of sequences ``(B, n)``: ``(B, dim)``."""
        x = embed(tokens, self.tokens.weight, _COPIES if tokens.is_cuda else 1)  # (B, n, dim)
        x = self.dropout(x + self.positions.weight[: tokens.shape[-1]])
        for layer in self.layers:
            x = layer(x, mask)
        # Divided by the padded length, as in the published comparisons: the sum then also tells the length.
        return (self.norm(x) * mask.unsqueeze(-1)).sum(-2) / self.max_length


def build_model(task: Task, options: RunOptions) -> Classifier:
    """The paper's model for a task."""
    protocol = options.protocol
    return Classifier(
        options.attention,
        vocab_size=max(protocol.embedding_rows, task.vocab_size),
        num_classes=task.num_classes,
        max_length=task.max_length,
        dropout=protocol.dropout,
        paired=task.paired,
    )


def embed(tokens: Tensor, weight: Tensor, copies: int) -> Tensor:
    """The rows of ``weight`` that ``tokens`` ``(B, n)`` name, each out of one of several copies of it.

    Copies only change how a GPU adds up gradients: those of one token, and padding alone may be most of a
    batch, would otherwise wait for one another at one row.
    """
    copy = torch.arange(tokens.shape[-1], device=tokens.device) % copies  # by position
    return F.embedding(tokens + len(weight) * copy, weight.repeat(copies, 1))


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to its input and taking it through a LayerNorm."""

    def __init__(
        self, attention: nn.Module, dim: int, num_heads: int, hidden_dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.attention = attention
        self.output = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.attention_norm(x), mask))
        return x + self.feed_forward(x)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (B, n, 3, H, d)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, n, d)
        mixed = self.attention(query, key, value, key_mask=mask, query_mask=mask)
        return self.output(mixed.transpose(-3, -2).flatten(-2))
