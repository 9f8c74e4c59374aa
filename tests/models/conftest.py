"""Fixtures of the tests of models."""

import pytest
from helpers.tiny_models import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(architecture, options of make_tiny) -> the folder of a tiny random model of transformers', made once a file."""
    made = {}

    def get(architecture, **options):
        key = architecture, *options.items()
        if key not in made:
            made[key] = make_tiny(architecture, tmp_path_factory.mktemp(architecture), tokenizer=False, **options)
        return made[key]

    return get
