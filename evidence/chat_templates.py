"""Several turns over public chat templates: what was sampled is what is trained, and what rendering anew would break.

`python evidence/chat_templates.py` downloads two wheels with pip (trl and axolotl, which ship the templates of some
seventy models; nothing of them is kept), gives each template a BPE tokenizer that knows its special tokens, and plays
10,000 turns, texts and calls. Conversations are of five kinds: `whole` turns in the tokenizer's own tokens, `cut` ones
(by the length limit, at random), the same text in `other` tokens at one place, `any` ids at random, and `smuggled`:
whole turns, and messages that spell the control tokens.

For every turn the next prompt must begin with all ids recorded so far, the masks must find exactly the sampled ones,
what was added must spell what the template itself writes there, and no control token may come out of a message. Beside
it, of each kind: how often the same conversation, rendered and tokenised anew, does not begin with the recorded ids.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
from common import record, table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl.config.load import default_config
from jaxrl.data.chat_template import PromptError
from jaxrl.data.suffixes import QUESTION
from jaxrl.data.turns import TurnRenderer
from jaxrl.errors import ConfigError

WHEELS = ("trl==1.16.0", "axolotl==0.19.0")
KINDS = ("whole", "cut", "smuggled", "other", "any")
LITERAL = re.compile(r"<\|[^|<>\s'\"]+\|>|<｜[^｜<>\s'\"]+｜>|<\|?/?[A-Za-z_]+\|?>|\[/?[A-Z_]{3,}\]|\[\|[a-z]+\|\]")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>", "<｜end▁of▁sentence｜>", "[|endofturn|]",
        "<|END_OF_TURN_TOKEN|>")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}, "required": ["a"]}}}]
WORDS = "the sum of a number and 12 is 数 the café 🙂 42, because addition: {x} \n \\boxed{7} user system".split(" ")


def templates() -> dict[str, str]:
    """Name -> template, each text once."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for wheel in WHEELS:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, wheel], check=True)
        for path in sorted(Path(folder).glob("*.whl"), reverse=True):
            with zipfile.ZipFile(path) as wheel:
                for name in sorted(n for n in wheel.namelist() if n.endswith(".jinja")):
                    text = wheel.read(name).decode()
                    if text not in found.values():
                        found[f"{path.name.split('-')[0]}/{Path(name).stem}"] = text
    return found


def trained(texts: list[str]) -> str:
    """A byte-level BPE tokenizer with merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer.to_str()


def tokenizer_of(template: str, base: str):
    """The tokenizer with the template's special tokens; lower-case tags such as <think> are added tokens that are not
    special, as in Qwen's."""
    literals = sorted({*LITERAL.findall(template), "<bos>", "</s>", "<|endoftext|>"})
    tags = [t for t in literals if re.fullmatch(r"</?[a-z_]+>", t) and not re.fullmatch(r"<bos>|</s>|<\w+_of_\w+>", t)]
    tokenizer = Tokenizer.from_str(base)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in literals if t not in tags])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    end = next((t for t in ENDS if t in literals), "</s>")
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=end, pad_token="<|endoftext|>")
    out.chat_template = template
    return out


def opened(name: str, tokenizer) -> tuple[TurnRenderer | None, bool, str]:
    """(renderer, whether with tools, why not)."""
    config, refused = default_config(), ""
    config.model.chat_template = name
    for parallel, tools in ((2, True), (1, True), (1, False)):
        config.env.max_parallel_calls = parallel
        try:
            r = TurnRenderer(config, tokenizer, TOOLS if tools else ())
            r.check(tools)
            return r, tools, refused
        except ConfigError as e:
            refused = str(e)
    return None, False, refused


class Player:
    """Plays conversations with one template and counts what must not be."""

    def __init__(self, r: TurnRenderer, tools: bool, rng: random.Random):
        self.r, self.tools, self.rng, self.count = r, tools, rng, Counter()
        self.literals = list(r.tokens.control.values())
        self.close = [int(i) for i in r._suffixes.shape((("user", False, False),)).close]

    def words(self, literals=()) -> str:
        return " ".join(self.rng.choice([*WORDS, *literals]) for _ in range(self.rng.randrange(1, 9)))

    def sampled(self, kind: str, messages) -> list[int]:
        """Ids of a turn."""
        r, rng = self.r, self.rng
        if kind == "any":
            return [rng.randrange(len(r.tokenizer)) for _ in range(rng.randrange(1, 20))] + self.close * rng.randrange(2)
        try:
            calls = self.tools and rng.random() < 0.5
            answer = called(rng.randrange(99), self.words()) if calls else {"role": "assistant", "content": self.words()}
            ids = r.turn(messages, answer, ())
        except PromptError:
            ids = [*r.tokens.plain(self.words()), *self.close]
        if kind == "cut":
            return ids[:rng.randrange(1, len(ids) + 1)]
        if kind != "other":
            return ids
        longer = [k for k, i in enumerate(ids) if i not in r.tokens.control and len(r.tokenizer.decode([i])) > 1]
        if not longer:
            return ids
        at = rng.choice(longer)
        letters = [i for letter in r.tokenizer.decode([ids[at]]) for i in r.tokens.plain(letter)]
        return [*ids[:at], *letters, *ids[at + 1:]]

    def new_messages(self, kind: str, turn) -> list[dict]:
        calls, literals = [c for c in turn["calls"] if not c["error"]], self.literals if kind == "smuggled" else ()
        if calls and self.tools:
            return [{"role": "tool", "content": self.words(literals), "name": "add", "tool_call_id": c["id"]}
                    for c in calls[:self.r.config.env.max_parallel_calls]]
        return [{"role": "user", "content": self.words(literals)}]

    def conversation(self, kind: str, turns: int) -> None:
        r = self.r
        messages = [{"role": "user", "content": self.words()}]
        history, record_of, mask = r.first(messages), [], []
        mask += [False] * len(history)
        for _ in range(turns):
            ids = self.sampled(kind, messages)
            record_of += ids
            history, mask = np.concatenate([history, ids]).astype(np.int32), [*mask, *[True] * len(ids)]
            new = self.new_messages(kind, r.read(ids))
            added = r.extend(history, new)
            after = np.concatenate([history, added])
            mask += [False] * len(added)
            self.count["turns"] += 1
            self.count[kind] += 1
            self.count["not what was sampled"] += after[:len(history)].tolist() != history.tolist() or (
                after[np.array(mask)].tolist() != record_of)
            self.count["control token from a message"] += self.controls(added) != self.controls(
                r.extend(history, [{**m, "content": "x"} for m in new]))
            self.count["not the template's text"] += not self.spells(history, added, new)
            messages = [*messages, r.message(ids), *new]
            try:
                again = r.tokens.written(r.template.conversation(messages, True))
                self.count[f"{kind} broken"] += again[:len(history)] != history.tolist()
            except PromptError:
                self.count[f"{kind} broken"] += 1
            history = after

    def controls(self, ids) -> list[int]:
        return [int(i) for i in ids if int(i) in self.r.tokens.control]

    def spells(self, history, added, new) -> bool:
        """Whether what was added is, behind the turn's end, what the template writes for these messages as they are."""
        answer = {"role": "assistant", "content": "Hello."}
        if new[0]["role"] == "tool":
            answer = self.r.adapted(called(1, "", [m["tool_call_id"] for m in new]))
        text = self.r.template.conversation([QUESTION, answer, *new], True)
        close = self.r._suffixes.of(new).close
        behind = self.r.extend(np.concatenate([history, close]), new)
        return text.endswith(self.r.tokenizer.decode(behind)) and added[len(added) - len(behind):].tolist() == behind.tolist()


def called(a: int, note: str, ids=("ABCDEFGH1",)) -> dict:
    calls = [{"id": i, "type": "function", "function": {"name": "add", "arguments": {"a": a, "note": note}}} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000)
    args = parser.parse_args()
    found, began = templates(), time.time()
    base = trained([*found.values(), *[" ".join(WORDS)] * 50])
    players: dict[str, Player] = {}
    refused: dict[str, str] = {}
    for name, template in found.items():
        r, tools, why = opened(name, tokenizer_of(template, base))
        if why:
            refused[f"{name} (tools)" if r else name] = why
        if r:
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            players[name] = Player(r, tools, random.Random(seed))
    each = -(-args.turns // len(players))
    for player in players.values():
        while player.count["turns"] < each:
            kind = min(KINDS, key=lambda kind: player.count[kind])
            player.conversation(kind, min(player.rng.randrange(1, 7), each - player.count["turns"]))
    faults = ("not what was sampled", "not the template's text", "control token from a message")
    rows = [[name, (p.r.parser.name if p.tools else "-"), p.count["turns"], *[p.count[f] for f in faults],
             *[f"{p.count[k + ' broken']}/{p.count[k]}" for k in KINDS]] for name, p in players.items()]
    total = sum((p.count for p in players.values()), Counter())
    rows.append(["all", "", total["turns"], *[total[f] for f in faults],
                 *[f"{total[k + ' broken']}/{total[k]}" for k in KINDS]])
    table(["template", "calls", "turns", *faults, "anew: " + KINDS[0], *KINDS[1:]], rows)
    print()
    for name, why in refused.items():
        print(f"refused {name}: {why}")
    seconds = time.time() - began
    print(f"\n{len(players)} templates, {sum(p.tools for p in players.values())} with tools, {len(found) - len(players)} refused;"
          f" {seconds:.0f} s")
    record("chat_templates", {
        "wheels": WHEELS, "templates": len(found), "with_tools": sum(p.tools for p in players.values()),
        "totals": {key: total[key] for key in ("turns", *KINDS, *faults, *[f"{k} broken" for k in KINDS])},
        "by_template": {name: dict(p.count) for name, p in players.items()}, "refused": refused, "seconds": round(seconds, 1)})
    if any(total[f] for f in faults):
        sys.exit("FAILED")


if __name__ == "__main__":
    main()
