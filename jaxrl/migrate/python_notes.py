"""What a program in Python does to its rows, tokenizer and model that no argument of a call says: it is asked for.

python_files.py reads the calls. Nothing is executed, and nothing is read here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

ROWS = (  # methods that change rows, and how many there are
    *("map", "filter", "select", "take", "skip", "shard", "train_test_split", "class_encode_column", "flatten"),
    *("rename_column", "rename_columns", "add_column", "add_item", "cast_column"),
)
JOINED = ("concatenate_datasets", "interleave_datasets")


def name_of(node: ast.AST) -> str:
    """Returns the dotted name of an expression of names and attributes, "a.b"; "" of another, ".b" of an attribute of
    such."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST) -> str:
    """Returns an expression as one line of at most 60 characters; its node's type where it has no text."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError, AttributeError):
        text = type(node).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def notes(nodes: list[ast.AST], loads: Mapping, surgery: bool, file: str) -> list[str]:
    """Returns the questions to the user about what a program does to rows: those that it changes, joins, or reads
    beside the first ones; with `surgery` also about chat templates, parameters that learn, callbacks and tokens.

    Args:
      nodes: of the program's tree, without the branches that are ruled out.
      loads: functions that load rows, by their last names.
      surgery: whether models and tokenizers are torch's, whose attributes a program may set.
      file: the program's name, for the places."""
    texts = list(_rows(nodes, loads, file))
    return [*texts, *_model(nodes, file)] if surgery else texts


def other_tokenizer(node: ast.Call, known, file: str) -> list[str]:
    """Returns a question to the user, in a list, about the tokenizer of a trainer's call `node` where it is another
    than its model's; [] where it is the same, or not given by `from_pretrained`. known: the program's names
    (python_values.Values)."""
    given = {k.arg: k.value for k in node.keywords}
    loaded = known.loaded(given.get("processing_class") or given.get("tokenizer") or ast.Constant(None))
    model = given.get("model", ast.Constant(None))
    if loaded is None:
        return []
    found = (known.loaded(model) or model, loaded)
    of, path = (known.value(n.args[0] if isinstance(n, ast.Call) and n.args else n) for n in found)
    what = f"{file}:{node.lineno}: the tokenizer is that of {path}, the model {of}"
    return [f"{what}: if they differ, name it in model.tokenizer"] if str(of) != str(path) else []


def _held(nodes: list[ast.AST], loads: Mapping) -> Callable[[ast.AST], bool]:
    """Returns whether an expression holds rows: it loads them, or names what was made of such."""
    assigned = [(n.targets[0], n.value) for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
    names: set[str] = set()

    def holds(node: ast.AST) -> bool:
        return any(
            isinstance(n, ast.Call) and name_of(n.func).rpartition(".")[2] in loads
            or isinstance(n, ast.Name) and (n.id in names or "dataset" in n.id.lower())
            for n in ast.walk(node)
        )

    for _ in range(3):
        for target, value in assigned:
            if isinstance(value, ast.Call | ast.Subscript | ast.Name) and holds(value):
                names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return holds


def _rows(nodes: list[ast.AST], loads: Mapping, file: str) -> Iterator[str]:
    """Yields what is asked of rows that a program changes, joins or reads beside the first ones."""
    holds, first = _held(nodes, loads), ""
    calls = sorted((n for n in nodes if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset))
    for n in calls:
        last = name_of(n.func).rpartition(".")[2]
        method = n.func if isinstance(n.func, ast.Attribute) and n.func.attr in ROWS else None
        named = method is not None and isinstance(method.value, ast.Name) and "data" in method.value.id
        if method is not None and (n.args or n.keywords) and (named or holds(method.value)):
            what = f"rows are changed in Python, {text_of(n)}"
            yield f"{file}:{n.lineno}: {what}: write them as they come out into a file, and name it in data.path"
        elif last in JOINED:
            yield f"{file}:{n.lineno}: rows are joined in Python, {text_of(n)}: name each set in data.sources"
        elif last in loads and n.args:
            rows = text_of(n.args[0])
            if first and rows != first:
                what = f"the rows of {text_of(n)} are not read"
                yield f"{file}:{n.lineno}: {what}: name them in data.sources or eval.sets"
            first = first or rows


def _model(nodes: list[ast.AST], file: str) -> Iterator[str]:
    """Yields what is asked of models and tokenizers whose parts a program sets."""
    guarded = {
        id(inner)
        for n in nodes
        if isinstance(n, ast.If) and "chat_template" in text_of(n.test)
        for inner in ast.walk(n)
    }
    for n in nodes:
        at = f"{file}:{getattr(n, 'lineno', 0)}"
        targets = n.targets if isinstance(n, ast.Assign) else []
        method = n.func.attr if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) else ""
        attributes = {target.attr for target in targets if isinstance(target, ast.Attribute)}
        if "chat_template" in attributes and id(n) not in guarded:
            what = "a chat template is set in Python"
            yield f"{at}: {what}: write it into a file, and name it in model.chat_template"
        if "requires_grad" in attributes or method == "requires_grad_":
            what = f"{text_of(n)} says which parameters learn"
            yield f"{at}: {what}: name them in model.frozen or model.trainable"
        if method in ("add_callback", "resize_token_embeddings", "add_special_tokens", "add_tokens"):
            what = {"add_callback": "jaxrl.train(callbacks=...) (docs/guides/callbacks.md)"}
            where = what.get(method, "a model whose folder has it")
            yield f"{at}: {text_of(n)} is not carried over: {where} does it"
