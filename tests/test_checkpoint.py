"""Names, completeness and pruning of checkpoints."""

import pytest

from common import checkpoint
from common.errors import UsageError


def whole(out, step):
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * 100)
    (folder / ".metadata").write_bytes(b"y" * 10)
    checkpoint.seal(folder, {"step": step})
    return folder


@pytest.fixture
def out(tmp_path):
    for step in (9, 10, 100):
        whole(tmp_path, step)
    (tmp_path / "checkpoint-200.tmp").mkdir()
    (tmp_path / "checkpoint-150.partial").mkdir()
    (tmp_path / "checkpoint-abc").mkdir()
    (tmp_path / "checkpoint-300").write_text("a file")
    (tmp_path / "checkpoint-400").mkdir()
    (tmp_path / "my-checkpoint-500").mkdir()
    return tmp_path


def test_the_latest_is_the_largest_number_that_is_whole(out):
    folder, state, warnings = checkpoint.find(out, "latest")
    assert folder.name == "checkpoint-100" and state["step"] == 100
    assert len(warnings) == 1 and "checkpoint-400" in warnings[0]


def test_pruning_keeps_the_newest_and_touches_nothing_else(out):
    (out / "checkpoint-400").rmdir()
    checkpoint.prune(out, 1)
    left = {p.name for p in out.iterdir()}
    assert left == {
        "checkpoint-100",
        "checkpoint-200.tmp",
        "checkpoint-150.partial",
        "checkpoint-abc",
        "checkpoint-300",
        "my-checkpoint-500",
    }


@pytest.mark.parametrize(
    "name, damage, said",
    [
        (".metadata", "gone", r"\.metadata is missing"),
        (".metadata", "empty", r"\.metadata has 0 bytes of 10"),
        ("__0_0.distcp", "cut", "__0_0.distcp has 60 bytes of 100"),
        ("__0_0.distcp", "gone", "__0_0.distcp is missing"),
        ("state.json", "cut", "state.json is damaged"),
        ("state.json", "gone", "state.json"),
    ],
)
def test_damage_is_named_and_latest_takes_the_one_before(out, name, damage, said):
    file = out / "checkpoint-100" / name
    content = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(
        b"" if damage == "empty" else content[: len(content) * 6 // 10]
    )
    with pytest.raises(UsageError, match=f"checkpoint-100.*{said}"):
        checkpoint.find(out, str(out / "checkpoint-100"))
    assert checkpoint.find(out, "latest")[0].name == "checkpoint-10"


def test_latest_without_any_starts_at_0_and_says_so(tmp_path):
    assert checkpoint.find(tmp_path, "latest")[:2] == (None, None)
    assert "starting at step 0" in checkpoint.find(tmp_path, "latest")[2][0]


def test_a_wrong_path_is_answered_with_what_is_there(out):
    with pytest.raises(UsageError, match="checkpoint-9, checkpoint-10, checkpoint-100"):
        checkpoint.find(out, str(out / "checkpoint-11"))


def test_runs_are_numbered_and_a_full_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [checkpoint.choose_out(None, "ddp", None).name for _ in range(3)] == ["ddp-001", "ddp-002", "ddp-003"]
    assert checkpoint.choose_out(None, "ddp", "latest").name == "ddp-003"
    whole(tmp_path / "mine", 1)
    with pytest.raises(UsageError, match="already holds a run.*--resume latest"):
        checkpoint.choose_out("mine", "ddp", None)
    assert checkpoint.choose_out("mine", "ddp", "latest").name == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        checkpoint.choose_out("file/run", "ddp", None)
