"""Rows of reasoning-gym and their score: `python reasoning.py TASK COUNT` writes rows as JSON lines; `score` is for env.score, in an
interpreter (env.python) that has the package."""

import json
import sys


def score(task, ran) -> float:
    import reasoning_gym
    entry = json.loads(task.row["entry"])
    judge = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(judge(answer=ran.stdout.strip(), entry=entry))


def main():
    import reasoning_gym
    for entry in reasoning_gym.create_dataset(sys.argv[1], size=int(sys.argv[2]), seed=0, max_digits=1, max_terms=2):
        print(json.dumps({"prompt": entry["question"], "answer": str(entry["answer"]), "entry": json.dumps(entry)}))


if __name__ == "__main__":
    main()
