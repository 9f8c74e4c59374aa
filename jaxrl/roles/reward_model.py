"""A reward model in reinforcement learning (reward.model.*): a sequence classifier whose score of a completion is one
more reward, the part `reward_model`. run.setup makes it, rl.rollouts and rl.evaluation call it.

It is a frozen role on the devices of mesh.roles.reward_model. It scores a batch once all completions are there, on
every process the same, so staleness does not change scores. It reads the sampled tokens if its tokenizer is the
policy's, else a text rendered for it. (recipes.reward_model trains one; LLM judges are in rewards.judge.)
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from jaxrl import data as jaxrl_data
from jaxrl import models, sharding, training
from jaxrl.config.lengths import episodes, longest_sequence, made_of
from jaxrl.data.chat_template import PromptError, Template
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.rewards.items import RewardResult, reward_metrics
from jaxrl.roles import parameters, towers
from jaxrl.roles.role import Role
from jaxrl.training.score import make_value_score

log = logging.getLogger("jaxrl")
PART, OVERLONG = "reward_model", "error: too long"


class RewardModelFiles(NamedTuple):
    """The description of a reward model, read before any device work.

    Attributes:
      source: folder or hub id. hf_config: its Hugging Face config. tokenizer: its own.
      tree: ValueModel, the table of its parameters.
      render: reward.model.render with "auto" replaced: "tokens", "text" or "chat".
    """

    source: str
    hf_config: dict
    tree: ValueModel
    tokenizer: object
    render: str


def read_reward_model(config, tokenizer, images=None) -> RewardModelFiles | None:
    """Reads description and tokenizer of reward.model.path; returns None if it is empty. tokenizer: the policy's.
    images: the ImageSource of a job whose rows hold images, which the reward model sees, too.

    Raises ConfigError if they cannot be read, if the weights are not a sequence classifier with one label, if
    completions cannot be expressed in its tokens, or if its positions end before the longest sequence."""
    o = config.reward.model
    if not o.path:
        return None
    try:
        source = parameters.source_of(o.path)
        hf_config = towers.read_tower_config(source, o.revision, images, weights=False)
        table = models.build(hf_config, compute_dtype="float32", scan_layers=True)
        tree = ValueModel(table, name=o.head, bias=False)
        hf.check_critic(tree, source, o.revision, scores=True)
        own = jaxrl_data.load_tokenizer(SimpleNamespace(model=SimpleNamespace(
            path=o.path, revision=o.revision, tokenizer="", tokenizer_revision=None, chat_template="", pad_token="",
            eos_tokens=(), trust_remote_code=config.model.trust_remote_code)), "reward.model.path")
    except ConfigError as e:
        raise hf.error_of("reward.model.path", o.path, e) from None
    render, why = o.render, ""
    if render == "auto":
        render = "tokens" if own.get_vocab() == tokenizer.get_vocab() else "chat" if own.chat_template else "text"
    if render == "tokens" and own.get_vocab() != tokenizer.get_vocab():
        why = "its tokenizer is not the policy's; set text or chat"
    elif render == "chat" and not own.chat_template:
        why = "its tokenizer has no chat template; set text"
    elif render != "tokens" and episodes(config):
        why = "episodes can only be scored by their sampled tokens; use a reward model with the policy's tokenizer"
    elif render != "tokens" and images is not None:
        why = ("completions on images can only be scored by their tokens; use a reward model with the policy's "
               "tokenizer")
    elif len(own) > table.config.vocab_size:
        why = f"its tokenizer has {len(own)} entries, its vocab_size is {table.config.vocab_size}"
    if why:
        raise ConfigError(f"reward.model.path={o.path!r}, reward.model.render={render}: {why}")
    try:
        table.check_length(longest_scored(config, render))
    except ConfigError as e:
        raise ConfigError(f"reward.model.path={o.path!r}: {e}") from None
    return RewardModelFiles(source, hf_config, tree, own, render)


def longest_scored(config, render: str) -> int:
    """Returns the most tokens of a sequence that the reward model reads.

    It is reward.model.max_sequence_tokens, or else the longest sequence of a run; twice that for text rendered for it.

    render: "tokens", "text" or "chat"."""
    return config.reward.model.max_sequence_tokens or (1 if render == "tokens" else 2) * longest_sequence(config)


class RewardModel(Role):
    """The reward model of a job, loaded on its devices.

    Args:
      job: run.setup.Job, with room for images in its rows.
      read: its description (read_reward_model).
      patches: most of the images of a sequence.
    """

    def __init__(self, job, read: RewardModelFiles, patches: int = 0):
        super().__init__(PART, job)
        c, o = job.config, job.config.reward.model
        scan, compute = c.model.scan_layers == "true", job.compute_dtype
        self.model = models.build(read.hf_config, compute_dtype=compute, scan_layers=scan, attention=c.model.attention,
                                  ring=c.model.ring_attention)
        self.tree = ValueModel(self.model, name=o.head, bias=False)
        self.weight, self.most_failed, self.share = o.weight, c.reward.max_failed_fraction, c.train.share_prompts
        self.tokens = Tokens() if read.render == "tokens" else Rendering(c, read.tokenizer, read.render)
        self._score = make_value_score(self.model, put=self.put)
        self.longest = longest_scored(c, read.render)
        by = f"reward.model.max_sequence_tokens={o.max_sequence_tokens}" if o.max_sequence_tokens else made_of(c)
        if beyond := self.model.config.beyond(self.longest, by):
            log.warning("reward.model.path=%r: %s", o.path, beyond)
        tokens = c.train.score_tokens_per_microbatch or c.train.tokens_per_microbatch
        mesh, windows = job.mesh_of(PART), [layer.window for layer in self.model.config.layers]
        self.shapes = training.row_shapes((), self.longest + 1, tokens, sharding.data_shards(mesh), c.train.row_counts,
                                          mesh.shape["cp"], windows, bool(self.model.config.num_recurrent))
        self.shapes = towers.with_room(self.shapes, job, patches)
        with self.on():
            where = parameters.param_shardings(job, tree=self.tree, role=PART)
            self.state = hf.load_critic(self.tree, read.source, o.revision, where, parameters.DTYPES[o.dtype])
        self.rest()

    def add_scores(self, traj, examples, texts, result: RewardResult | None) -> RewardResult | None:
        """Adds the part `reward_model` with its weight: the score after the last token of each trajectory. Collective.

        Of several sequences of a trajectory it reads the last. A sequence without tokens or of more than
        `longest_scored` has no score, nor has one whose score is not finite: NaN in the part, and counted as a failure.

        Args:
          traj: N trajectories. examples, texts: row and completion text of each.
          result: RewardResult of the reward functions; None (after a stop) is returned as None.

        Returns:
          A new RewardResult (`add_part`); its totals are sums, not divided by the weights.

        Raises:
          RunStopped: more than reward.max_failed_fraction of the completions have no score, or a prompt cannot be
            rendered."""
        if result is None:
            return None
        prompts, completions, prefixes = self.tokens(traj, examples, texts)
        sizes = np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
        fits, values = np.flatnonzero((sizes > 0) & (sizes <= self.longest)), np.full(len(sizes), np.nan)
        if len(fits):
            last = [*(traj.first[1:] - 1), traj.num_sequences - 1]
            own = training.scored_behind([prompts[i] for i in fits], [completions[i] for i in fits], traj.group[fits],
                                         prefixes=prefixes[fits],
                                         pictures=traj.pictures and traj.pictures.select([last[i] for i in fits]))
            layout = training.make_layout(own.sizes, self.shapes, share_prompts=self.share)
            values[fits] = self.score(own, layout)[own.loss_mask]
            self.rest()
        fine = np.isfinite(values)
        why = np.where(sizes <= self.longest, "nan", OVERLONG)
        outcomes = np.where(fine, "ok", why).tolist()
        if (~fine).mean() > self.most_failed:
            raise RunStopped(f"reward.model: {(~fine).sum()} of {len(fine)} completions have no score, more than "
                             f"reward.max_failed_fraction={self.most_failed:g} allows; the longest sequence has "
                             f"{sizes.max()} tokens, reward.model.max_sequence_tokens={self.longest}")
        return add_part(result, np.where(fine, values, np.nan), outcomes, self.weight)


def add_part(result: RewardResult, values, outcomes, weight: float) -> RewardResult:
    """Returns the result with the part `reward_model`: its total plus weight * values.

    A missing summand counts as 0; a total is NaN if both are missing. Metrics are computed again.

    Args:
      values: [N] float, NaN = absent. outcomes: [N], "ok" or a reason. weight: reward.model.weight.
    """
    known = np.isfinite(values)
    has = known | np.isfinite(result.total)
    total = np.where(has, weight * np.where(known, values, 0.0) + np.nan_to_num(result.total), np.nan)
    merged = [a | {PART: b} for a, b in zip(result.outcomes, outcomes, strict=True)]
    return RewardResult(total, result.parts | {PART: values}, merged, result.item_metrics,
                        reward_metrics(total, merged, result.item_metrics), result.by)


class Tokens:
    """Passes the sampled tokens on as they are, for a reward model with the policy's tokenizer."""

    def __call__(self, traj, examples, texts):
        """Returns ([prompt ids], [ids after them], [N] prefixes: equal values mean equal prompts)."""
        last = [*(traj.first[1:] - 1), traj.num_sequences - 1]
        whole = [traj.tokens[traj.offsets[q]:traj.offsets[q + 1]] for q in last]
        split = [np.split(ids, [traj.prompt_lengths[q]]) for q, ids in zip(last, whole, strict=True)]
        return [p for p, _ in split], [c for _, c in split], traj.prefix[last]


class Rendering:
    """Renders the row's prompt and the completion in the tokens of the reward model.

    kind="text": the prompt as a run with that tokenizer would render it, the completion, and an end token if the
    completion finished. kind="chat": the chat template's rendering of the conversation with the completion in it.

    Args:
      config: the run's. tokenizer: the reward model's. kind: "text" or "chat".
    """

    def __init__(self, config, tokenizer, kind: str):
        self.template, self.kind, self.prefix = Template(config, tokenizer), kind, config.data.response_prefix
        end = jaxrl_data.end_of_turn(config, tokenizer)
        end = tokenizer.eos_token_id if end is None else end
        self.end = [] if end is None else [end]

    def __call__(self, traj, examples, texts):
        """Returns the same as Tokens. Raises RunStopped if a prompt cannot be rendered."""
        try:
            return self._rendered(traj, examples, texts)
        except PromptError as e:
            raise RunStopped(f"reward.model: a prompt cannot be rendered for it: {e}") from None

    def _rendered(self, traj, examples, texts):
        if self.kind == "chat":
            replies = [{"role": "assistant", "content": self.prefix + text} for text in texts]
            chats = [[*messages(e.prompt), reply] for e, reply in zip(examples, replies, strict=True)]
            ids = self.template.encode([self.template.conversation(chat, False) for chat in chats])
            return [ids[0][:0]] * len(ids), ids, np.arange(len(ids))
        prompts = self.template.encode_prompts([self.template.render(e.prompt) for e in examples])
        ended = [self.end if finish == 0 else [] for finish in traj.finish]
        completions = [ids + end for ids, end in zip(self.template.encode(list(texts)), ended, strict=True)]
        return prompts, completions, traj.group


def messages(prompt) -> list[dict]:
    """Returns a prompt as chat messages: a text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
