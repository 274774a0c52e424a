"""A tokenizer for models that have none: one token per UTF-8 byte."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token ids 0..255 are bytes; the rest of the vocabulary decodes to nothing.

    Shape-only models (`model.path=null`) have no words of their own; this lets text prompts reach
    them.

    Raises:
        ValueError: the vocabulary is smaller than 256.
    """
    if vocab_size < 256:
        raise ValueError(f"a byte tokenizer needs a vocabulary of at least 256, not {vocab_size}")
    vocab = {char: idx for idx, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
