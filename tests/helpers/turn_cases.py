"""Chat templates in the manner of the common families, each with a byte-level tokenizer that knows its tokens."""

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.config.load import default_config
from jaxrl.data.turns import TurnRenderer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}, "required": ["a"]}}}]

JSON_CALLS = ("{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first or m.content }}<tool_call>\n"
              '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}')
XML_CALLS = ("{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
             "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
             "</function>\n</tool_call>{% endfor %}")
REPLIES = ("{{ '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}\n<tool_response>\n{{ m.content }}\n"
           "</tool_response>{{ '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}")
SYSTEM = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"


def chatml(turn: str, generation: str) -> str:
    return (SYSTEM + "{% for m in messages %}{% if m.role == 'tool' %}" + REPLIES + "{% elif m.role == 'assistant' %}"
            "<|im_start|>assistant\n" + turn + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n" + generation + "{% endif %}")


WITHOUT_THOUGHTS = ("{% set last = namespace(user=-1) %}{% for n in messages %}{% if n.role == 'user' %}"
                    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% set said = m.content.split('</think>') %}"
                    "{% if said | length > 1 and loop.index0 > last.user %}{{ said[0] }}</think>{% endif %}{{ said[-1] }}")
HEADER = "<|start_header_id|>%s<|end_header_id|>\n\n"
LLAMA = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}" + HEADER % "ipython"
         + "{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}"
         "{{ raise_exception('one call at a time') }}{% endif %}" + HEADER % "assistant"
         + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
         "<|eot_id|>{% else %}" + HEADER % "{{ m.role }}" + "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
         "{% if add_generation_prompt %}" + HEADER % "assistant" + "{% endif %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
           "[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}"
           '{% endif %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
           "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]"
           '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.role == "assistant" %}'
           "{{ m.content }}</s>{% else %}{{ raise_exception('which role is that?') }}{% endif %}{% endfor %}")
GEMMA = ("{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('roles alternate') }}{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
         "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
PYTHONIC = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>["
            "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
            "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
            "<|tool_call_end|>{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
OPENER = ("{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}<|observation|>\n"
          "{{ m.content }}{% else %}<|assistant|>\n{{ m.content }}" + JSON_CALLS + "{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
COMMAND = ("{{ bos_token }}{% for m in messages %}<|turn|>{% if m.role == 'assistant' %}<|bot|><|begin|>{{ m.content }}<|finish|>"
           "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|over|>{% endfor %}"
           "{% if add_generation_prompt %}<|turn|><|bot|><|begin|>{% endif %}")
PLAIN = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")

IM = ("<|im_start|>", "<|im_end|>")
# name -> template, special tokens (the first is the end token), added tokens that are not special, parser, append-only
FAMILIES = {
    "hermes": (chatml("{{ m.content }}" + JSON_CALLS, ""), ("<|im_end|>", "<|im_start|>"), ("<tool_call>", "</tool_call>"),
               "hermes", True),
    "thoughts": (chatml(WITHOUT_THOUGHTS + JSON_CALLS, ""), ("<|im_end|>", "<|im_start|>"),
                 ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"), "hermes", False),
    "opened": (chatml("{{ m.content }}" + XML_CALLS, "<think>\n"), ("<|im_end|>", "<|im_start|>"),
               ("<tool_call>", "</tool_call>", "<think>", "</think>"), "qwen", False),
    "llama": (LLAMA, ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"), (), "llama", True),
    "mistral": (MISTRAL, ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), (), "mistral", True),
    "gemma": (GEMMA, ("<end_of_turn>", "<start_of_turn>"), (), None, True),
    "pythonic": (PYTHONIC, ("<|im_end|>", "<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"), (), "pythonic", True),
    "opener": (OPENER, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"), ("<tool_call>", "</tool_call>"),
               "hermes", True),
    "command": (COMMAND, ("<|over|>", "<|turn|>", "<|bot|>", "<|begin|>", "<|finish|>", "<|user|>"), (), None, True),
    "plain": (PLAIN, ("<eos>",), (), None, False),
}


def make_tokenizer(template: str | None, special=("<eos>",), added=()):
    """One token per byte, and the named ones; the first special one ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<pad>", *special)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>", eos_token=special[0])
    out.chat_template = template
    return out


def renderer(family: str, tools=(), **options) -> TurnRenderer:
    """options: of `env`, or 'group__name'."""
    template, special, added, *_ = FAMILIES[family]
    return make_renderer(make_tokenizer(template, special, added), tools, **options)


def make_renderer(tokenizer, tools=(), **options) -> TurnRenderer:
    config = default_config()
    config.model.tokenizer = "a/tokenizer"
    for name, value in options.items():
        group, _, option = name.rpartition("__")
        config[group or "env"][option] = value
    return TurnRenderer(config, tokenizer, tools)


def random_text(rng: random.Random, literals=()) -> str:
    """Text of many scripts; with `literals`, also with these in it."""
    parts = ["a", "Zahl 7", "é", "数", "🙂", "\n", " ", '"', "\\", "{x}", "<", "|>", "'", "\t", "\u200b", *literals]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 12)))
