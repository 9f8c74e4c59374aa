"""Schema, flags, files, checks: what a person types, and what they are told."""

import json
import re
import textwrap
from types import SimpleNamespace

import pytest

from jaxrl.config.help import option_lines
from jaxrl.config.load import (
    config_of,
    default_config,
    find_config,
    frozen,
    get,
    load_config,
    parse_flags,
    put,
    redacted,
    redacted_text,
)
from jaxrl.config.option import not_chosen
from jaxrl.config.schema import options
from jaxrl.config.suggest import NOT_YET, not_yet
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError
from jaxrl.main import main
from jaxrl.models.families import family_of
from jaxrl.resolve.checks import common
from jaxrl.resolve.spec import algorithm_row, here, resolve
from jaxrl.run import setup
from jaxrl.sharding.mesh import check_experts, mesh_shape


def usable():
    """The smallest config that passes every check."""
    c = default_config()
    c.model.path, c.data.path = "some/model", ("some.jsonl",)
    return c


def test_every_option_has_a_meaning_and_help_shows_it():
    text = option_lines(options())
    for name, opt in options().items():
        assert len(opt.doc) >= 7 and f"--config.{name}=" in text
        assert opt.default is None or not not_chosen(opt, opt.default)


def test_tables_may_hold_empty_lists():
    """Alone, twice, nested, and beside the empty tuples of other options; lists become tuples."""
    c = usable()
    c.model.config = {"vision_config": {"taps": [], "more": [[], [1], []]}, "sizes": [2, 3]}
    c.user.names, c.user.pairs = [], ()
    spec = resolve(c)
    table = spec.model.config.to_dict()
    assert table == {"vision_config": {"taps": (), "more": ((), (1,), ())}, "sizes": (2, 3)}
    assert (spec.user.names, spec.user.pairs) == ((), ()) and c.model.config.vision_config.taps == []


def test_flags_are_read_by_type():
    spec, got = parse_flags(
        [
            "--config=a.py:tiny",
            "--config.optimizer.lr=1e-5",
            "--config.data.path=a,b",
            "--config.log.wandb=true",
            "--config.profile.steps=(3, 4)",
            "--config.model.config.hidden_size=32",
            "--config.train.steps",
            "7",
            "--config.reward.clip=None",
            "--config.user.deep.name=x",
        ]
    )
    assert spec == "a.py:tiny"
    assert got == {
        "optimizer.lr": 1e-5,
        "data.path": ("a", "b"),
        "log.wandb": True,
        "profile.steps": (3, 4),
        "model.config.hidden_size": 32,
        "train.steps": 7,
        "reward.clip": None,
        "user.deep.name": "x",
    }
    c = default_config()
    for name, value in got.items():
        put(c, name, value)
        assert get(c, name) == value


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.optimizer.rl=1", "did you mean optimizer.lr"),
        ("--config.optimiser.lr=1", "did you mean optimizer.lr"),
        ("--config.optimizer.learning_rate=1", "did you mean optimizer.lr"),
        ("--config.rollout.num_generations=8", "did you mean rollout.group_size"),
        ("--config.lora_rank=8", "did you mean lora.rank"),
        ("optimizer.lr=1e-5", "--config.optimizer.lr=1e-5"),
        ("--optimizer.lr=1e-5", "--config.optimizer.lr=1e-5"),
        ("--config.optimizer.lr=fast", "expected float"),
        ("--config.train.steps=1.5", "expected int"),
        ("--config.log.wandb=maybe", "expected bool"),
        ("--xyz=3", "unknown argument"),
        ("configs/grpo.py:tiny", "--config=configs/grpo.py:tiny"),
        ("grpo:tiny", "a config is given as --config=grpo:tiny"),
        ("--confg=grpo", "did you mean --config=grpo"),
        ("-config=grpo", "did you mean --config=grpo"),
        ("--confg", "did you mean --config=FILE"),
        ("config.train.steps=3", "--config.train.steps=3"),
        ("--confg.train.steps=3", "--config.train.steps=3"),
        ("--config_train.steps=3", "--config.train.steps=3"),
        ("config.rollout.n=3", "did you mean --config.rollout.group_size=3"),
        ("--config.rollout=3", "jaxrl train --help=rollout lists them"),
        ("--user.name=3", "--config.user.name=3"),
        ("--steps=3", "did you mean --config.train.steps=3"),
        ("--learning-rate=1e-5", "did you mean --config.optimizer.lr=1e-5"),
    ],
)
def test_bad_flags_name_the_right_one(flag, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_flags([flag])


@pytest.mark.parametrize("name, missing, instead", [
    ("qlora.rank", "LoRA", "model.trainable"), ("adalora", "LoRA", "lora.rank"),
    ("algorithm.dpo_beta", "DPO", "run.recipe=preference"), ("algorithm.xpo", "online", "algorithm.preset=online_dpo"),
    ("mesh.ep_size", "mesh.ep", "fsdp"), ("mesh.ulysses_size", "mesh.cp", "mesh.tp"),
    ("mesh.pp", "pipelines", "mesh.tp"), ("model.load_in_4bit", "quantised", "train.compute_dtype"),
    ("data.images", "images are read", "data.image_column"), ("data.videos", "text and images", ""),
])
def test_what_is_not_there_says_so_and_what_there_is(name, missing, instead):
    with pytest.raises(ConfigError) as e:
        parse_flags([f"--config.{name}=1"])
    assert missing in str(e.value) and instead in str(e.value) and "did you mean" not in str(e.value)


@pytest.mark.parametrize("job, said", [
    (lambda: load_config("ipo"), "run.recipe=preference"),
    (lambda: load_config("dapo"), "algorithm.preset=dapo"),
    (lambda: common.check(load_config("grpo", {"run.recipe": "dpo"})), "run.recipe=preference"),
    (lambda: common.check(load_config("grpo", {"algorithm.preset": "orpo"})), "run.recipe=preference"),
    (lambda: family_of({"model_type": "deepseek_v2"}), "experts"),
])
def test_jobs_presets_and_models_that_are_not_there_say_so(job, said):
    with pytest.raises(ConfigError, match=said):
        job()


def test_no_option_is_called_like_what_is_missing():
    for name in options():
        assert not_yet(name) is None, name
    assert {o for _, text in NOT_YET for o in re.findall(r"(?:run|train|model|mesh|rollout|reward)\.[a-z_.]*[a-z]", text)} <= set(options())


def test_a_table_given_as_text_says_how_to_write_one():
    with pytest.raises(ConfigError, match=r"expected dict, got str; write \{'key': value\}, or --config.model.config.key="):
        put(usable(), "model.config", "hidden_size=3")


def test_config_files_take_an_argument_and_overrides(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
        from jaxrl.config.load import default_config
        def get_config(arg=None):
            c = default_config()
            c.train.steps = 3 if arg == "short" else 300
            return c
    """)
    )
    c = load_config(f"{file}:short", {"optimizer.lr": 1e-4})
    assert (c.train.steps, c.optimizer.lr, c.run.dir) == (3, 1e-4, "runs/mine_short")
    with pytest.raises(ConfigError, match="shipped configs"):
        find_config("no_such_config")
    (tmp_path / "mine.yaml").write_text("run: {}\n")
    with pytest.raises(ConfigError, match="mine.yaml is no Python file"):
        load_config(str(tmp_path / "mine.yaml"))
    file.write_text(
        "from jaxrl.config.load import default_config\ndef get_config(arg):\n    c = default_config()\n    c.optimizer.rl = 1\n"
    )
    with pytest.raises(ConfigError, match="did you mean .*critic.lr or optimizer.lr"):
        load_config(str(file))


def test_the_defaults_need_only_model_and_data():
    with pytest.raises(ConfigError) as e:
        common.check(default_config())
    assert "model.path" in str(e.value) and "data.path" in str(e.value) and str(e.value).count("\n  - ") == 3
    common.check(usable())


BAD = [
    ("algorithm.num_minibatches", 7, "choose a divisor of 64"),
    ("algorithm.preset", "gpro", "choose one of grpo"),
    ("rollout.group_size", 1, "at least 2 samples"),
    ("rollout.temperature", 0.0, "use 1.0"),
    ("rollout.temperature", -1.0, "must not be negative"),
    ("rollout.top_p", 0.0, "1 = off"),
    ("rollout.top_k", 0, "-1 for all"),
    ("rollout.min_new_tokens", 5000, "above rollout.max_new_tokens"),
    ("rollout.repetition_penalty", 1.2, "penalties_in_training"),
    ("rollout.prompt_lengths", (8, 16), "must reach data.max_prompt_tokens"),
    ("rollout.prompt_lengths", (1, 2, 3, 512), "at most 3"),
    ("reward.weights", (1.0, 2.0), "2 weights for 1 functions"),
    ("reward.functions", ("format",), "reward.format_pattern is empty"),
    ("reward.format_pattern", "(", "not a regular expression"),
    ("reward.env", ("API_KEY=abc",), "give names only"),
    ("run.stop_seconds", -1.0, "must not be negative"),
    ("reward.overlong_buffer", 4096, "above rollout.max_new_tokens"),
    ("reward.clip", -1.0, "must be above 0"),
    ("algorithm.kl.coef", -0.1, "must not be negative"),
    ("algorithm.kl.estimator", "k3", "no effect with algorithm.kl.coef=0; set algorithm.kl.coef"),
    ("reference.path", "x", "no effect with algorithm.kl.coef=0; set algorithm.kl.coef"),
    ("algorithm.clip_low", 1.5, "must lie above 0 and at most at 1"),
    ("mesh.dp", 0, "-1 for the rest"),
    ("mesh.dp", -1, "only one axis can be -1"),
    ("train.row_lengths", (64,), "raise the last length"),
    ("train.max_sequence_tokens", 10_000, "lower it or set 0"),
    ("optimizer.b2", 1.0, "[0, 1)"),
    ("optimizer.lr", 0.0, "must be above 0"),
    ("data.answer_pattern", "####", "needs a group"),
    ("data.eval_fraction", 1.5, "must be a share in 0..1, or a whole number of rows"),
    ("eval.controls", ("blank", "grey"), "='grey': choose one of blank"),
    ("preference.loss", ("dpo", "simpoo"), "='simpoo': choose one of dpo"),
    ("lora.adapters.x.lr", float("inf"), "=inf: must be a finite number"),
    ("data.sources.a.algorithm", {"advantage_low": float("nan")}, ".advantage_low=nan: must be a finite number"),
    ("data.sources.a.weight", ((0, 1.0), (5, float("inf"))), "=inf: must be a finite number"),
    ("optimizer.groups", {"head": {"lr": 10**400}}, "must be a finite number"),
    ("reward.judges.b.min_agreement", float("inf"), "=inf: must be a finite number"),
    ("eval.sets", ("test.jsonl",), "expected 'name=path', for example 'test=test.jsonl'"),
    ("eval.sets", ("a=x", "a=y"), "used twice"),
    ("eval.samples", 8, "set a temperature"),
    ("eval.accuracy_from", "speed", "not among the rewards"),
    ("profile.steps", (5, 3), "(first, last)"),
    ("run.resume", "sometimes", "auto, must, never"),
    ("model.frozen", ("(",), "not a regular expression"),
    ("model.chat_template", "no_such.jinja", "no such file"),
]


@pytest.mark.parametrize("name, value, message", BAD)
def test_what_cannot_work_is_refused_by_name_value_and_remedy(name, value, message):
    c = usable()
    put(c, name, value)
    with pytest.raises(ConfigError) as e:
        common.check(c)
    assert name in str(e.value) and message in str(e.value)


@pytest.mark.parametrize("given, refused", [
    ({"model.path": "Qwen/Qwen2.5-0.5B"}, "model.path='Qwen/Qwen2.5-0.5B' with run.warm_start='grpo_sft': the warm start's model"),
    ({"model.init": "random", "model.config": {"model_type": "qwen2"}}, "model.init='random' with run.warm_start='grpo_sft'"),
    ({"model.path": "runs/rl/warm_start/export"}, "model.path='runs/rl/warm_start/export' with run.warm_start='grpo_sft'"),
    ({"model.path": "Qwen/Qwen2.5-0.5B", "run.warm_start": ""}, ""), ({"model.path": "runs/grpo/warm_start/export"}, "")])
def test_a_model_is_not_replaced_by_a_warm_starts(given, refused):
    c = load_config("grpo", given)
    if not refused:
        return common.check(c)
    with pytest.raises(ConfigError, match=re.escape(refused)):
        common.check(c)


def test_a_bool_is_no_number():
    for name in ("train.steps", "optimizer.lr", "data.max_prompt_tokens"):
        with pytest.raises(ConfigError, match=f"{name}=True: expected (int|float), got bool"):
            put(default_config(), name, True)
    c = usable()
    c.train.steps = True  # which ConfigDict takes
    with pytest.raises(ConfigError, match="train.steps=True: must be of type int"):
        common.check(c)
    with pytest.raises(ConfigError, match="optimizer.lr=10"):
        put(c, "optimizer.lr", 10**400)


def test_a_config_of_a_spec_can_be_changed():
    """A frozen one is copied: locked against unknown names, its values free."""
    c = usable()
    c.user.size = 3
    changed = config_of(frozen(c))
    changed.train.steps, changed.user.more = 7, 1
    changed.data.sources = {"a": {"weight": 1.0}}
    assert changed.train.steps == 7 and c.train.steps != 7 and changed.user.size == 3
    with pytest.raises(AttributeError):
        changed.train.stepz = 1


def test_a_capability_that_is_a_name_is_of_a_new_device(monkeypatch):
    import jax
    for capability, dtype in (("gfx942", "bf16"), ("7.5", "fp16"), ("9.0", "bf16")):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert here().dtype == dtype


def test_all_problems_are_reported_at_once():
    c = usable()
    c.rollout.top_p, c.optimizer.b1, c.mesh.tp = 0.0, 2.0, 0
    with pytest.raises(ConfigError) as e:
        common.check(c)
    assert all(n in str(e.value) for n in ("rollout.top_p", "optimizer.b1", "mesh.tp"))


def test_presets_and_origins():
    c = usable()
    c.algorithm.preset, c.algorithm.kl.coef = "grpo_paper", 0.01
    row = algorithm_row(c)
    assert row["aggregation"] == ("sequence_mean", "preset grpo_paper") and row["kl.coef"] == (0.01, "config")
    assert setup.derived_numbers(resolve(c))["sequences per step"] == 64 * 8


def test_a_users_file_is_executed_once_until_it_is_edited(tmp_path, monkeypatch):
    """Two functions of one file share its state, wherever the path is written from."""
    code = ("from __future__ import annotations\nimport dataclasses\nSEEN = []\n@dataclasses.dataclass\nclass D:\n    x: int = 1\n"
            "def add(x):\n    SEEN.append(x)\ndef seen():\n    return SEEN\n")
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    imported("./mine.py:add")(1)
    assert imported(f"{tmp_path}/mine.py:seen")() == [1] and imported("mine.py:add") is imported("./mine.py:add")
    (tmp_path / "mine.py").write_text(code + "SEEN.append(2)\n")
    assert imported("./mine.py:seen")() == [2]


SECRET_NAMES = ("wandb_api_key", "api-key", "apiKey", "OPENAI_API_KEY", "x-api-key", "hf_token", "HF_TOKEN", "token", "auth-token",
                "accessToken", "AWS_ACCESS_KEY_ID", "aws_secret_access_key", "AWS_SESSION_TOKEN", "secret", "client-secret",
                "secretAccessKey", "Authorization", "Proxy-Authorization", "db_password", "passwd", "passphrase", "ssh_key",
                "private-key", "signing_key", "credentials", "cookie", "password_of_db", "JAXRL_SERVICE_KEYS", "api-keys", "apiKeys",
                "access_tokens", "HF_TOKENS", "MY_TOKENS", "DB_PASSWORDS", "passphrases", "AWS_ACCESS_KEY_IDS", "DSNS")
HARMLESS_NAMES = ("pad_token", "eos_token", "image_token", "stop_token_ids", "eos_tokens", "max_new_tokens", "tokens_per_microbatch",
                  "num_key_value_heads", "key", "keys", "prompt_column", "sort_key", "answer_key", "keep_stop", "tokenizer",
                  "passes", "pass_mark", "bypass", "author", "keyword", "monkey", "secretary", "compass", "tokens", "missing_keys",
                  "image_keys", "PROMPT_KEYS", "MAX_TOKENS", "VLLM_MAX_BATCHED_TOKENS", "generated_tokens", "KEYS")
SECRET_TEXTS = ("https://me:canary@host/x", "s3://me:a:canary@canary@host/x", "redis://:canary@host:6379/0", "https://canary@github.com/a/b",
                "proxy is http://u:canary@p:80, mind", "Authorization: Bearer canary", "authorization=canary", "Bearer canary0123456789abcdef",
                "https://host/x?token=canary&v=1", "--api-key=canary", "password=canary", "hf_canaryABCDEFGHIJKLMNOP", "AKIAcanary0123456789")
HARMLESS_TEXTS = ("https://host:8000/x", "s3://bucket/a@b", "ssh://git@host/x", "mail me@host: why", "user: a@b", "basic arithmetic problems",
                  "bearer of news", "pad_token=<pad>", "test=file.jsonl", "key=value", "path/with:colon@at", "x = y", "skip-a-very-long-word-here",
                  r"\\boxed{token}", "data/api_key_tests.jsonl", "authorization of the board")


def test_secrets_are_redacted_and_nothing_else():
    """Under names, in lists and in texts, however deep; every option of our own stays as it is."""
    c = default_config()
    for k, name in enumerate(SECRET_NAMES):
        c.user[f"a{k}"] = {name: "canary", "deep": [{name: ["canary", 7]}, "--" + name, "canary"]}
    for k, text in enumerate(SECRET_TEXTS):
        c.user[f"b{k}"] = [text, {"x": text}]
    for table in ("model.config", "rollout.vllm.env", "rollout.vllm.engine_kwargs"):
        get(c, table)["hf_token"] = "canary"
    text = json.dumps(redacted(c))
    assert "canary" not in text, text[max(0, text.index("canary") - 80):text.index("canary") + 10]
    c = default_config()
    c.user.names = {name: "visible" for name in HARMLESS_NAMES}
    c.user.texts = HARMLESS_TEXTS
    c.user.wandb_key, c.user.api_key = "", None
    for name, opt in options().items():
        if isinstance(opt.default, str) and name != "rollout.vllm.api_key":
            put(c, name, "visible")
    assert redacted(c) == json.loads(c.to_json_best_effort())


def test_a_mesh_that_does_not_divide_the_devices_names_the_axis_to_lower():
    c = default_config()
    c.mesh.dp = 3
    with pytest.raises(ConfigError, match=r"1 device\(s\) cannot be divided by mesh.dp = 3; lower mesh.dp"):
        mesh_shape(c.mesh, 1)


@pytest.mark.parametrize("ep, experts, said", [
    (2, 0, "mesh.ep=2: the model has no experts to split; leave it at 1 and raise mesh.fsdp"),
    (4, 6, "mesh.ep=4 does not divide the model's 6 experts; choose one of 1, 2, 3, 6, and give the other devices to mesh.fsdp"),
])
def test_experts_are_split_whole(ep, experts, said):
    with pytest.raises(ConfigError, match=said):
        check_experts(ep, experts)
    check_experts(1, experts)


def test_ctrl_c_before_the_run_leaves_without_a_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.main.load_config", interrupted)
    assert main(["--config=grpo"]) == 130
    assert "interrupted during start-up; rerun the same command, which resumes where there is a checkpoint" in capsys.readouterr().err


HIDDEN = "s3cr3tVALUE0123456789abcdef"
SECRETS = [
    f"https://acc.blob.core.windows.net/c/x?sv=2024&sig={HIDDEN}%3D", f"https://b.s3.amazonaws.com/k?X-Amz-Signature={HIDDEN}",
    f"https://b.s3.amazonaws.com/k?X-Amz-Credential={HIDDEN}&X-Amz-Date=1", f"https://storage.googleapis.com/k?X-Goog-Signature={HIDDEN}",
    f"X-Api-Key: {HIDDEN}", f"api-key: {HIDDEN}", f"Authorization: Bearer {HIDDEN}", f"Authorization: Basic {HIDDEN}",
    f'{{"password": "{HIDDEN}"}}', f'{{"a": 1, "api_key": "{HIDDEN}"}}', f"{{'secret': '{HIDDEN}'}}", f'{{"access_token":"{HIDDEN}"}}',
    f"serve --password {HIDDEN} --port 1", f"serve --api-key {HIDDEN}", f"serve --token={HIDDEN}", f"PASSWORD={HIDDEN}",
    f"WANDB_API_KEY={HIDDEN}", f"eyJhbGciOiJIUzI1NiJ9.{HIDDEN}.{HIDDEN}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{HIDDEN}\n-----END RSA PRIVATE KEY-----", f"-----BEGIN PRIVATE KEY-----\n{HIDDEN}", f"AIza{HIDDEN}",
    f"hf_{HIDDEN}", f"sk-{HIDDEN}", f"ghp_{HIDDEN}", f"github_pat_{HIDDEN}", f"https://user:{HIDDEN}@host/x", f"https://{HIDDEN}@host/x",
    f"JAXRL_SERVICE_KEYS=anna:tml-1,ben:{HIDDEN}", f"API_KEYS=YWJj==,{HIDDEN}=", f"a=1,token={HIDDEN},b=2", f"tml-{HIDDEN}",
    f'{{"api_keys": ["a", "{HIDDEN}"]}}', f"{{'access_tokens': ('{HIDDEN}', 'b')}}", f"git+https://{HIDDEN}@github.com/a/b.git",
    f"https://h/x?access_tokens={HIDDEN}&a=1", f"postgres://u:{HIDDEN}@h/db", f"glpat-{HIDDEN}", f"xoxb-{HIDDEN}", f"client_secret={HIDDEN}",
]
INNOCENT = [
    "--config.model.pad_token <pad>", "eos_token: <|im_end|>", '{"eos_token": "</s>"}', "data.answer_column=answer", "a key: value pair",
    "the password is asked for", "max_tokens=512", "--max-tokens 512", "http://host:8000/v1?model=x",
    "python -m jaxrl.main --config=configs/grpo.py", "tokens: 12345678", "step 1/20 loss 0.5", '{"tokenizer": "Qwen/Qwen2.5-0.5B"}',
    "sigma=0.1", "policy_loss=clip", "signature of the function", "s3://bucket/folder", "x-ray: 1234567", "key=answer_key",
    "https://huggingface.co/datasets/openai/gsm8k", "prompt_token_ids=[1, 2, 3]", "https://host/x?policy_version=3",
    "multi-token prediction", "the next-token loss", "image_keys=a,b", '{"missing_keys": ["a", "b"]}', "generated_tokens=512,b=2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_stands_in_no_text(text):
    assert HIDDEN not in redacted_text(text) and "<redacted>" in redacted_text(text)


@pytest.mark.parametrize("text", INNOCENT)
def test_texts_without_a_secret_stay_as_they_are(text):
    assert redacted_text(text) == text


def test_the_types_of_options_are_generated_from_the_schema():
    """python -m jaxrl.config.generate"""
    from jaxrl.config import generate, typed

    assert generate.FILE.read_text("utf-8") == generate.source()
    assert typed.Algorithm_Kl.__annotations__["coef"] == "float" and typed.Options.__annotations__["algorithm"] == "Algorithm"
