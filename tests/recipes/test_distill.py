"""Distillation's pieces: rows, batches, what the loss reads, files of a teacher, vocabularies, and which configs make sense."""

import dataclasses
import functools
from types import SimpleNamespace

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training_helpers import HF, batch_of_groups, params_of
from safetensors.numpy import load_file, save_file

from jaxrl import models, training
from jaxrl.config.load import default_config, put
from jaxrl.config.registry import sequences
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.recipes.distill import MixedRows, join_batches, lay_out, step_metrics
from jaxrl.resolve.checks import common as config_checks
from jaxrl.roles import teacher_files, teachers
from jaxrl.rollout.vllm.scoring import PromptScorer, parse_scores
from jaxrl.training import Distillation
from jaxrl.training.layout import RowShapes
from jaxrl.training.update import loss_and_metrics


def config(**options):
    c = default_config()
    c.run.recipe, c.model.init, c.model.tokenizer, c.data.path = "distill", "random", "jaxrl://arith/tokenizer", ("some.jsonl",)
    c.model.config.update({"model_type": "qwen2"})
    c.teacher.path = "teacher"
    for name, value in options.items():
        put(c, name.replace("__", "."), value)
    return c


# ---- rows


class Stream:
    """The rows of a stream that holds their numbers."""

    end = 1000
    unless_interrupted = staticmethod(lambda items: items)

    def __init__(self, size):
        self.size = size

    def take(self, cursor, count=0):
        return [(p, f"row {p}") for p in range(cursor, cursor + (count or self.size))], cursor + (count or self.size)


@pytest.mark.parametrize("on_policy, size", [(0.5, 4), (0.25, 8), (0.75, 4), (1.0, 3), (0.0, 5), (0.3, 10)])
def test_on_policy_rows_and_the_others_are_each_row_once(on_policy, size):
    """Every step has its share of them; what the student answers comes as a stream of its own, numbered from 0."""
    rows, number, cursor, seen = MixedRows(Stream(size), config(distill__on_policy=on_policy, data__prompts_per_step=size)), 0, 0, []
    for _ in range(7):
        given, after = rows.step(cursor)
        count = rows.count_before(after) - rows.count_before(cursor)
        assert count == round(on_policy * size) and number == rows.count_before(cursor)
        drawn, number = rows.take(number, count) if count else ([], number)
        assert [k for k, _ in drawn] == list(range(number - count, number))
        seen += [example for _, example in (*given, *drawn)]
        cursor = after
    assert sorted(seen) == sorted(f"row {p}" for p in range(7 * size))


def test_a_share_that_is_no_number_of_rows_is_refused():
    with pytest.raises(ConfigError, match=r"distill.on_policy=0.3 of data.prompts_per_step=16 is 4.8 prompts"):
        config_checks.check(config(distill__on_policy=0.3, distill__loss="forward", data__prompts_per_step=16))


def test_sequences_of_a_step_are_counted():
    assert sequences(config(distill__on_policy=0.25, data__prompts_per_step=8, rollout__group_size=4)) == 2 * 4 + 6
    assert sequences(config(distill__on_policy=1.0, data__prompts_per_step=8, rollout__group_size=4)) == 32


def test_a_batch_of_both_kinds_keeps_every_sequence():
    (a, _), (b, _) = batch_of_groups(groups=2, size=3), batch_of_groups(groups=4, size=1, seed=1)
    both = join_batches([a, b], on_prompt=False)
    assert both.num_trajectories == 10 and len(np.unique(both.group)) == 6
    for whole, part, first in ((both, a, 0), (both, b, 6)):
        for i in range(part.num_trajectories):
            mine, theirs = (slice(*t.offsets[j:j + 2]) for t, j in ((whole, first + i), (part, i)))
            for name in ("tokens", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(getattr(whole, name)[mine], getattr(part, name)[theirs])
    scored = join_batches([a, b], on_prompt=True)
    assert scored.total().tolist() == (both.lengths - 1).tolist() and not scored.loss_mask[scored.offsets[:-1]].any()


@pytest.mark.parametrize("on_prompt", [False, True])
def test_prompts_in_the_loss_are_neither_shared_nor_counted_as_shared(on_prompt):
    """Scoring has the update's layout where its rows have the same shapes, also those of another object."""
    c = config(distill__on_prompt=on_prompt, algorithm__num_minibatches=1, algorithm__ppo_epochs=1)
    traj, _ = batch_of_groups(groups=2, size=3)
    shapes = RowShapes((64,), ((8,),))
    layout, of_scoring = lay_out(c, SimpleNamespace(row_shapes=shapes, score_shapes=dataclasses.replace(shapes)), traj, 0)
    assert of_scoring is layout
    blocks = [block for m in layout.minibatches[0].microbatches for row in m.rows for block in row]
    assert len(blocks) == (6 if on_prompt else 2)
    counted = []
    operations = SimpleNamespace(update=lambda traj, shared: float(counted.append(shared) or 1))
    parts = SimpleNamespace(s=SimpleNamespace(spec=c), speed=SimpleNamespace(operations=operations))
    step_metrics(parts, None, traj, layout, {}, None)
    assert counted == [not on_prompt]


# ---- what the loss reads


def _packed(columns, traj, weights):
    layout = training.make_layout(traj.sizes, RowShapes((64,), ((8,),)), num_minibatches=1)
    (micro,) = layout.minibatches[0].microbatches
    return training.pack(traj, micro, columns, weights), layout


def _gradient(objective, model, params, batch):
    trainable, frozen = training.partition(params, (".*",), ("^teacher/",) if "teacher" in params else ())
    (loss, metrics), grads = jax.jit(jax.value_and_grad(
        lambda t: loss_and_metrics(t, frozen, batch, model, objective), has_aux=True))(trainable)
    return loss, metrics, grads


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("forward", marks=pytest.mark.nightly), pytest.param("reverse", marks=pytest.mark.nightly), "jsd"])
def test_the_whole_vocabulary_and_all_its_tokens_are_the_same_loss(kind):
    """A teacher of another size, over hidden states and heads, and as log-probs at all 61 tokens: loss and gradient agree, with
    temperatures of both sides. A teacher that is the student has no gradient."""
    (traj, _) = batch_of_groups(groups=2, size=3)
    model, other = (models.build(h, compute_dtype=jnp.float32, scan_layers=False) for h in (HF | {"num_hidden_layers": 1}, HF_OTHER))
    params, theirs = params_of(model), jax.tree.map(lambda x: 3 * x, params_of(other, seed=1))
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    _, layout = _packed({}, traj, weights)
    options = {"temperature": 1.3, "chunk": 8, "put": lambda x: x}
    hidden = training.make_reader(other, hidden=True, **options)(theirs, traj, layout)["hidden"]
    found = training.make_reader(other, top=61, **options)(theirs, traj, layout)
    common = dict(kind=kind, beta=0.3, coef=0.7, temperature=0.8, teacher_temperature=1.3, chunk=8)
    whole = Distillation(teacher=other, vocab=61, **common)
    assert whole.columns == ("teacher_hidden",) and whole.weights == ("policy", "token")
    of_head = {"teacher": {"head": theirs["head"]}}
    a = _gradient(whole, model, params | of_head, _packed({"teacher_hidden": hidden}, traj, weights)[0])
    columns = {"teacher_ids": found["ids"], "teacher_logprobs": found["logprobs"]}
    b = _gradient(Distillation(tail=True, **common), model, params, _packed(columns, traj, weights)[0])
    np.testing.assert_allclose(a[0], b[0], rtol=1e-4)
    np.testing.assert_allclose(a[1]["distill/divergence"], b[1]["distill/divergence"], rtol=1e-4)
    np.testing.assert_allclose(b[1]["distill/teacher_mass"], 1, rtol=1e-5)
    assert a[0] > 0.01 and set(a[2]) == set(b[2])
    for name, grad in a[2].items():
        np.testing.assert_allclose(grad, b[2][name], atol=2e-5 * max(1, float(np.abs(grad).max())))
    own = training.make_reader(model, hidden=True, **options)(params, traj, layout)["hidden"]
    same = dataclasses.replace(whole, teacher=model, teacher_temperature=0.8)
    *_, grads = _gradient(same, model, params | {"teacher": {"embed": params["embed"]}},
                          _packed({"teacher_hidden": own}, traj, weights)[0])
    assert max(float(np.abs(g).max()) for g in grads.values()) < 1e-6


HF_OTHER = {"model_type": "qwen2", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": False}


@pytest.mark.slow
def test_a_share_of_the_loss_is_the_completions_own():
    """ce: (1 - ce) x divergence + ce x mean negative log-likelihood over the demonstrations alone."""
    (traj, _) = batch_of_groups(groups=4, size=1)
    model = models.build(HF | {"num_hidden_layers": 1}, compute_dtype=jnp.float32, scan_layers=False)
    params = params_of(model)
    rows = np.array([False, True, False, True])
    weights = training.loss_weights(traj, np.arange(4), "token_mean", positive=rows)
    found = training.make_reader(model, temperature=1.0, chunk=8, put=lambda x: x, top=3)(
        jax.tree.map(lambda x: 1.5 * x, params), traj, _packed({}, traj, weights)[1])
    columns = {"teacher_ids": found["ids"], "teacher_logprobs": found["logprobs"]}
    batch = _packed(columns, traj, weights)[0]
    plain, mixed = (_gradient(Distillation(kind="forward", ce=ce, chunk=8), model, params, batch) for ce in (0.0, 0.25))
    logp = training.make_score(model, temperature=1.0, chunk=8, put=lambda x: x)(params, traj, _packed({}, traj, weights)[1])
    nll = -logp[traj.loss_mask & traj.spread(rows)].mean()
    np.testing.assert_allclose(mixed[0], 0.75 * plain[0] + 0.25 * nll, rtol=1e-5)
    np.testing.assert_allclose(mixed[1]["distill/nll"], nll, rtol=1e-5)


# ---- teachers


def _said(traj, top=4, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(50)[:top] for _ in traj.tokens]).astype(np.int32)
    return ids, np.log(np.sort(rng.dirichlet(np.ones(top + 1), len(traj.tokens)))[:, ::-1][:, :top]).astype(np.float32)


def _options(**changes):
    return SimpleNamespace(**{"top_k": 4, "teacher_temperature": 1.0} | changes)


def test_files_give_back_what_was_written_whatever_the_order(tmp_path):
    traj, _ = batch_of_groups(groups=6, size=1)
    ids, logprobs = _said(traj)
    about = {"vocabulary": "v", "temperature": 1.0, "teacher": "t"}
    teacher_files.write(tmp_path, "a", traj, ids, logprobs, **about)
    other, _ = batch_of_groups(groups=3, size=1, seed=1)
    teacher_files.write(tmp_path, "b", other, *_said(other), **about)
    assert {p.name for p in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors"}
    files = teacher_files.TeacherFiles(str(tmp_path), "v", _options(top_k=3))
    for batch, said in ((traj, (ids, logprobs)), (other, _said(other))):
        found = files.columns(batch)
        mask = batch.loss_mask
        np.testing.assert_array_equal(found["teacher_ids"][mask], said[0][mask][:, :3])
        np.testing.assert_array_equal(found["teacher_logprobs"][mask], said[1][mask][:, :3])
        assert (found["teacher_ids"][~mask] == -1).all() and found["teacher_ids"].dtype == np.int32
    changed = dataclasses.replace(traj, **{"tokens": traj.tokens + (np.arange(len(traj.tokens)) == 0)})
    with pytest.raises(ConfigError, match="1 of this step's 6 rows are missing"):
        files.columns(changed)
    files.close()


def test_files_of_another_teacher_are_refused(tmp_path):
    """Another vocabulary or temperature, fewer tokens, half a file, none."""
    traj, _ = batch_of_groups(groups=2, size=1)
    teacher_files.write(tmp_path, "a", traj, *_said(traj), vocabulary="v", temperature=1.0, teacher="t")
    with pytest.raises(ConfigError, match="another vocabulary"):
        teacher_files.TeacherFiles(str(tmp_path), "w", _options())
    with pytest.raises(ConfigError, match=r"at temperature 1.0, not distill.teacher_temperature=2.0"):
        teacher_files.TeacherFiles(str(tmp_path), "v", _options(teacher_temperature=2.0))
    with pytest.raises(ConfigError, match=r"distill.top_k=5: a.safetensors .* holds 4"):
        teacher_files.TeacherFiles(str(tmp_path), "v", _options(top_k=5))
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(ConfigError, match="a.safetensors is damaged"):
        teacher_files.TeacherFiles(str(tmp_path), "v", _options())
    (tmp_path / "a.safetensors").write_bytes(content)
    save_file({"x": np.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match="b.safetensors is not what teacher.save writes"):
        teacher_files.TeacherFiles(str(tmp_path), "v", _options())
    assert load_file(tmp_path / "a.safetensors")["keys"].shape == (2, 16)
    with pytest.raises(ConfigError, match="no files there"):
        teacher_files.TeacherFiles(str(tmp_path / "nowhere"), "v", _options())


def test_a_key_tells_tokens_and_scored_places_apart():
    tokens, mask = np.arange(9, dtype=np.int32), np.arange(9) > 4
    keys = {teacher_files.key(tokens, mask), teacher_files.key(tokens, np.arange(9) > 3), teacher_files.key(tokens[::-1], mask)}
    assert len(keys) == 3 and teacher_files.key(tokens.astype(np.int64), mask) in keys


class Words:
    def __init__(self, **ids):
        self.get_vocab = lambda: ids


def test_a_teacher_with_other_tokens_is_refused_with_the_remedy():
    teachers.check_vocabulary(Words(a=0, b=1), Words(b=1, a=0), "t")
    with pytest.raises(ConfigError, match=r"1 tokens have other ids and 0 are in one of them alone \('b' is 1 here and 2 there\).*run.recipe=sft"):
        teachers.check_vocabulary(Words(a=0, b=1), Words(a=0, b=2), "t")
    with pytest.raises(ConfigError, match=r"0 tokens have other ids and 1 are in one of them alone \('c' is in one"):
        teachers.check_vocabulary(Words(a=0, b=1), Words(a=0, b=1, c=2), "t")


def test_a_server_s_reply_is_read_by_token_and_rank():
    said = [None, {"7": {"logprob": -0.5, "rank": 1}, "3": {"logprob": -2.0, "rank": 9}, "5": {"logprob": -1.0, "rank": 2}}]
    found = parse_scores([4, 3], said, 2)
    assert found.own.tolist() == [0.0, -2.0] and found.ids.tolist() == [[-1, -1], [7, 5]]
    assert found.logprobs.tolist() == [[0, 0], [-0.5, -1.0]]
    with pytest.raises(ValueError, match="2 log-probs for 3 tokens"):
        parse_scores([4, 3, 1], said, 2)


@pytest.mark.parametrize("reply", [{"choices": [{"prompt_logprobs": None}]}, {"choices": [{"prompt_logprobs": [None, 3]}]}, [], {}])
def test_a_server_whose_replies_cannot_be_read_stops_the_run(monkeypatch, reply):
    def answer(request):
        known = {"data": [{"id": "m", "max_model_len": 9}]}
        return httpx.Response(200, json=known if request.url.path == "/v1/models" else reply)

    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=httpx.MockTransport(answer)))
    scorer = PromptScorer(("http://teacher",), 9.0, 8)
    with pytest.raises(RunStopped, match="'http://teacher' failed 4 times"):
        scorer.score([[4, 3]], 2)
    scorer.close()


# ---- configs


@pytest.mark.parametrize("options, said", [
    ({}, None),
    ({"distill__loss": "jsd", "distill__beta": 0.1, "distill__top_k": 8, "distill__tail": False}, None),
    ({"distill__loss": "forward", "distill__on_policy": 0.5, "distill__ce": 0.5, "distill__on_prompt": True}, None),
    ({"distill__gamma": 0.9, "distill__coef": 2.0, "algorithm__policy_loss": "pg"}, None),
    ({"distill__top_k": 8}, "distill.top_k=8 has no effect with distill.loss=sampled"),
    ({"distill__temperature": 2.0}, "distill.temperature=2.0 has no effect with distill.loss=sampled"),
    ({"distill__on_prompt": True}, "distill.on_prompt=True has no effect with distill.loss=sampled"),
    ({"distill__loss": "forward", "distill__gamma": 0.5}, "distill.gamma=0.5 has no effect with distill.loss=forward"),
    ({"distill__loss": "forward", "distill__beta": 0.3}, "distill.beta=0.3 has no effect"),
    ({"distill__loss": "jsd", "distill__beta": 1.0}, "distill.beta=1.0: must lie between 0 and 1"),
    ({"distill__loss": "forward", "distill__tail": False}, "distill.tail=False has no effect with distill.top_k=0"),
    ({"distill__loss": "reverse", "distill__ce": 0.5}, "distill.ce=0.5 has no effect with distill.on_policy=1"),
    ({"distill__on_policy": 0.5}, "distill.on_policy=0.5 with distill.loss=sampled"),
    ({"distill__loss": "forward", "distill__on_policy": 0.5, "rollout__max_staleness": 1}, "rollout.max_staleness=1 with distill.on_policy=0.5"),
    ({"teacher__path": ""}, "teacher.path is empty: name the teacher's folder"),
    ({"teacher__servers": ("http://a:1",), "teacher__path": ""}, "its tokenizer is compared"),
    ({"teacher__servers": ("http://a:1",), "distill__loss": "reverse"}, "distill.loss=reverse, distill.top_k=0 with teacher.servers"),
    ({"teacher__servers": ("a:1",)}, "teacher.servers entry 'a:1': expected http"),
    ({"teacher__servers": ("http://a:1",), "teacher__dtype": "fp32"}, "teacher.dtype='fp32' has no effect with teacher.servers=('http://a:1',)"),
    ({"teacher__servers": ("http://a:1",), "distill__teacher_temperature": 2.0}, "distill.teacher_temperature=2.0 with teacher.servers"),
    ({"teacher__timeout_seconds": 5.0}, "teacher.timeout_seconds=5.0 has no effect without teacher.servers"),
    ({"teacher__files": "f", "teacher__path": ""}, "teacher.files='f': files hold the teacher's most probable tokens"),
    ({"teacher__save": "f", "distill__loss": "forward", "distill__top_k": 4}, "teacher.save='f': files hold"),
    ({"teacher__files": "f"}, "teacher.files='f' beside teacher.path"),
    ({"algorithm__preset": "dapo"}, "algorithm.preset=dapo: it says what is made of rewards"),
    ({"algorithm__kl__coef": 0.1}, "algorithm.kl.coef=0.1 has no effect with run.recipe=distill; set run.recipe=rl"),
    ({"algorithm__clip_low": 0.1, "distill__loss": "reverse"}, "clip_low=0.1 has no effect with distill.loss=reverse; set distill.loss=sampled"),
    ({"algorithm__num_minibatches": 3}, "algorithm.num_minibatches=3"),
    ({"critic__coef": 0.1}, "critic.coef=0.1 has no effect with run.recipe=distill"),
    ({"mesh__roles": {"reference": {"rest": "host"}}}, "mesh.roles.reference: run.recipe=distill has no reference"),
    ({"mesh__roles": {"teacher": {"rest": "host"}}, "teacher__servers": ("http://a:1",)}, "mesh.roles.teacher: the teacher is in teacher.servers"),
    ({"mesh__roles": {"teacher": {"rest": "host"}}}, None),
    ({"data__pass_rate_min": 0.2}, "data.pass_rate_min=0.2 has no effect with run.recipe=distill; set run.recipe=rl"),
    ({"train__loss_on_prompt": True}, "train.loss_on_prompt=True has no effect with run.recipe=distill"),
    ({"reward__functions": (), "eval__sets": ("test=x.jsonl",)}, "nothing says which answers to eval.sets are right"),
    ({"reward__functions": ()}, None),
    ({"run__recipe": "rl", "teacher__path": "x", "distill__coef": 2.0}, "teacher.path='x' has no effect with run.recipe=rl; set run.recipe=distill"),
])
def test_options_that_do_nothing_together_are_refused(options, said):
    if said is None:
        config_checks.check(config(**options))
        return
    with pytest.raises(ConfigError) as e:
        config_checks.check(config(**options))
    assert said in str(e.value)
