"""Tiny random models as transformers saves them, and tiny tokenizers of both kinds that the llama family has."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's 2024 after all.",
    "def f(x):\n    return x ** 2  # the square\n",
    "Grüße aus Köln — naïve façade, 日本語のテキスト, мир, 🎉 👩‍👩‍👧",
    "  two  spaces\t and tabs\r\n\n and 1234567890 numbers 12 34",
] * 3
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(vocab_size=400):
    """As Llama 3, Qwen and SmolLM2 have them; one token is added that is not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def sentencepiece(vocab_size=500):
    """As Llama 2 and Mistral have them: a space in front of every word, bytes for what has no token."""
    alphabet = sorted({c for text in CORPUS[:2] for c in text} - {" ", "\n"})
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bytes_of_all = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 259, initial_alphabet=alphabet, limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(CORPUS[:2], trainer)
    told = json.loads(trained.to_str())
    pieces = sorted(told["model"]["vocab"], key=told["model"]["vocab"].get)
    names = ["<unk>", "<s>", "</s>", *bytes_of_all, *pieces]
    told["model"] |= {
        "vocab": {name: id for id, name in enumerate(names)},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(told))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_tokenizer(folder, tokenizer, **settings):
    """tokenizer.json and tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (transformers' architecture, options of its configuration)
MODELS = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "smollm2": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {"sliding_window": 64, "head_dim": 24}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def build(name, seed=0, **more):
    """transformers' model, with norms and biases that are not the ones and zeros of a fresh one."""
    import torch
    import transformers

    architecture, options = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 416,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            **options,
            **more,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (0 if "bias" in parameter_name else 1))
    return model
