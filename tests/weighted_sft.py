"""A recipe of its own, as somebody else would write one: supervised fine-tuning on scored completions, each weighed by its row's score.

    python -m jaxrl.main --config=... --config.run.recipe=weighted_sft      with the row and the option that test_seams.py adds
"""

import numpy as np

from jaxrl import training
from jaxrl.recipes.algorithm import precision
from jaxrl.recipes.setup import derived, describe, host_scalars, open_run
from jaxrl.recipes.sft import demonstrations
from jaxrl.roles import Policy, check_finite
from jaxrl.session import Session
from jaxrl.spec import resolve


def run(config, given=None) -> dict:
    with Session(resolve(config), given) as s:
        job = open_run(s, with_engine=False)
        c = job.config
        policy = Policy(job, training.NextToken(**precision(job)), s.total_steps)
        s.restore(policy)
        s.introduce(describe(job), derived(c))
        s.begin()
        while s.goes_on():
            rows, cursor = job.stream.take(s.progress.cursor)
            examples = [example for _, example in rows]
            traj = demonstrations(examples, [position for position, _ in rows], loss_on_prompt=False)
            scores = np.array([float(example.columns["score"]) for example in examples]) ** c.user.sharpness
            weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
            weights["policy"] = weights["policy"] * traj.spread(scores)
            layout = training.make_layout(traj.sizes, job.row_shapes, share_prompts=False)
            with s.changing():
                metrics = policy.update(policy.put(training.pack(traj, m, {}, weights)) for m in layout.minibatches[0].microbatches)
                s.advance(cursor, samples=traj.num_trajectories)
            check_finite(policy.state, c.optimizer.max_nonfinite, s.run_dir)
            s.after_step(host_scalars(metrics) | {"score/mean": float(scores.mean())}, None, policy.export)
        return s.finish(None, policy.export)
