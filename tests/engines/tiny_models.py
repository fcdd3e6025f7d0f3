"""Models of a few kilobytes, with random weights, and adapters for them; nothing is downloaded.

What an engine keeps in its cache depends on a model's layers and not on what it says. vLLM makes up
the weights (`--load-format dummy`); a model here is its configuration and a list of words.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 4096
FIRST_WORD: Final = 4
"""Below are the special tokens."""
LAYERS: Final = 2
HIDDEN: Final = 64
HEADS: Final = 2
HEAD: Final = 32
CHAT_TEMPLATE: Final = "{% for one in messages %}{{ one.role }} {{ one.content }} {% endfor %}"
"""A role is a word that the model does not know, and so a token all the same."""
WINDOW: Final = 128

COMMON: Final[Mapping[str, Any]] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
}

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "gemma3": {  # layers with sliding windows and with full attention take turns
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": HEAD,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "granite_h": {  # Mamba-2 and attention
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 128,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.17,
        "position_embedding_type": "nope",
        "attention_bias": False,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 8192,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "gpt_oss": {  # windows and full attention take turns, with sinks; experts
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": None,
    },
    "falcon_h1": {  # Mamba-2 beside attention in every layer
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_d_ssm": 128,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "key_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    "nemotron_h": {  # Mamba-2, attention and plain layers, one after the other
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 256,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_head_dim": HEAD,
    },
    "lfm2": {  # short convolutions and attention
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_dim": HIDDEN,
        "conv_dim_out": HIDDEN,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_dim": HIDDEN,
        "block_ff_dim": 128,
        "block_use_swiglu": True,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "block_norm_eps": 1e-5,
    },
    "mamba2": {  # states in all layers
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "n_groups": 1,
        "chunk_size": 256,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": 1e-5,
    },
    "mistral": {  # sliding windows in all layers
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
    },
}


def write_model(folder: Path, name: str) -> Path:
    """Write one of MODELS into a new folder there, and return that."""
    model = folder / name
    if model.exists():
        return model
    model.mkdir(parents=True)
    words = {f"w{token}": token for token in range(FIRST_WORD, VOCABULARY)}
    _write(model / "config.json", {**COMMON, **MODELS[name]})
    _write(
        model / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | words,
                "unk_token": "<unk>",
            },
        },
    )
    _write(
        model / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "model_max_length": 8192,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return model


def write_adapter(folder: Path, name: str, *, rank: int = 8) -> Path:
    """Write an adapter of the plain models into a new folder there, and return that."""
    adapter = folder / name
    if adapter.exists():
        return adapter
    adapter.mkdir(parents=True)
    wide = {"q_proj": HEADS * HEAD, "v_proj": HEAD}
    _write(
        adapter / "adapter_config.json",
        {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "bias": "none",
            "target_modules": sorted(wide),
            "task_type": "CAUSAL_LM",
        },
    )
    shapes = {}
    for layer in range(LAYERS):
        for module, out in wide.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes[f"{path}.lora_A.weight"] = (rank, HIDDEN)
            shapes[f"{path}.lora_B.weight"] = (out, rank)
    (adapter / "adapter_model.safetensors").write_bytes(_tensors(shapes, random.Random(name)))
    return adapter


def _tensors(shapes: Mapping[str, tuple[int, int]], rng: random.Random) -> bytes:
    """Random numbers in the format `safetensors`: length of a header, the header, the numbers."""
    header, numbers = {}, b""
    for name, (rows, columns) in shapes.items():
        begin = len(numbers)
        count = rows * columns
        numbers += struct.pack(f"<{count}f", *(rng.gauss(0, 0.02) for _ in range(count)))
        header[name] = {
            "dtype": "F32",
            "shape": [rows, columns],
            "data_offsets": [begin, len(numbers)],
        }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), "utf-8")
