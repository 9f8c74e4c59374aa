"""data.sources: several data sets by weight and by step, each with an order, a place and options of its own."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny_job
from helpers.algorithm_runs import decided
from helpers.algorithm_steps import config as algorithm_config
from helpers.algorithm_steps import trajectories
from helpers.data_cases import TEMPLATE, make_config, make_tokenizer, questions, write_jsonl
from helpers.run_tools import fingerprint

import jaxrl
from jaxrl.checkpoint.resume import config_changes
from jaxrl.config.load import put, redacted
from jaxrl.data import DataError, Stream, check_paths, load_tokenizer, load_train
from jaxrl.data.mixing import Mix, shares, weight_at
from jaxrl.data.stream import _warn_of_weights
from jaxrl.errors import ConfigError
from jaxrl.records.files import Record
from jaxrl.resolve.checks.common import check
from jaxrl.rewards import RewardItem, RewardPool
from jaxrl.rewards.items import RewardResult
from jaxrl.rl.advantages import advantages, advantages_by_source
from jaxrl.rl.evaluation import accurate
from jaxrl.rl.metrics import accuracy_rewards
from jaxrl.rl.recording import batch_arrays, batch_header, restore_batch
from jaxrl.rl.rollouts import Batch, pass_rates
from jaxrl.rl.step import make_loss_weigher
from jaxrl.telemetry.run_dir import jsonable


def counts(mix, positions, sources):
    """[positions + 1, sources] rows given before each position, after checking that each source's come in turn."""
    out = np.zeros((positions + 1, sources))
    for p in range(positions):
        k, before = mix.place(p)
        assert before == out[p, k]
        out[p + 1] = out[p]
        out[p + 1, k] += 1
    return out


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_shares_are_kept_within_a_row_of_any_beginning_and_one_percent_of_any_50_steps(seed):
    """Tijdeman's bound, 1 - 1 / (2 K - 2), for weights of all kinds; so any 50 steps of 4 rows or more are within 1 %."""
    rng = random.Random(seed)
    k = rng.randrange(2, 9)
    weights = [rng.choice([rng.random() + 1e-3, rng.randrange(1, 50), 0.01, 1]) for _ in range(k)]
    given = counts(Mix(weights, 4, [1] * k), 2500, k)
    wanted = np.outer(np.arange(2501), weights) / sum(weights)
    assert np.abs(given - wanted).max() <= 1 - 1 / (2 * k - 2) + 2500e-6  # weights that are no fractions: millionths
    off = (given[200:] - given[:-200]) / 200 - np.array(weights) / sum(weights)
    assert np.abs(off).max() <= 0.01
    one = counts(Mix([weights[0]], 4, [1]), 20, 1)
    assert one[:, 0].tolist() == list(range(21))


@pytest.mark.parametrize("per_step", [4, 32])
def test_shares_follow_a_schedule(per_step):
    """Over any 50 steps the shares are the schedule's mean over them, within 1 %, and afterwards its last weights."""
    weights = [((0, 0.9), (100, 0.1), (160, 0.5)), ((0, 0.1), (100, 0.9), (160, 0.5)), 0.2]
    given = counts(Mix(weights, per_step, [1] * 3), 300 * per_step, 3)[::per_step]
    by_step = np.array([[weight_at(w, step) for w in weights] for step in range(300)])
    wanted = np.cumsum(by_step / by_step.sum(1, keepdims=True), 0)
    wanted = np.vstack([np.zeros(3), wanted]) * per_step
    off = ((given - wanted)[50:] - (given - wanted)[:-50]) / (50 * per_step)
    assert np.abs(off).max() <= 0.01
    assert by_step[100].tolist() == [0.1, 0.9, 0.2] and by_step[50][0] == pytest.approx(0.5)


def test_a_position_alone_tells_source_and_row():
    """A billion positions on, in any order, and from a new object: as one that walked there."""
    weights = [((0, 1.0), (40, 0.25)), 0.5, 1]
    walked = Mix(weights, 8, [1] * 3)
    whole = [walked.place(p) for p in range(2000)]
    jumping = Mix(weights, 8, [1] * 3)
    for p in (1999, 3, 700, 319, 320, 321, 0, 1500):
        assert jumping.place(p) == whole[p]
        assert jumping.rows_before(p) == [sum(k == j for k, _ in whole[:p]) for j in range(3)]
    far = Mix([2, 1], 8, [1] * 2)
    assert far.place(3 * 10**9) == (0, 2 * 10**9) and far.rows_before(3 * 10**9) == [2 * 10**9, 10**9]


def test_shares_are_small_integers_or_millionths():
    assert shares([0.75, 0.25]) == [3, 1] and shares([1, 1, 1]) == [1, 1, 1] and shares([0, 0]) == []
    assert shares([2.0, 0]) == [1, 0]
    found = shares([0.123456789, 0.2, 0.3])
    assert sum(found) == 10**6 and found[1] == round(0.2 / 0.623456789 * 10**6)


@pytest.mark.parametrize("weights", [[3, 1, 1], [((0, 3), (6, 1)), 1, ((0, 0.5), (4, 1))]])
def test_what_happens_when_a_source_has_given_all(weights):
    limits = [7, 2, 20]
    others = Mix(weights, 2, limits, "others")
    assert others.end == 29 and others.rows_before(29) == limits  # every row, once
    given = counts(others, 29, 3)
    first = [int(np.flatnonzero(given[:, k] == n)[0]) for k, n in enumerate(limits)]
    untouched = counts(Mix(weights, 2, limits), 60, 3)
    assert np.array_equal(given[:min(first)], untouched[:min(first)])
    with pytest.raises(IndexError):
        others.place(29)
    stop = Mix(weights, 2, limits, "stop")
    n = stop.end
    assert np.array_equal(counts(stop, n, 3), untouched[:n + 1])
    assert (untouched[n] <= limits).all() and (untouched[n + 1] > limits).any()  # where one would be asked for more
    assert Mix(weights, 2, limits).end is None


def test_sources_that_are_left_without_weight_are_served_or_named(caplog):
    """With the weights of the next step that has any; rows that never get weight end the order, with a warning."""
    late = ((0, 0), (5, 0), (10, 1))
    for weights, limits in (((1.0, late), [15, 1000]), ((late, 1.0), [1000, 15])):
        mix = Mix(weights, 4, limits, "others")
        assert mix.end == 1015 and mix.unserved() == [0, 0] and mix.early == (3, 6)
        assert [mix.place(p) for p in range(15, 20)] == [(limits.index(1000), n) for n in range(5)]
        assert counts(mix, 15, 2)[-1][limits.index(15)] == 15
    for gone in (((0, 1), (5, 0)), ((0, 1), (5, 0), (9, 0))):
        mix = Mix((gone, 1.0), 4, [1000, 8], "others")
        assert mix.end == 20 and mix.unserved() == [1000 - 12, 0] and mix.early is None
    _warn_of_weights(mix, ["a", "b"], "others")
    assert "data.sources.a: 988 of its rows never come" in caplog.text and "data.sources.b" not in caplog.text
    _warn_of_weights(Mix((1.0, late), 4, [15, 1000], "others"), ["a", "b"], "others")
    assert "from step 3 on, the sources that are not exhausted have weight 0; they get their weights of step 6" in caplog.text


@pytest.mark.parametrize("weights", [(1e-7, 1), (((0, 1e-7), (3, 1e-7)), 1), (((0, 1e-9), (3, 1e-9)), 1e-9)])
def test_a_weight_above_0_gives_rows(weights):
    assert shares([1e-7, 1]) == [1, 10**6 - 1]
    mix = Mix(weights, 4, [10] * 2)
    served = next(p for p in range(0, 2 * 10**6, 50_000) if min(mix.rows_before(p)))
    assert served <= 10**6 + 50_000


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    make_tokenizer(folder / "t", template=TEMPLATE)
    write_jsonl(folder / "all.jsonl", questions(20))
    rows = [{"q": f"{i}*2", "solution": f"#### {2 * i}", "tag": ("easy", "hard", 3)[i % 3], "id": 100 + i} for i in range(12)]
    write_jsonl(folder / "tagged.jsonl", rows)
    return folder


def stream_of(files, options=(), **data):
    config = make_config(files / "t", data__prompts_per_step=4, **{f"data__{k}": v for k, v in data.items()})
    for name, value in dict(options).items():
        config[name.split("__")[0]][name.split("__")[1]] = value
    check_paths(config)
    return Stream.from_config(config, load_train(config, load_tokenizer(config)))


def ids(stream, cursor=0, steps=9):
    out = []
    for _ in range(steps):
        rows, cursor = stream.take(cursor)
        out.append([e.columns["id"] for _, e in rows])
    stream.close()
    return out


@pytest.mark.parametrize("workers", [0, 2])
def test_one_source_is_the_order_of_one_data_set(files, workers):
    path = str(files / "all.jsonl")
    plain, one = stream_of(files, path=(path,), workers=workers), stream_of(files, sources={"a": {"path": path}}, workers=workers)
    assert ids(plain) == ids(one)
    assert (plain.mix is None) != (one.mix is None) and one.dataset[3].source == "a"


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_each_source_goes_on_where_it_was(files, workers):
    """From any cursor the rest is the same; each source is gone through whole before it comes again, in an order that
    neither the other source nor its weight changes."""
    def made(weight=3.0):
        sources = {"a": {"path": str(files / "all.jsonl"), "weight": weight},
                   "b": {"path": str(files / "tagged.jsonl"), "prompt_column": "q", "answer_column": "solution"}}
        return stream_of(files, sources=sources, workers=workers)

    whole = ids(made(), steps=40)
    for k in (1, 7, 23):
        assert ids(made(), cursor=4 * k, steps=40 - k) == whole[k:]
    flat = list(itertools.chain(*whole))
    first, second = [i for i in flat if i < 100], [i for i in flat if i >= 100]
    assert [len(first), len(second)] == [120, 40] and sorted(first[:20]) == list(range(20)) and first[:20] != first[20:40]
    assert sorted(second[:12]) == list(range(100, 112))
    other = list(itertools.chain(*ids(made(weight=1), steps=40)))
    assert [i for i in other if i < 100] == first[:80] and [i for i in other if i >= 100][:40] == second
    stream = made()
    assert stream.sources(0) == {} and stream.sources(8) == {"a": (0.75, 6 / 20), "b": (0.25, 2 / 12)}
    stream.close()


def test_sources_have_columns_prompts_and_rewards_of_their_own(files):
    """As ROLL's domains: rows of one file told apart by a tag, beside another file, each with functions of its own."""
    tagged = {"prompt_column": "q", "answer_column": "solution", "answer_pattern": "#### (.*)"}
    sources = {
        "plain": {"path": str(files / "all.jsonl"), "max_rows": 5},
        "easy": {"where": {"tag": ("easy", 3)}, "system_prompt": "Easy.", "rewards": "exact", "weight": 0.5, **tagged},
        "hard": {"where": {"tag": "hard"}, "rewards": ("exact", "boxed"), **tagged},
    }
    stream = stream_of(files, path=(str(files / "tagged.jsonl"),), sources=sources)
    mixture = stream.dataset
    assert list(mixture.parts) == ["easy", "hard", "plain"] and mixture.sizes == [8, 4, 5] and len(mixture) == 17
    easy, hard, plain = (mixture[i] for i in (0, 8, 12))
    assert (easy.prompt_text, easy.answer, easy.rewards) == ("<system>Easy.<end><user>0*2<end><assistant>", "0", ("exact",))
    assert (hard.prompt_text, hard.answer, hard.rewards) == ("<user>1*2<end><assistant>", "2", ("exact", "boxed"))
    assert (plain.prompt_text, plain.source, plain.rewards) == ("<user>0+1<end><assistant>", "plain", None)
    assert list(mixture.first_rows) == [0, 1, 8, 9, 12, 13]
    assert stream.mix.rows_before(50) == [10, 20, 20]
    with pytest.raises(DataError, match="hard.where=.*no row of 12 matches.*'tag' holds easy, hard, 3"):
        stream_of(files, path=(str(files / "tagged.jsonl"),), sources={"hard": {"where": {"tag": "harder"}, **tagged}})
    with pytest.raises(DataError, match="data.sources.a.path=.*no such file"):
        stream_of(files, sources={"a": {"path": "nowhere.jsonl"}})


def test_the_functions_of_a_source_judge_its_rows():
    config = tiny_job.get_config()
    config.reward.functions = ("exact", "boxed")
    items = [RewardItem("?", "4", {"answer": "4"}, functions=f) for f in (("exact",), ("boxed", "exact"), None)]
    with RewardPool(config) as pool:
        result = pool.score(items)
        assert [sorted(o) for o in result.outcomes] == [["exact"], ["boxed", "exact"], ["boxed", "exact"]]
        with pytest.raises(ConfigError, match="rewards names 'other', which is not among reward.functions: exact, boxed"):
            pool.score([RewardItem("?", "4", {"answer": "4"}, functions=("other",))])


def test_accuracy_is_that_of_a_rows_own_reward():
    """In evaluation, in the metric, in the loss of positive examples, in pass rates and in a replay: eval.accuracy_from where
    it applies to the row, else the row's first. A first reward that failed is a miss; another one does not stand in."""
    own = [{"exact": "ok"}, {"boxed": "ok"}, {"exact": "ok", "boxed": "ok"}, {"exact": "error: KeyError", "boxed": "ok"}]
    parts = {"exact": np.array([1, np.nan, 0, np.nan]), "boxed": np.array([np.nan, 1, 1, 1])}
    result, traj = RewardResult(np.ones(4), parts, own, [{}] * 4, {}, "code"), trajectories([2, 1, 3, 2], [0, 1, 2, 3])
    group = [SimpleNamespace(position=i, example=None) for i in range(4)]
    batch = Batch(traj, group, [], result, np.ones(4), np.ones(4), None, np.zeros(4, bool), None, 4, 4, {}, {})
    header = json.loads(json.dumps(jsonable(batch_header(batch))))
    replayed = batch._replace(result=restore_batch(Record(1, header, batch_arrays(batch))).result)
    for accuracy_from, wanted in (("", [1, 1, 0, 0]), ("boxed", [1, 1, 1, 1])):
        spec = decided(algorithm_config({"algorithm.positive_nll_coef": 0.5, "reward.functions": ("exact", "boxed"),
                                         "eval.accuracy_from": accuracy_from}))
        _, _, hits = accurate(SimpleNamespace(config=spec, reward_model=None), traj, None, None, result)
        assert hits.ravel().tolist() == wanted
        rows = [(None, None, g, "", record) for g, record in zip(group, result.records(), strict=True)]
        assert pass_rates(rows, spec) == {i: x for i, x in enumerate(wanted) if x or i < 3}
        for one in (batch, replayed):
            assert (accuracy_rewards(spec, one.result) >= 1).tolist() == wanted
            weigh, _ = make_loss_weigher(spec, one, {})
            positive = traj.total(weigh(np.arange(4))["positive"]) > 0
            assert positive.tolist() == wanted


def test_advantages_of_a_source_are_those_of_a_run_with_its_options_alone():
    """Two sources of two groups each: plain and whitened as rloo, each bitwise as if the other were not there; a factor comes last."""
    scores = np.array([1.0, 0, 0, 1, 3, 0, 1, 1, 1, 0, np.nan, 5])
    groups, names = np.repeat([3, 5, 8, 9], 3), np.array(["a"] * 6 + ["b"] * 6)
    of = lambda changes: decided(algorithm_config(changes)).algorithm  # noqa: E731
    own = {"advantage_mean": "leave_one_out", "advantage_std": "batch", "whiten": True, "advantage_high": 0.5}
    whole = trajectories([2, 1, 3] * 4, groups)
    got = advantages_by_source({"a": {}, "b": {"algorithm": own, "coef": 0.5}}, names, of({}), whole, scores)
    for name, changes, factor in (("a", {}, 1.0), ("b", {f"algorithm.{k}": v for k, v in own.items()}, 0.5)):
        mine = names == name
        alone = advantages(of(changes), trajectories([2, 1, 3] * 2, groups[mine]), scores[mine])
        np.testing.assert_array_equal(got.tokens[whole.spread(mine)], factor * alone.tokens)
        np.testing.assert_array_equal(got.zero_signal[mine], alone.zero_signal)
    plain = advantages_by_source({"a": {}, "b": {}}, names, of({}), whole, scores)
    np.testing.assert_array_equal(plain.tokens, advantages(of({}), whole, scores).tokens)


def test_shares_of_a_source_with_a_table_are_over_its_own_trajectories():
    """Two groups without a pair and without a common state, and two of source b: the metrics are those of b alone."""
    names, groups = np.array(["a"] * 4 + ["b"] * 4), np.repeat([0, 1, 2, 3], 2)
    scores, tables = np.array([1.0, 1, 0, 0, 1, 0, 1, 1]), {"a": {}, "b": {"algorithm": {"gamma": 0.9}}}
    whole, alone = trajectories([1] * 8, groups), trajectories([1] * 4, groups[4:])
    whole.columns["anchor"] = whole.spread(np.array([0, 0, 0, 0, 7, 7, 7, 7]))
    alone.columns["anchor"] = alone.spread(np.full(4, 7))
    for preset, metric, share in (("gigpo", "advantage/anchored_fraction", 0.5), ("online_dpo", "advantage/pairs_fraction", 0.5)):
        options = decided(algorithm_config({"algorithm.preset": preset, "env.function": "guess" if preset == "gigpo" else ""})).algorithm
        kl = np.zeros(len(whole.tokens)) if preset == "online_dpo" else None
        got = advantages_by_source(tables, names, options, whole, scores, kl=kl)
        own = advantages(options, alone, scores[4:], kl=None if kl is None else kl[:len(alone.tokens)])
        assert got.metrics[metric] == own.metrics[metric] == share


WRONG = [  # sources, further options, what is said
    ({"a": {"algorithm": {"advantage_std": "some"}}}, {}, "a.algorithm.advantage_std='some': choose one of none, group, batch"),
    ({"a": {"algorithm": {"clip_high": 0.3}}}, {}, "a.algorithm.clip_high: not among what a source may have"),
    ({"a": {"algorithm": {"advantage": "gae"}}}, {}, "a.algorithm with algorithm.advantage=outcome: a critic"),
    ({"a": {"algorithm": {"whiten": True}}}, {"algorithm.preset": "ppo"}, "a.algorithm with algorithm.advantage=gae: a critic"),
    ({"a": {"algorithm": {"gamma": 0.9}}}, {}, "a.algorithm: algorithm.gamma=0.9 has no effect with algorithm.advantage=outcome"),
    ({"a": {"algorithm": {"advantage": "somehow"}}}, {}, "a.algorithm.advantage='somehow'"),
    ({"a": {"coef": -1}}, {}, "a.coef=-1: must be a number that is not negative"),
    ({"a": {"coef": 2}}, {"run.recipe": "sft"}, "a.coef: run.recipe=sft has no advantages"),
    ({"a": {"weigth": 1}}, {}, "a.weigth: unknown; did you mean weight"),
    ({"a": {"weight": -1}}, {}, "a.weight=-1: must be a number that is not negative"),
    ({"a": {"weight": ((0, 1), (0, 2))}}, {}, "steps rising from 0"),
    ({"a": {"weight": 0}, "b": {"weight": ((0, 1), (9, 0))}}, {}, "every weight is 0 at step 9"),
    ({"a": {"chat": "maybe"}}, {}, "a.chat='maybe': choose one of auto, true, false"),
    ({"a": {"max_rows": -1}}, {}, "a.max_rows=-1: must not be negative"),
    ({"a": {"path": 3}}, {}, "a.path=3: must be text"),
    ({"a": {"where": "tag"}}, {}, "a.where='tag': must be a table"),
    ({"a": {"path": "x.jsonl"}}, {}, "every one of data.sources has a path of its own; leave it out"),
    ({"a": {}}, {"data.eval_fraction": 0.1}, "name them in eval.sets"),
    ({"a": {}}, {"data.exhausted": "stop"}, "data.epochs=0: nothing is ever exhausted"),
    ({"a": {"rewards": "exact"}}, {"reward.column": "verifier"}, "a.rewards with reward.column"),
    ({"a": {"rewards": "exact"}}, {"run.recipe": "sft"}, "run.recipe=sft has no rewards"),
    ({"a": {"system_prompt": "Hi."}}, {"env.tools": ("jaxrl.envs.examples:add",)}, "a.system_prompt: the turns of an episode"),
    ({}, {"data.exhausted": "others"}, "data.exhausted='others' has no effect without data.sources"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_cannot_be_mixed_is_refused(case):
    sources, further, what = WRONG[case]
    config = tiny_job.get_config()
    config.data.sources = sources
    for name, value in further.items():
        group, option = name.split(".")
        config[group][option] = value
    with pytest.raises(ConfigError) as error:
        check(config)
    assert what in str(error.value)


def test_steps_of_another_size_would_move_a_schedule():
    config = tiny_job.get_config()
    config.data.sources = {"a": {"weight": 1}, "b": {"weight": 2}}
    old, config.data.prompts_per_step = redacted(config), 8
    assert config_changes(old, redacted(config)) == ([], ["data.prompts_per_step: 4 -> 8"])
    put(config, "data.sources.b.weight", ((0, 1), (9, 2)))
    refused, _ = config_changes(old | {"data": {**redacted(config)["data"], "prompts_per_step": 4}}, redacted(config))
    assert len(refused) == 1 and "data.sources changes with the step, so the place in the data" in refused[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rl", "sft"])
def test_a_run_of_two_sources_goes_on_bitwise(tmp_path, recipe):
    def run(name, *steps):
        for n in steps:
            c = tiny_job.get_config(recipe)
            sources = {"a": {"weight": ((0, 0.75), (4, 0.25))}, "b": {"weight": 0.5, "max_rows": 3, "bad_rows": "skip"}}
            if recipe == "rl":
                sources["b"] |= {"algorithm": {"advantage_std": "none"}, "coef": 0.5}
            c.data.sources, c.data.exhausted, c.data.epochs = sources, "others", 2
            c.eval.sets, c.train.steps, c.run.dir, c.checkpoint.every_steps = (), n, str(tmp_path / name), 1
            done = jaxrl.train(c)
        return done

    run("parts", 2, 5)
    done = run("whole", 5)
    assert done["finished"] and fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
    lines = [line for line in (Path(done["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert "source/a/share" in lines[-1] and ("source/b/reward" in lines[0]) == (recipe == "rl")
