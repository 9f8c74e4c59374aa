"""The work of shapes with turns (W6): conversations in which the model calls a calculator and then answers, to the token.

A model folder of such a shape has a byte-level tokenizer that the words of `shapes` are single tokens of, too (" t12"), with the control
tokens of ChatML, and a chat template that tells tools, calls and replies. What is recorded of every answer: a first turn of words that
ends in a call, what the tool's reply adds, a second turn of words. Every number has three digits, so that all have the same lengths.
"""

from __future__ import annotations

import json
from pathlib import Path

CONTROL = ("<pad>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
QUESTION = "add"  # begins with it
NUMBERS = (100, 500)  # of a call; their sum has three digits, too
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nFunctions: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def add(left: int, right: int) -> int:
    """The sum of two whole numbers.

    Args:
        left: the first number
        right: the second number
    """
    return left + right


def call_of(left: int, right: int) -> str:
    """The end of a first turn."""
    said = json.dumps({"name": "add", "arguments": {"left": left, "right": right}})
    return f"<tool_call>\n{said}\n</tool_call><|im_end|>"


def reply_of(left: int, right: int) -> str:
    """What stands between the first turn and the second."""
    return f"\n<|im_start|>user\n<tool_response>\n{add(left, right)}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def told(words) -> str:
    """Each word is one token, its space included."""
    return "".join(f" t{i}" for i in words)


def write_tokenizer(vocab: int, folder: Path) -> None:
    """Bytes, the texts' own pieces and as many words as there is room for. A piece becomes a token by merges of one letter after the
    other, so that its beginnings are tokens as well."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.utils import get_json_schema

    known = dict.fromkeys((*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    merges = []

    def learn(piece: str) -> bool:
        """False where there is no room for it."""
        letters = piece.replace(" ", "Ġ").replace("\n", "Ċ")
        for i in range(1, len(letters)):
            before, whole = letters[:i], letters[:i + 1]
            if whole not in known:
                if len(known) == vocab:
                    return False
                known[whole] = None
                merges.append((before, letters[i]))
        return True

    cut = pre_tokenizers.Split(Regex(r" ?\S+|\s"), "isolated")
    static = f"system\nFunctions: {json.dumps([get_json_schema(add)])}\nuser\nassistant\nadd{call_of(0, 0).removeprefix(CONTROL[3])}"
    for piece, _ in cut.pre_tokenize_str("".join(c for c in static if not c.isdigit())):
        learn(piece)
    number = 0
    while learn(f" t{number}"):
        number += 1
    t = Tokenizer(models.BPE({token: i for i, token in enumerate(known)}, merges))
    t.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(list(CONTROL[:3]))
    t.add_tokens(list(CONTROL[3:]))
    folder.mkdir(exist_ok=True)
    t.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROL[1], "pad_token": CONTROL[0], "chat_template": TEMPLATE,
        "model_max_length": 1 << 20, "clean_up_tokenization_spaces": False}))


def record(shape, folder: Path, draw) -> dict:
    """{"prompts" [P, L], "answers" [N, A], "questions": P texts}. An answer is both turns with the reply between them. Raises
    AssertionError where the shape's lengths are not these."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    words = sum(token.startswith("Ġt") and token[2:].isdigit() for token in tokenizer.get_vocab())
    some = lambda n: told(draw.integers(0, words, n))  # noqa: E731
    prompts, answers, questions = [], [], []
    head = len(_prompt(tokenizer, QUESTION))
    for _ in range(shape.prompts):
        questions.append(QUESTION + some(shape.prompt_tokens - head))
        prompts.append(_prompt(tokenizer, questions[-1]))
    for _ in range(shape.sequences):
        numbers = [int(n) for n in draw.integers(*NUMBERS, 2)]
        call, reply = ids(call_of(*numbers)), ids(reply_of(*numbers))
        first = ids(some(shape.turns[0] - len(call))) + call
        second = ids(some(shape.turns[1] - 1)) + [tokenizer.eos_token_id]
        assert (len(first), len(second)) == shape.turns, (len(first), len(second))
        assert len(first + reply + second) == shape.new_tokens, f"new_tokens must be {len(first + reply + second)}"
        answers.append(first + reply + second)
    assert {len(p) for p in prompts} == {shape.prompt_tokens}, {len(p) for p in prompts}
    return {"prompts": np.array(prompts, np.int32), "answers": np.array(answers, np.int32), "questions": questions}


def _prompt(tokenizer, question: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": question}], tools=[add], add_generation_prompt=True,
                                         tokenize=True, return_dict=False)
