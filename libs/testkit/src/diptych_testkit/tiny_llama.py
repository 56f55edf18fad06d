"""A Llama of a million random weights, as a folder that engines of other makers load."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT_TOKENS = 2048
_END = "<|im_end|>"
_SIZE, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 128, 256, 4, 4, 2, 32
_SPREAD = 0.2
"""Of the weights: wide enough that the likeliest token is so by far."""
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(folder: Path, *, seed: int = 3) -> Path:
    """Write configuration, weights (float32) and a tokenizer of bytes; gives `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", _END]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[-2:])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _END}
    _write(folder / "tokenizer_config.json", told | {"chat_template": _TEMPLATE})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": len(tokens),
        "eos_token_id": len(tokens) - 1,
        "hidden_size": _SIZE,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    _write(folder / "config.json", config)
    _write_weights(folder / "model.safetensors", _shapes(len(tokens)), seed)
    return folder


def _write(path: Path, told: Mapping[str, object]) -> None:
    path.write_text(json.dumps(told, indent=1))


def _shapes(n_tokens: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (n_tokens, _SIZE),
        "model.norm.weight": (_SIZE,),
        "lm_head.weight": (n_tokens, _SIZE),
    }
    for n in range(_LAYERS):
        shapes |= {
            f"model.layers.{n}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (_SIZE,),
                "post_attention_layernorm": (_SIZE,),
                "self_attn.q_proj": (_HEADS * _HEAD, _SIZE),
                "self_attn.k_proj": (_KV_HEADS * _HEAD, _SIZE),
                "self_attn.v_proj": (_KV_HEADS * _HEAD, _SIZE),
                "self_attn.o_proj": (_SIZE, _HEADS * _HEAD),
                "mlp.gate_proj": (_INNER, _SIZE),
                "mlp.up_proj": (_INNER, _SIZE),
                "mlp.down_proj": (_SIZE, _INNER),
            }.items()
        }
    return shapes


def _write_weights(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """As safetensors: the header's length, where each tensor lies, the tensors."""
    rng = np.random.default_rng(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0.0, _SPREAD, shape)
        begin = len(data)
        data += values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, len(data))}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
