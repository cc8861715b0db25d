"""Small random models of every family that is converted, and inputs for them; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    DebertaConfig,
    DebertaModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

VOCABULARY = 60
_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
# Weights large enough that attention is far from averaging.
_WIDE: dict[str, Any] = {"initializer_range": 0.15}
_GROUPED: dict[str, Any] = {**_TEXT, **_SIZE, **_WIDE, "num_key_value_heads": 2}


def _gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(**_TEXT, **_WIDE, n_embd=32, n_layer=2, n_head=4, n_positions=128))


def _bart() -> PreTrainedModel:
    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers",)}
    sizes = {
        f"{side}_{k}": v
        for side in ("encoder", "decoder")
        for k, v in {"attention_heads": 4, "ffn_dim": 48}.items()
    }
    return BartForConditionalGeneration(
        BartConfig(
            **_TEXT,
            d_model=32,
            init_std=0.15,
            max_position_embeddings=128,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
            **layers,
            **sizes,
        )
    )


def _deepseek() -> PreTrainedModel:
    """Keys wider than values, both unpacked from what the cache holds."""
    widths = {
        "kv_lora_rank": 12,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 6,
    }
    config = {**_TEXT, **_SIZE, **_WIDE, **widths, "first_k_dense_replace": 2, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config))


def t5() -> PreTrainedModel:
    config = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**_TEXT, **config))


def deberta() -> PreTrainedModel:
    return DebertaModel(DebertaConfig(**_TEXT, **_SIZE))


def albert() -> PreTrainedModel:
    """One layer, called three times."""
    config = {**_TEXT, **_SIZE, **_WIDE, "embedding_size": 16, "num_hidden_layers": 3}
    return AlbertModel(AlbertConfig(**config))


def diff_llama() -> PreTrainedModel:
    """Attention is called twice a forward, with two kinds of values."""
    return DiffLlamaForCausalLM(DiffLlamaConfig(**_GROUPED, head_dim=8))


def gemma2() -> PreTrainedModel:
    """Scores are capped."""
    config = {**_GROUPED, "head_dim": 8, "attn_logit_softcapping": 2.0, "sliding_window": 100}
    return Gemma2ForCausalLM(Gemma2Config(**config))


def gpt_oss() -> PreTrainedModel:
    """Each head has a sink."""
    config = {**_GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**config))


def qwen2_with_sliding_layer() -> PreTrainedModel:
    """The first layer attends to everything, the second within a window of 4 tokens."""
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**_GROUPED, **sliding))


ENCODERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**_TEXT, **_SIZE, **_WIDE)),
    "roberta": lambda: RobertaModel(RobertaConfig(**_TEXT, **_SIZE, **_WIDE)),
}
DECODERS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek": _deepseek,
    "gpt2": _gpt2,
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**_TEXT, **_SIZE, init_std=0.15, ffn_dim=48, word_embed_proj_dim=32)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_TEXT, **_SIZE, **_WIDE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=8)),
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    **ENCODERS,
    **DECODERS,
    "vit": lambda: ViTModel(ViTConfig(**_SIZE, **_WIDE, image_size=16, patch_size=4)),
    "bart": _bart,
    "clip": lambda: CLIPTextModel(CLIPTextConfig(**_TEXT, **_SIZE, max_position_embeddings=32)),
}
NUM_LAYERS = dict.fromkeys(FAMILIES, 2) | {"bart": 6}


def make(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return build().eval()


def tokens(batch: int = 2, length: int = 11, seed: int = 1) -> torch.Tensor:
    """Ids that are no special tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs_for(family: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    if family == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels.to(dtype)}
    if family == "bart":
        return {"input_ids": tokens(length=9), "decoder_input_ids": tokens(seed=2)}
    return {"input_ids": tokens()}


@torch.no_grad()
def outputs_of(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    outputs = model(**inputs)
    return outputs.last_hidden_state if "last_hidden_state" in outputs else outputs.logits
