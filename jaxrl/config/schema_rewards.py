"""Options of rewards that are asked over HTTP. See schema.py, of which this is a part."""

from __future__ import annotations

from jaxrl.config.option import Option as O

FORMATS = ("own", "cosmos", "areal", "classify", "pooling")

REMOTE = {
    "servers": O((), "URLs of the service behind the reward `remote` (docs/guides/rewards.md); several take the batches in turns; one without a path"
                     " gets the format's own"),
    "format": O("own", "what is sent and what comes back: own (items, scores); cosmos (Cosmos-RL: enqueue, poll); areal (AReaL's function call"
                       " for code); classify, pooling (vLLM, on token ids, without activation)", choices=FORMATS),
    "key_env": O("", "name of the environment variable that holds the bearer token; empty = none is sent"),
    "batch": O(32, "completions of one batch", bound=">0"),
    "concurrency": O(8, "batches that a reward worker has under way", bound=">0"),
    "deadline_seconds": O(60.0, "longest wait for a batch's scores, all tries, waits and polls counted", bound=">0"),
    "retries": O(5, "further tries after 408, 425, 429, 5xx and lost connections, within the deadline", bound=">=0"),
    "columns": O(("answer",), "data columns that are sent: own, cosmos, areal", needs="reward.remote.format=own|cosmos|areal"),
    "score_key": O("", "own, cosmos: keys of the scores, joined by +; areal: key of the verdict; classify, pooling: number of the label. Empty ="
                       " the format's own: scores are plain numbers; overall_reward; success; there is one label"),
    "functions": O((), "cosmos: names of the service's reward functions", needs="reward.remote.format=cosmos"),
    "weights": O((), "one per function of a cosmos service, else per key of score_key; empty = all 1"),
    "part_min": O(None, "each key's score (cosmos: each function's) is at least this, before its weight", float),
    "part_max": O(None, "and at most this", float),
    "clip_min": O(None, "their sum is at least this", float),
    "clip_max": O(None, "and at most this", float),
    "scale": O(1.0, "then multiplied with this"),
    "fetch_url": O("", "cosmos: where scores are polled; empty = the URL with pull for enqueue at its end",
                   needs="reward.remote.format=cosmos"),
    "language": O("python", "areal: language of the code; it is the last fenced block of the completion, else all of it",
                  needs="reward.remote.format=areal"),
    "model": O("", "classify, pooling: the model's name at the server; empty = its only one",
               needs="reward.remote.format=classify|pooling"),
    "task": O("", "pooling: vLLM's task, e.g. token_classify, of which the last token counts; empty = the server's choice",
              needs="reward.remote.format=pooling"),
}

JUDGE = {
    "servers": O((), "OpenAI-compatible endpoints of the reward `judge`, up to and with /v1, which are asked in turns; empty = a vLLM server"
                     " of the run's own that has reward.judge.model"),
    "model": O("", "name of the model there; or the folder or hub id that a server of the run's own loads"),
    "key_env": O("", "name of the environment variable that holds the bearer token; empty = none is sent", needs="reward.judge.servers"),
    "prompt_file": O("", "text with {prompt}, {completion}, {rubric}, {answer}, {lowest}, {highest}; {{ and }} are braces; empty = a text of"
                         " jaxrl's"),
    "rubric": O("", "what {rubric} stands for"),
    "rubric_column": O("", "data column of {rubric}, for rows that have one"),
    "show_images": O(False, "the judge is shown the images of the row's prompt, as data URIs before the text"),
    "pattern": O(r"(?i)score(?:[^\w-]|-(?=\s)){0,4}(-?\d++(?:\.\d++)?+)(?![\w.]*\d)",
                 "regex whose group 1 is the score; its last match in a reply counts"),
    "words": O({}, "words that pattern's group 1 may be, and the scores that they stand for: {'yes': 1, 'no': 0}; case does not count"),
    "lowest": O(0.0, "lowest score that may be given: reward 0; beyond it a reply is unreadable"),
    "highest": O(10.0, "highest score: reward 1"),
    "max_new_tokens": O(512, "longest reply of the judge, in tokens", bound=">0"),
    "concurrency": O(32, "completions that a reward worker has judged at once", bound=">0"),
    "deadline_seconds": O(120.0, "longest judgement of one completion, all tries counted", bound=">0"),
    "retries": O(5, "further tries after 408, 425, 429, 5xx and lost connections, within the deadline", bound=">=0"),
    "extra": O({}, "further fields of the requests, e.g. {'chat_template_kwargs': {'enable_thinking': False}}"),
    "cache": O("auto", "folder of replies by content: model, whole prompt and fields of the request; auto = <run.dir>/judge; empty = none"),
    "labelled": O("", "JSONL of rows with prompt, completion, score (on the judge's scale) and the columns of the prompt: agreement with them is"
                      " printed before training"),
    "min_agreement": O(0.0, "the run stops if the judge agrees with a smaller share of the rows", bound="0..1", needs="reward.judge.labelled"),
    "devices": O("", "CUDA_VISIBLE_DEVICES of a server of the run's own; empty = as jaxrl's", needs="not reward.judge.servers"),
    "server_args": O({}, "its further vLLM options, e.g. {'tensor_parallel_size': 2}", needs="not reward.judge.servers"),
}
