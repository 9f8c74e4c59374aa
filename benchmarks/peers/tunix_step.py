"""Tunix's GRPOLearner on a shape, with its own sampler and trainer.

    python benchmarks/peers/tunix_step.py --work FOLDER --steps 2 [--microbatch 32]

Its defaults, but for what the work fixes (fp32, no KL, token mean) and what would slow it down: the whole batch is sampled at once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from flax import nnx
from shapes import words
from transformers import AutoTokenizer
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout, vanilla_rollout


def reward(prompts, completions, **_):
    return [measure.reward(text) for text in completions]


class Rollout(vanilla_rollout.VanillaRollout):
    """Tunix's sampler; answers are cut to the lengths of the work (it decodes until the last one ends, as it would anyway), or
    they are the recorded ones."""

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, work, replay, clock, **_):
        config = rollout_actor.config
        super().__init__(rollout_actor, tokenizer, base_rollout.CacheConfig(
            cache_size=rollout_config.kv_cache_size, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim))
        self.work, self.replay, self.clock, self.sampled = work, replay, clock, []

    def generate(self, prompts, rollout_config, **kwargs):
        work = self.work
        with self.clock.part("generation"):
            if self.replay:
                tokens = work.answers
                given = np.stack([work.prompt_of(i) for i in range(len(prompts))])
                out = base_rollout.RolloutOutput([words(t) for t in tokens], None, tokens, given, None)
            else:
                out = super().generate(prompts, rollout_config, **kwargs)
                out.tokens = [t[:n] for t, n in zip(out.tokens, work.lengths, strict=True)]
                out.text = [" ".join(text.split()[:n]) for text, n in zip(out.text, work.lengths, strict=True)]
        self.sampled = out.tokens
        return out


def load(work, mesh):
    s = work.shape
    config = qwen2.ModelConfig(
        num_layers=s.layers, vocab_size=s.vocab, embed_dim=s.hidden, hidden_dim=s.intermediate, num_heads=s.heads,
        head_dim=s.hidden // s.heads, num_kv_heads=s.kv_heads, rope_theta=10000, norm_eps=1e-6, use_tied_embedding=True)
    return qwen2_params.create_model_from_safe_tensors(str(work.folder), config, mesh, dtype=jnp.float32)


def hf_arrays(model, work) -> dict[str, np.ndarray]:
    """The model's parameters by HF names and shapes: Tunix's own table of names, read backwards."""
    import re

    from safetensors import safe_open

    held = {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    table, out = qwen2_params._get_key_and_transform_mapping(model.config), {}
    with safe_open(work.folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            size = file.get_slice(name).get_shape()
            pattern, (key, turned) = next(item for item in table.items() if re.fullmatch(item[0], name))
            array = held[re.sub(pattern, key, name)]
            out[name] = array.reshape(size[::-1]).T if turned else array.reshape(size)
    return out


def main() -> None:
    args = measure.arguments()
    work, shape = args.work, args.work.shape
    gflops, clock = measure.jax_ceiling(), measure.Clock()
    group = max(shape.group, 2)  # Tunix wants groups; recorded answers bring their own prompts
    prompts = shape.sequences // group
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        model = load(work, mesh)
    matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    optimizer = optax.chain(optax.clip_by_global_norm(measure.CLIP_NORM), optax.adamw(
        args.lr, b2=0.999, eps=args.eps, weight_decay=measure.WEIGHT_DECAY, mask=matrices))
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        rollout_engine=functools.partial(Rollout, work=work, replay=args.replay, clock=clock),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=10**6, max_steps=1 + args.steps, mini_batch_size=prompts,
            train_micro_batch_size=max(args.microbatch // group, 1), rollout_micro_batch_size=prompts),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=shape.new_tokens, max_prompt_length=shape.prompt_tokens, temperature=1.0, top_p=1.0,
            kv_cache_size=shape.prompt_tokens + shape.new_tokens))
    tokenizer = AutoTokenizer.from_pretrained(work.folder / "tokenizer")
    cluster = rl_cluster.RLCluster(actor=model, reference=None, tokenizer=tokenizer, cluster_config=config)
    algorithm = GRPOConfig(num_generations=group, beta=0.0, epsilon=measure.CLIP_RATIO, loss_agg_mode="token-mean",
                           advantage_estimator="drgrpo" if args.unscaled else "grpo")
    learner = GRPOLearner(cluster, algorithm, reward_fns=reward)
    clock.wrap(cluster, "update_actor", "update")
    run_step = learner._run_global_step

    def step(*step_args):
        run_step(*step_args)
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        clock.step()

    learner._run_global_step = step
    texts = [words(work.prompts[i * group // shape.group]) for i in range(prompts)]
    assert tokenizer(texts[0]).input_ids == work.prompts[0].tolist()
    clock.start()
    learner.train([{"prompts": np.array(texts)}] * (1 + args.steps))
    work.check(cluster.rollout.sampled)
    if args.save:
        np.savez(args.save, **hf_arrays(cluster.actor_trainer.model, work))
    measure.report("tunix", args, clock, ("google-tunix", "jax", "flax"), gflops)


if __name__ == "__main__":
    main()
