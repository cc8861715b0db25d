"""FlexAttention inside of what is compiled."""

import pytest
import torch

from schoenbat.ops.flex import compiled_flex


def test_it_is_compiled_with_what_is_around_it():
    """Lightning takes the place of torch.compile, which a compiler cannot see through."""
    pytest.importorskip("lightning.fabric")
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda x: compiled_flex()(x, x, x), backend="eager", fullgraph=True)
    right = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(compiled(x), right)
