"""A program for an OpenAI API that knows nothing of jaxrl: standard library, one episode per run. Its task (JSON on standard input)
says in row["kind"] what it does."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}


def ask(messages, path="/chat/completions", headers=(), key=None, **fields):
    """(status, body) of a call; the events where it streams."""
    body = json.dumps({"model": "any", "messages": messages, **fields}).encode() if messages is not None else None
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, {
        "Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            data = reply.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())["error"]["message"]
    return 200, [line[6:] for line in data.split("\n\n") if line] if fields.get("stream") else json.loads(data)


def said(answer):
    return answer[1]["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def conversation(task):
    """Goes on, strips what it was told, changes its mind."""
    messages = [{"role": "developer", "content": "Be brief."}, user([{"type": "text", "text": task["prompt"]}])]
    first = ask(messages, temperature=0.1, max_tokens=9, stop="END", seed=3)
    messages += [{"role": "assistant", "content": said(first)["content"].strip()}, user("And?")]
    second = ask(messages)
    messages[2:] = [user("Anew.")]
    ask(messages)
    return len(said(second)["content"])


def tools(task):
    """A call, run here; then one that cannot be read; then without tools."""
    messages = [user("2+3")]
    answer = ask(messages, tools=[TOOL], tool_choice="auto")
    assert answer[1]["choices"][0]["finish_reason"] == "tool_calls", answer
    call = said(answer)["tool_calls"][0]
    messages += [said(answer), {"role": "tool", "tool_call_id": call["id"],
                                "content": str(sum(json.loads(call["function"]["arguments"]).values()))}]
    broken = said(ask(messages, tools=[TOOL]))
    assert "tool_calls" not in broken
    messages += [broken, user("No call.")]
    return said(ask(messages))["content"]


def streamed(task):
    """(pieces of the content, why it ended, its tokens)"""
    _, events = ask([user("go")], stream=True, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    objects = [json.loads(e) for e in events]
    *deltas, last, usage = objects
    return ["".join(o["choices"][0]["delta"].get("content", "") for o in deltas), last["choices"][0]["finish_reason"],
            usage["usage"]["total_tokens"]]


def refused(task):
    """Why each of these is."""
    go = [user("go")]
    bad = [dict(n=2), dict(logit_bias={"1": 2}), dict(response_format={"type": "json_object"}), dict(logprobs=True),
           dict(tool_choice={"type": "function", "function": {"name": "add"}}), dict(colour="red"), dict(stop=[3])]
    said = [ask(go, **fields) for fields in bad]
    said += [ask([user([{"type": "image_url", "image_url": {"url": "x"}}])]), ask([{"role": "x", "content": "y"}]), ask([]),
             ask(go, key="sk-other"), ask(go, "/embeddings"), ask(None, "/chat/completions")]
    assert ask(None, "/models")[1]["data"][0]["id"] == "policy"
    ask(go, n=1, response_format={"type": "text"}, logit_bias=None)
    return said


def sides(task):
    """A title by the header, a summary by the predicate of the test, a turn, what an SDK sends again, the same once more."""
    title = said(ask([user("Title?")], headers={"X-Jaxrl-Train": "false"}))["content"]
    said(ask([user("Summary?")], user="side"))
    once = ask([user("go")])[1]
    again = ask([user("go")], headers={"x-stainless-retry-count": "1"})[1]
    assert once == again
    other = ask([user("go")])[1]
    assert other["id"] != once["id"]
    late = ask([user("gone")], headers={"x-stainless-retry-count": "2"})[1]  # the first one was lost on the way
    return [title, late["choices"][0]["message"]["content"]]


def rejected(task):
    """An untrained call whose messages the test's template rejects."""
    ask([{"role": "system", "content": "Title?"}, user("go")], headers={"X-Jaxrl-Train": "false"})


def pictures(task):
    """Shows the image of the row's column `shown`, goes on with another, and tries what may not be shown."""
    def part(url):
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}

    messages = [user([{"type": "text", "text": "red"}, part(task["row"]["shown"]), {"type": "text", "text": "?"}])]
    for more in (task["row"]["shown"], None):
        first = ask(messages)
        if first[0] != 200:
            return [list(first)]
        messages += [said(first), user([part(more) if more else {"type": "image"}])]
    bad = part("http://127.0.0.1/a.png"), part("a.png"), {"type": "image_url"}, {"type": "image_url", "image_url": {"url": 3}}, \
        {"type": "input_audio"}
    refusals = [ask([user([one])]) for one in bad]
    return [*refusals, ask([{"role": "assistant", "content": [part(task["row"]["shown"])]}, user("go")])]


def once(task):
    """Asks what the row asks."""
    ask([user(task["prompt"])])


def ends(task):
    """After a turn, in some way."""
    kind = task["row"]["how"]
    print("words " * 3, file=sys.stderr)
    ask([user("go")])
    if kind == "status":
        sys.exit(3)
    if kind == "raise":
        raise ValueError("no")
    if kind == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        time.sleep(60)
    if kind == "memory":
        held = b"x" * (400 << 20)
        time.sleep(60 + len(held) * 0)
    if kind == "flood":
        print("x" * (3 << 20))
    if kind in ("nothing", "none"):
        return None
    if kind == "broken":
        Path("reward.json").write_text("{")
    if kind == "nan":
        Path("reward.json").write_text("NaN")
    if kind == "text":
        Path("reward.json").write_text('"good"')
    if kind == "child":  # leaves its session, closes its streams, outlives its parent
        code = "import os, sys, time; os.setsid(); [os.close(k) for k in range(3)]; time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code])
        Path(task["row"]["mark"]).write_text(f"{child.pid} {os.getcwd()}")
    if kind == "many":
        while True:
            ask([user("more")])
    return None


def main():
    task = json.load(sys.stdin)
    kinds = {f.__name__: f for f in (conversation, tools, streamed, refused, sides, ends, once, pictures, rejected)}
    found = kinds.get(task["row"].get("kind"), once)(task)
    if found is not None:
        print(json.dumps({"said": found, "argv": sys.argv[1:], "folder": os.listdir("."), "seed": task["seed"]}))
        Path("reward.json").write_text(json.dumps({"env": 0.5, "turns": 3}))


if __name__ == "__main__":
    main()


# what runs in the worker: env.score, env.train_calls


def printed(task, ran):
    """1 for a program that ended well; what it printed is asked for by the test, as a note."""
    path = task.row.get("told")
    if path:
        Path(path).write_text(json.dumps({"exit": ran.exit, "stdout": ran.stdout[-4000:], "size": len(ran.stdout),
                                          "stderr": ran.stderr, "messages": ran.messages}))
    return float(ran.exit == 0)


def digits(task, ran):
    """What worlds.single returns."""
    text = ran.messages[-1]["content"]
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def no_summaries(request):
    return request.get("user") != "side"
