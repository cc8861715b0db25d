"""The fused kernels as custom operators of torch.library, registered all at once.

A map travels as its plan, a list of tensors, and a list of ints; gradients do not go through these. A map
that is trained comes along as `plan.trained_map` gives it, too: these tensors and the coefficients get some.
"""

from schoenbat.ops.triton.library.bidirectional import attend
from schoenbat.ops.triton.library.causal import attend_causal
from schoenbat.ops.triton.library.state import read, step, summarize

__all__ = ["attend", "attend_causal", "read", "step", "summarize"]
