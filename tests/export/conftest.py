"""A tiny model that pip's `gguf` can write, and what transformers computes with a directory."""

import pytest

from dualtune.engine.testing.tiny_models import write_tiny_llama

VOCAB = 262
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    """Write a tiny model of a family with a tokenizer that splits texts as GPT-2's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(family="llama", **changes):
        path = tmp_path_factory.mktemp(family) / "model"
        name = {"llama": "Llama", "qwen3": "Qwen3"}.get(family, family)
        changes = {"vocab_size": VOCAB + 2, "model_type": family, "architectures": [f"{name}ForCausalLM"], **changes}
        write_tiny_llama(path, **changes)
        special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
        tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "=7"]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("=", "7")]))
        tokenizer.add_special_tokens(special)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TURNS
        ).save_pretrained(path)
        return path

    return make


@pytest.fixture
def logits():
    def compute(path, **options):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
        with torch.no_grad():
            return model(torch.arange(5, 45)[None]).logits.numpy()

    return compute
