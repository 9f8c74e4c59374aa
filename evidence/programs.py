"""Programs that were written for an API, MCP servers and public libraries in real runs of jaxrl, unchanged:

    python evidence/programs.py                      (--programs, --gyms, --verifiers, --openenv PYTHON: instead of its own)
    python evidence/programs.py --learn=http,mcp     (those that are trained until they call the tool: 40 steps)
    python evidence/programs.py --names=mcp --keep   (this one again, beside the others of the last result)
    python evidence/programs.py --names=             (only the first part; half a minute)

First each is played by a scripted model through the pool of episodes: a right and a wrong answer get their scores, and its second call
goes on from the first, or opens a sequence where it rewrites its history. Then real runs.

  smolagents     a tool-calling agent of smolagents (scripted alone: its prompt is longer than so small a model's positions)
  openai         one of our own by the openai client, with a tool           agents    an agent of openai-agents, with the same tool
  mcp            a server written with `mcp`, standard streams              mcp_http  the same over streamable HTTP
  reasoning_gym  its rows and its scores, asked by the openai client, streamed
  skyrl_gym      gsm8k_multi_turn of skyrl-gym as a class                   http      as openai, without a client (whose import costs 0.8 s)
  verifiers      an environment of verifiers with a tool, by its own vf-eval, which starts three processes for an episode (8 episodes)
  openenv        a service of openenv-core, two answers to a question

All start from the warm start of configs/env_sft.py:calc, which calls the tool in a part of its episodes, and train for two steps of 16
episodes. Shown of each: no episode failed; the trainer's log-probs of the recorded tokens are the sampler's (gap: recorded is what was
sampled, behind the prompts that were); turns, calls, sequences. Of those that learn also the held-out accuracy before and after;
but agents, whose import costs three seconds of a core for each episode, learns for 24 steps of 32 episodes, twice as quickly, and is not evaluated.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]
from common import RESULTS, commit, record, table  # noqa: E402
from quickstart import ROOT, launch  # noqa: E402

HERE = Path(__file__).parent / "programs"
PINS = {"programs": ("openai==3.57.0", "openai-agents==0.24.0", "smolagents==1.26.0", "mcp==2.3.0"),
        "gyms": ("reasoning-gym==0.1.25", "skyrl-gym==0.4.0"), "verifiers": ("verifiers==0.4.0", "uv==0.13.9"),
        "openenv": ("openenv-core==0.3.0",)}
PROGRAM = ("env.tools=", "reward.functions=", f"env.score={HERE}/scores.py:printed", "env.workers=1")
SHORT = ("train.steps=2", "data.prompts_per_step=4", "rollout.group_size=4", "eval.before=False", "eval.after=False",
         "eval.every_steps=0", "rollout.slots=16")
SLOW = {"agents": (*SHORT, "train.steps=24", "data.prompts_per_step=8", "optimizer.lr=8e-4", "optimizer.warmup_steps=2")}
ROOM = ("env.max_turns=3", "env.max_observation_tokens=256", "data.max_prompt_tokens=400", "train.max_sequence_tokens=900",
        "train.row_lengths=(1024,)", "train.tokens_per_microbatch=4096", "model.config.max_position_embeddings=1024")


def python(name: str, given: str, folder: Path) -> str:
    if given:
        return given
    subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    subprocess.run([folder / name / "bin/python", "-m", "pip", "install", "-q", *PINS[name]], check=True)
    return str(folder / name / "bin/python")


def versions(*pythons: str) -> dict:
    code = ("import importlib.metadata as m, json; print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()"
            " if d.metadata['Name'] in ('openai', 'openai-agents', 'smolagents', 'mcp', 'reasoning_gym', 'reasoning-gym', 'skyrl-gym',"
            " 'verifiers', 'openenv-core')}))")
    found = {}
    for one in pythons:
        found |= json.loads(subprocess.run([one, "-c", code], capture_output=True, text=True, check=True).stdout)
    return found


def rows(gyms: str, folder: Path) -> None:
    """Of reasoning-gym, of skyrl-gym's gsm8k_multi_turn, and calc's with the question as a column."""
    with (folder / "sums.jsonl").open("w") as out:
        for line in (ROOT / "jaxrl/data/embedded/calc/train.jsonl").read_text().splitlines():
            row = json.loads(line)
            out.write(json.dumps(row | {"question": row["prompt"]}) + "\n")
    with (folder / "reasoning.jsonl").open("w") as out:
        subprocess.run([gyms, HERE / "reasoning.py", "chain_sum", "64"], stdout=out, check=True)
    with (folder / "gsm8k.jsonl").open("w") as out:
        for line in (folder / "reasoning.jsonl").read_text().splitlines():
            row = json.loads(line)
            out.write(json.dumps({"prompt": row["prompt"], "question": row["prompt"], "answer": row["answer"]}) + "\n")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def await_service(url: str) -> None:
    for _ in range(3000):  # (importing openenv may take a minute)
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{url}: no answer")


def by_verifiers(python: str) -> str:
    """The command line of an episode. vf-eval runs its agent and its tool in processes of their own, made ready by uv."""
    shell = 'exec vf-eval "$@" --client.base-url "$OPENAI_BASE_URL"'
    return (f"env PATH={Path(python).parent}:/usr/bin:/bin PYTHONPATH={HERE} sh -c '{shell}' vf-eval vf_calc --env.taskset.prompt {{prompt}}"
            " --env.taskset.answer {answer} --env.agent.harness.id null --env.agent.runtime.type subprocess"
            " --env.agent.network-notice False --client.api-key-var OPENAI_API_KEY --model any --no-push --no-rich -n 1")


def options(programs: str, gyms: str, verifiers: str, folder: Path, port: int, service: str) -> dict[str, tuple[str, ...]]:
    def by(name, interpreter=programs):
        return (*PROGRAM, f"env.program={interpreter} {HERE}/{name}.py {{prompt}}")

    mcp = ("env.tools=", "env.mcp_session=worker", "env.workers=1")
    return {
        "http": by("calc_http", f"{sys.executable} -S -E"), "openai": by("calc_openai"),
        "agents": (*by("calc_agents"), "env.step_seconds=600", "env.episode_seconds=1800"),
        "mcp": (*mcp, f"env.mcp={programs} {HERE}/mcp_calc.py"),
        "mcp_http": (*mcp, "env.mcp_session=episode", f"env.mcp=http://127.0.0.1:{port}/mcp"),
        "reasoning_gym": (*by("ask_once"), *ROOM, f"env.score={HERE}/reasoning.py:score", f"env.python={gyms}",
                          f"data.path={folder}/reasoning.jsonl"),
        "skyrl_gym": ("env.tools=", "reward.functions=", *ROOM, f"env.function={HERE}/skyrl.py:SkyRL",
                      "env.options.env=gsm8k_multi_turn", "env.options.max_turns=2", f"env.python={gyms}",
                      f"data.path={folder}/gsm8k.jsonl"),
        "verifiers": (*PROGRAM[:2], f"env.score={HERE}/scores.py:rewarded", "env.workers=1", f"env.program={by_verifiers(verifiers)}",
                      "env.step_seconds=600", "env.episode_seconds=1800", "train.steps=1", "rollout.group_size=2", "rollout.slots=8"),
        "openenv": ("env.tools=", "reward.functions=", "env.function=openenv", f"env.servers={service}", "env.max_turns=2",
                    "env.options={'reset': ('question', 'answer')}", f"data.path={folder}/sums.jsonl"),
    }


def scripted(programs: str, gyms: str, verifiers: str, folder: Path, service: str) -> list[dict]:
    """A model that calls the tool and says 3, or what the row wants: what each program made of it."""
    from helpers import env_cases
    from helpers.env_cases import turn

    def sums(name="calculate"):
        last = turn("", ("final_answer", {"answer": "3"})) if name != "calculate" else turn("3")
        return lambda id, k, said: last if k else turn("", (name, {"expression": "1+2"}))

    row = json.loads((folder / "gsm8k.jsonl").read_text().splitlines()[0])
    entry = json.loads((folder / "reasoning.jsonl").read_text().splitlines()[0])
    two = {"right": {"prompt": "1+2", "answer": "3"}, "wrong": {"prompt": "1+2", "answer": "4"}}
    printed = {"score": f"{HERE}/scores.py:printed"}
    asked = {"right": entry, "wrong": entry}
    cases = {name: (two, sums(), {"program": f"{programs} {HERE}/calc_{name}.py {{prompt}}", **printed})
             for name in ("http", "openai", "agents")}
    cases["smolagents"] = (two, sums("calculate_sum"), {"program": f"{programs} {HERE}/calc_smol.py {{prompt}}", **printed})
    cases["mcp"] = (two, sums(), {"mcp": (f"{programs} {HERE}/mcp_calc.py",)})
    cases["reasoning_gym"] = (asked, lambda id, k, said: turn(entry["answer"] if id == "right" else "none"), {
        "program": f"{programs} {HERE}/ask_once.py {{prompt}}", "score": f"{HERE}/reasoning.py:score", "python": gyms})
    cases["skyrl_gym"] = (dict.fromkeys(("right", "wrong"), row), lambda id, k, said: turn(
        f"#### {row['answer'] if id == 'right' else 'none'}" if k else "hm"), {
        "function": f"{HERE}/skyrl.py:SkyRL", "options": {"env": "gsm8k_multi_turn", "max_turns": 2}, "python": gyms})
    cases["verifiers"] = (two, sums(), {"program": by_verifiers(verifiers), "score": f"{HERE}/scores.py:rewarded", "step_seconds": 600.0})
    cases["openenv"] = ({id: row | {"question": "1+2"} for id, row in two.items()}, lambda id, k, said: turn("3" if k else "2"), {
        "function": "openenv", "servers": (service,), "options": {"reset": ("question", "answer")}})
    out = []
    for name, (tasks, model, env) in cases.items():
        with env_cases.pool(workers=1, **env) as pool:
            pool.ready()
            ends, said = env_cases.play(pool, tasks, model, 600.0)
        assert all(end.kind == "done" for end in ends.values()), [end.data for end in ends.values()]
        scores = {id: (ends[id].data["value"] or 0.0) + ends[id].data["reward"] for id in ("right", "wrong")}
        out.append({"name": name, **scores, "turns": len(said["right"]),
                    "sequences": 1 + sum(data["rewrite"] for data in said["right"])})
    return out


def run(name: str, folder: Path, warm: Path, given: tuple[str, ...], learn: int) -> dict:
    began = time.monotonic()
    how = (f"model.path={warm}", "run.warm_start=", *(SLOW.get(name, (f"train.steps={learn}",)) if learn else SHORT), *given)
    done = launch(sys.executable, ROOT, folder / name, *how, config="configs/env.py:calc")["summary"]
    if not done["finished"]:
        sys.exit(f"{name}: stopped after {done['steps']} steps")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    mean = lambda key: round(sum(s[key] for s in steps) / len(steps), 3)  # noqa: E731
    out = {"name": name, "commit": commit(), "steps": len(steps), "turns": mean("env/turns"), "turns_last": round(steps[-1]["env/turns"], 3),
           "sequences": mean("env/segments"), "absent": mean("env/absent_fraction"), "reward_first": round(steps[0]["reward/mean"], 3),
           "reward_last": round(sum(s["reward/mean"] for s in steps[-3:]) / len(steps[-3:]), 3),  # three steps' mean
           "gap_mean": sum(s["gap/mean"] for s in steps) / len(steps),
           "gap_max": max(s["gap/max"] for s in steps), "seconds": round(time.monotonic() - began)}
    if learn and done.get("eval_after"):
        out |= {"before": done["eval_before"]["accuracy"], "after": done["eval_after"]["accuracy"]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="")
    parser.add_argument("--gyms", default="")
    parser.add_argument("--verifiers", default="")
    parser.add_argument("--openenv", default="")
    parser.add_argument("--names", default="http,openai,agents,mcp,mcp_http,reasoning_gym,skyrl_gym,verifiers,openenv")
    parser.add_argument("--learn", default="http,mcp")
    parser.add_argument("--steps", type=int, default=40, help="of those")
    parser.add_argument("--keep", action="store_true", help="keep the last result's other runs")
    parser.add_argument("--warm", default="", help="an exported warm start, instead of one of its own")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="programs"))
    programs, gyms, verifiers, openenv = (python(name, getattr(given, name), folder) for name in PINS)
    rows(gyms, folder)
    ports = [free_port(), free_port()]
    servers = [subprocess.Popen([interpreter, HERE / file, str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
               for interpreter, file, port in zip((programs, openenv), ("mcp_calc.py", "openenv_sums.py"), ports, strict=True)]
    service = f"http://127.0.0.1:{ports[1]}"
    await_service(f"{service}/health")
    try:
        played, found, learn, warm = scripted(programs, gyms, verifiers, folder, service), [], given.learn.split(","), given.warm
        table(list(played[0]), [list(one.values()) for one in played])
        if given.names and not warm:
            warm = launch(sys.executable, ROOT, folder / "warm", "checkpoint.export_at_end=true",
                          config="configs/env_sft.py:calc")["summary"]["export"]
        for name, how in options(programs, gyms, verifiers, folder, ports[0], service).items():
            if name in given.names.split(","):
                found.append(run(name, folder, Path(warm), how, given.steps * (name in learn)))
                print(json.dumps(found[-1]), flush=True)
    finally:
        for server in servers:
            server.kill()
    if given.keep:
        last = json.loads((RESULTS / "programs.json").read_text())
        kept = [{"name": one["name"], "commit": last["commit"]} | one for one in last["results"]["runs"]]
        found = [one for one in kept if one["name"] not in given.names.split(",")] + found
    columns = list(dict.fromkeys(k for r in found for k in r))
    if found:
        table(columns, [[r.get(k, "") for k in columns] for r in found])
    least = {r["name"]: 0.9 if r["steps"] >= 40 else r.get("before", 0) for r in found}  # fewer steps need only to rise
    wrong = [r["name"] for r in found if r["absent"] or r["gap_mean"] > 1e-5 or r.get("after", 1) < least[r["name"]]]
    wrong += [r["name"] for r in found if r["name"] in learn and r["reward_last"] < r["reward_first"] + 0.3]
    wrong += [one["name"] for one in played if one["name"] != "mcp" and (one["right"], one["wrong"] > 0) != (1.0, False)]
    record("programs", {"versions": versions(verifiers, openenv, gyms, programs), "scripted": played, "runs": found, "missed": wrong})
    if wrong:
        sys.exit(f"missed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
