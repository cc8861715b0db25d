"""cosFormer: ReLU features, reweighted by the cosine of the distance."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.baselines.baseline import Baseline
from schoenbat.baselines.linear_attention import linear_attention
from schoenbat.baselines.masking import hide, present
from schoenbat.precision import without_autocast


class CosFormer(Baseline):
    """Linear attention with weights ``⟨relu(q_i), relu(k_j)⟩ · cos(π (i − j) / 2M)``, divided by their sum.

    The cosine of a difference is a sum of products, so that each row has 2d features,
    ``relu(x) cos(π i / 2M)`` and ``relu(x) sin(π i / 2M)``, nowhere negative. Positions are counted among the
    real keys of a sequence and M is their number, in the causal form too: the same beginning weighs its keys
    otherwise in a longer sequence. A query stands where the key stands that it is aligned with, the last
    query with the last key. A row without a positive weight gives zeros.

    Zhen Qin, Weixuan Sun, Hui Deng, Dongxu Li, Yunshen Wei, Baohong Lv, Junjie Yan, Lingpeng Kong,
    Yiran Zhong: *cosFormer: Rethinking Softmax in Attention*, ICLR 2022.

    Args:
        head_dim: d.
        num_heads: H, of the queries.

    Example:
        >>> attention = CosFormer(head_dim=8, num_heads=2)
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([1, 2, 5, 8])
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        with without_autocast(query):
            query_angle, key_angle = _angles(query.shape[-2], present(key, key_mask))
            query_features = _features(hide(query, query_mask), query_angle)
            key_features = _features(hide(key, key_mask), key_angle)
            output = linear_attention(
                query_features, key_features, hide(value, key_mask), is_causal=is_causal
            )
        return output.to(value.dtype)


def _angles(num_queries: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``π i / 2M`` of the queries and of the keys, float64 ``(B, n)``."""
    keys_before = F.pad(mask.cumsum(-1), (1, 0))  # (B, n_k + 1)
    num_keys = mask.shape[-1]
    aligned = torch.arange(num_keys - num_queries, num_keys, device=mask.device).clamp(min=0)
    angles = keys_before.double() * (math.pi / 2) / keys_before[:, -1:].clamp(min=1)
    return angles.index_select(-1, aligned), angles[:, :-1]


def _features(x: Tensor, angle: Tensor) -> Tensor:
    """``(B, H, n, d) -> (B, H, n, 2d)``."""
    positive = x.relu()
    waves = (wave.to(x.dtype)[:, None, :, None] for wave in (angle.cos(), angle.sin()))
    return torch.cat([positive * wave for wave in waves], dim=-1)
