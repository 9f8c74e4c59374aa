"""`jaxrl migrate SYSTEM FILE`: the config of another system as one of ours, and what became of every key.

No jax is imported: a config is read in less than a second. The files, in the order in which a config passes them:

    source.py       what a reader gives: settings (key, value, place), overrides, ${interpolation}
    yaml_files.py   YAML with hydra's defaults lists, TOML
    shell.py        bash scripts, parsed and never executed; shell_words.py: their words
    python_files.py programs in Python: literals of config classes, by `ast`
    python_values.py what names, attributes and expressions of such a program stand for
    episodes.py     jobs of several turns: options of the environment, a stub of the episode
    secret_values.py  secrets of a source, for which files have variables of the environment
    read.py         a file of any kind, the command that it starts, trailing overrides -> Source
    table.py        Key, Joint, Since, Table: what a table consists of; Migration: its application
    common.py       meanings that systems share: batches, KL, schedules, checkpoints, loggers ...
    devices.py      the same of devices: mesh, engines, placement
    jobs.py         jobs of another kind than a table is about; derived.py and supervised.py: their tables and meanings
    models.py       models that are not trained here, by the names of their checkpoints
    counterparts.py the options that a key stands for, for an unknown name in a config of ours
    systems/        one file per system, each with its TABLE (and <name>_meaning.py with its joint rules)
    report.py       the config file, report.md, report.json, stubs

How to write a table
--------------------

1. Read the source's code, not only its documentation, at the tags whose defaults differ. Write `systems/<name>.py` with
   `TABLE = Table(...)`, add the name to SYSTEMS in `systems/__init__.py`. (Rows of that file may be wide; joint
   rules that take many lines go to `<name>_meaning.py`, which may not.) `versions` are its releases, oldest first;
   the last is assumed. `command` is a pattern for the words of the command, in a script, that starts a job.
   `flags=True` where keys are given as `--name value`. `resolvers` are functions behind `${name:a,b}`.
2. Own every key once. A key that has one option of ours is a row:

       K("trainer.seed", to="run.seed", default=42, other=7)                      exact: the same value
       K("trainer.bf16", "equivalent", "train.compute_dtype",                     by a function of the value
         lambda on: "bf16" if on else "fp32", default=True, other=False)
       K("trainer.flash_attn", "automatic", why="the platform's attention")       nothing to set here
       K("actor.clip_ratio", "inert", why="clip_ratio_low and _high win")         it does nothing there either
       K("vision", "unsupported", fine=(False,), refuse=True, why="only text")    another value than those of fine:
                                                                                  refused, or partial (refuse=False)
       K("chat_template.*", "ask", why="name a file in model.chat_template")      said under "Needs you"

   `*` is one part of a dotted name, `**` at the end all that follow; plain names win over patterns, earlier patterns
   over later ones. `also` has names of other versions. `default` is the source's value where the key is not set (a
   `Since(("0.1", a), ("0.3", b))` where it changed): defaults that are not ours are written out by themselves.
3. Keys that make one meaning together are a `Joint(title, keys, function)`. The function takes the Migration m:

       m["key"], m.integer, m.number, m.flag, m.text, m.list   the value, or the source's default, its kind checked
       m.given("key"), m.all("pattern.**"), m.version, m.gpus, m.command
       m.set("option", value, "key", ...)     because of these keys, which stand beside it in the config
       m.lacks("key", why, refuse=False)      not carried over (partial), or another job without it (refused)
       m.needs(text), m.differs(text)         "Needs you", "Known differences"
       m.mark("key", kind, why)               another kind than its row's, for this value
       m.facts["sequences per step"] = 1024   what a reader checks first
       common.reward_file, common.reward_stub a file beside the config, m.files

   Rules run in the order of the table; `m.options["rollout.max_new_tokens"][0]` is what an earlier one has set. An
   option is set once: two rules that give it different values are an error. Set what our checks refuse without effect
   (a KL's estimator, a critic's option) only where it acts. `common.py` has what most systems need.
4. A job of another kind (supervised, preferences, agents ...) is a `Job` of TABLE.jobs (jobs.py): how to recognise
   it, and either the table that reads it (`table="trl_jobs:SFT"`; `derived.py` makes one of this table's rules, under
   other names where they stand elsewhere, `supervised.py` has their meanings) or the recipe that does it here, where
   it is not carried over. `names/<name>.txt` has every key of the versions' config classes and
   example files: `a.b` on a line, `a.b FIRST..LAST` where not every version has it, `*.b` where the table of b is not
   known. A pattern passes no other key over, and a key that TABLE.versions' last one lacks asks for the version.
5. For the tests, `other` is another legal value of a key, and `beside` the settings under which it matters:
   tests/test_migrate.py sets it and wants another config (mutation), writes the default down and wants the same one
   (deletion), and wants every option to exist. Keys without which the source does not run have default=MISSING and a
   value in TABLE.required. Add the numbers that are easy to get wrong as a test of your own, and a section with the
   concepts side by side to docs/guides/migrate.md.
6. Never guess silently. What the text does not say is asked; what we lack is refused by name; what is nearly the same
   is carried over and said in m.differs.
"""
