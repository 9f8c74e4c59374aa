"""checkpoint.dir: another folder, and a store without renames (a disk taken for one: the same code as on gs:// and s3://, but for what
carries the bytes)."""

import pytest
from test_checkpoint import host, make, same, state, tree

from jaxrl.checkpoint.checkpointer import CheckpointError
from jaxrl.checkpoint.files import COMMITTED, DamagedCheckpoint, folder_of, in_store, verify
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_checkpoints_lie_where_they_are_told_to(tmp_path, scheme):
    there = f"{scheme}{tmp_path}/there"
    assert in_store(folder_of(there)) is bool(scheme)
    run = make(tmp_path / "run", dir=there)
    assert run.save(7, tree(), {"a": 1}) and run.wait() is None and run.steps() == [7]
    run.close()
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["00000007"] and not (tmp_path / "run").exists()
    assert (tmp_path / "there" / "00000007" / COMMITTED).exists()
    restored = make(tmp_path / "run", dir=there).restore(tree())
    assert (restored.step, restored.host) == (7, {"a": 1}) and same(restored.arrays, tree())
    named = make(tmp_path / "other").restore(tree(), f"{there}/00000007")
    assert same(named.arrays, tree())


def test_a_store_has_what_was_committed_and_nothing_else(tmp_path):
    """The oldest are deleted, a save that failed before its mark is none and goes, a run that went back sets the later ones aside."""
    there, folder = f"file://{tmp_path}/there", tmp_path / "there"
    run = make(tmp_path, dir=there, keep=2, asynchronous=False)
    for step in (1, 2, 3):
        run.save(step, state(step), host(step))
    assert run.steps() == [2, 3] and sorted(p.name for p in folder.iterdir()) == ["00000002", "00000003"]
    run.close()

    failing = make(tmp_path, ["checkpoint.enospc@step=4,phase=commit"], dir=there, keep=2, asynchronous=False)
    assert failing.restore(state(0)).step == 3 and not failing.save(4, state(4), host(4))
    failing.close()
    assert not (folder / "00000004").exists()
    (folder / "00000004" / "arrays").mkdir(parents=True)  # of a process that was killed
    (folder / "00000004" / "arrays" / "part").write_bytes(b"x")
    again = make(tmp_path, dir=there, keep=2, asynchronous=False)
    assert again.steps() == [2, 3] and again.restore(state(0), f"{there}/00000002").step == 2
    again.save(4, state(5), host(4))
    assert again.steps() == [2, 4] and (folder / "00000003").is_dir()  # set aside: no checkpoint any more, and not deleted
    again.save(5, state(5), host(5))
    again.close()
    assert again.steps() == [4, 5] and (folder / "00000003" / "manifest.json").exists()
    assert same(make(tmp_path, dir=there).restore(state(0)).arrays, state(5))


def test_what_is_damaged_in_a_store_is_passed_over(tmp_path):
    """By sizes: what was written is not fetched again to be compared."""
    there, folder = f"file://{tmp_path}/there", tmp_path / "there"
    run = make(tmp_path, dir=there, asynchronous=False)
    for step in (1, 2):
        run.save(step, state(step), host(step))
    run.close()
    big = max((p for p in (folder / "00000002" / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    big.write_bytes(big.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="bytes instead of"):
        verify(folder_of(f"{there}/00000002"))
    assert make(tmp_path, dir=there).restore(state(0)).step == 1
    with pytest.raises(CheckpointError, match="is damaged"):
        make(tmp_path, dir=there).restore(state(0), f"{there}/00000002")


def test_addresses_that_cannot_be_are_refused():
    c = default_config()
    c.model.path, c.data.path = "some/model", ("some.jsonl",)
    for name, value, message in (("dir", "ftp://x/y", "checkpoint.dir='ftp://x/y': checkpoints go to a folder, gs://"),
                                 ("upload.checkpoints", "all", "they lie elsewhere already")):
        put(c, f"checkpoint.{name}", value)
        c.checkpoint.upload.to = ("memory://x",)
        c.checkpoint.dir = c.checkpoint.dir if name == "dir" else "file:///x"
        with pytest.raises(ConfigError, match=message):
            check(c)
