"""SchoenbAt inside transformers: ``attn_implementation="schoenbat"``, conversion of trained models, recovery.

```python
from schoenbat.integrations import huggingface

huggingface.register()                        # once: makes attn_implementation="schoenbat" known
huggingface.convert(model, num_features=256)  # a loaded model, in place; its own weights are kept
model.generate(**inputs)                      # with a state of fixed size, not a growing cache
model.save_pretrained(path)                   # after register(), from_pretrained(path) loads it
```

Needs the extra ``[hf]``.
"""

try:
    from schoenbat.integrations.huggingface.attention import AttentionCall, record_attention
    from schoenbat.integrations.huggingface.cache import RMFALayer
    from schoenbat.integrations.huggingface.conversion import Conversion, convert, register
    from schoenbat.integrations.huggingface.distillation import calibrate, distill
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("schoenbat"):
        raise
    raise ModuleNotFoundError(
        f"converting models of transformers needs {missing.name}; pip install '.[hf]' in a checkout",
        name=missing.name,
    ) from None

__all__ = [
    "AttentionCall",
    "Conversion",
    "RMFALayer",
    "calibrate",
    "convert",
    "distill",
    "record_attention",
    "register",
]
