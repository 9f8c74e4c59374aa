"""env.mcp: tools of MCP servers, over standard streams and over HTTP; what they do wrong, and whose fault it is."""

import sys
import threading
from pathlib import Path

import pytest
from helpers import env_cases, mcp_server
from helpers.env_cases import play, texts, turn

from jaxrl.errors import ConfigError

STDIO = f"{sys.executable} {Path(__file__).parents[1] / 'helpers' / 'mcp_server.py'} stdio"


@pytest.fixture(scope="module")
def url():
    server = mcp_server.http.server.ThreadingHTTPServer(("127.0.0.1", 0), mcp_server.Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    server.shutdown()
    server.server_close()


@pytest.fixture
def pool():
    made = []

    def make(*servers, **changes):
        made.append(env_cases.pool(mcp=servers, **{"workers": 1, "step_seconds": 30.0, "max_parallel_calls": 4} | changes))
        made[-1].ready()
        return made[-1]

    yield make
    for p in made:
        p.close()


def calling(*calls):
    """A model that makes these calls, one in each turn, then says `done`."""
    return lambda id, k, said: turn("", calls[k]) if k < len(calls) else turn("done")


CALLS = (("count", {}), ("add", {"a": 2, "b": 3}), ("add", {"a": 2}), ("act", {"how": "refuse"}), ("act", {"how": "structured"}),
         ("no", {}), ("count", {}))
SAID = ["go", "1", "5", "a and b are needed", "not today", '{"x": 1}', "There is no such tool. There are: add, count, act.", "6"]


@pytest.mark.full
@pytest.mark.parametrize("wire", ["stdio", "http"])
def test_tools_of_a_server(pool, url, wire):
    """Listed over pages, called, refused; each episode has a session of its own unless they share one."""
    p = pool(STDIO if wire == "stdio" else url)
    assert [t["function"]["name"] for t in p.tools] == ["add", "count", "act"]
    assert p.tools[0]["function"]["parameters"] == mcp_server.NUMBERS
    ends, said = play(p, {"a": {}, "b": {}}, calling(*CALLS))
    assert {e.kind for e in ends.values()} == {"done"} and texts(said["a"]) == texts(said["b"]) == SAID
    assert ends["a"].data["counts"] == {"calls": 7, "malformed": 1}
    shared = pool(STDIO if wire == "stdio" else url, mcp_session="worker", tools=(f"{__file__}:half",))
    assert [t["function"]["name"] for t in shared.tools] == ["half", "add", "count", "act"]
    counted = [play(shared, {id: {}}, calling(("count", {}), ("half", {"a": 4})))[1][id] for id in "ab"]
    assert [texts(said) for said in counted] == [["go", "1", "2.0"], ["go", "2", "2.0"]]


def half(a: int) -> float:
    """Halves.

    Args:
        a: a number
    """
    return a / 2


@pytest.mark.slow
def test_what_servers_do_wrong(pool, url):
    """All of it is the environment's fault, has its cause, and ends in time."""
    p, q = pool(STDIO, step_seconds=20.0), pool(url)
    rows = dict.fromkeys(("die", "hang", "garbage", "error", "odd"), {})
    ends, _ = play(p, rows, lambda id, k, said: turn("", ("act", {"how": id})))
    causes = {id: (e.data["fault"], e.data["cause"].replace(" (in tool act)", "")) for id, e in ends.items()}
    who = f"MCP server '{Path(sys.executable).name} mcp_server.py stdio'"
    assert causes == {
        "die": ("env", f"{who} ended"), "garbage": ("env", f"{who} wrote invalid JSON: 'no json\\n'"),
        "hang": ("late", "a turn took longer than env.step_seconds=20"),
        "error": ("env", f"{who} replied to tools/call with error -32000: out of order"),
        "odd": ("env", f"{who} replied to tools/call without a result")}
    for how, cause in (("truncated", "wrote invalid JSON"), ("lost", "has lost the session")):
        ends, _ = play(q, {"a": {}}, lambda id, k, said, how=how: (
            mcp_server.Handler.sessions.clear() if how == "lost" else None, turn("", ("act", {"how": how})))[1])
        assert cause in ends["a"].data["cause"] and ends["a"].data["fault"] == "env"
    env_cases.alone(p)


def test_servers_that_cannot_be_had():
    for given, why in (("no-such-server", "not found; install it"), (f"{sys.executable} -c pass", "ended"),
                       ("http://127.0.0.1:9/mcp", "ConnectionRefusedError")):
        with pytest.raises(ConfigError, match=why), env_cases.pool(mcp=(given,), workers=1) as p:
            p.ready()
