"""A byte-level BPE tokenizer, trained in a moment on a few sentences."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.conftest import CHATML_TEMPLATE

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello again.",
    "\u4f60\u597d\u4e16\u754c\uff0c\u4f60\u597d\u5417\uff1f",
    "def main():\n    return [x for x in range(10)]",
    "\U0001f600\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467",
]
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(*, adds_bos: bool = False, has_chat_template: bool = True) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    if has_chat_template:
        # Writes the beginning-of-sequence token itself, as the templates of Llama do.
        fast.chat_template = "{{ bos_token }}" + CHATML_TEMPLATE
    return fast
