"""Names, completeness and pruning of checkpoints, and the rows that a resumed run writes on."""

import pytest

from common import checkpoint
from common.errors import UsageError
from common.meters import Rows, read_rows


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
    checkpoint.prune(out, 1, saved=400)
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


def test_only_folders_called_checkpoint_and_a_number_are_candidates(out):
    (out / "checkpoint-007").mkdir()  # no run writes leading zeros
    (out / "checkpoint-8x").mkdir()
    (out / "checkpoint--5").mkdir()
    (out / "checkpoint-").mkdir()
    assert checkpoint.steps_in(out) == [9, 10, 100, 400]
    assert checkpoint.steps_in(out / "nowhere") == []
    checkpoint.prune(out, 1, saved=400)
    assert (out / "checkpoint-007").is_dir()


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_saving_and_pruning_in_turn_leaves_the_last_ones(tmp_path, keep):
    saved = [8, 9, 10, 11, 99, 100, 101, 1000]
    for n, step in enumerate(saved, 1):
        whole(tmp_path, step)
        checkpoint.prune(tmp_path, keep, saved=10**9)
        assert checkpoint.steps_in(tmp_path) == saved[max(0, n - keep) : n]
        assert checkpoint.find(tmp_path, "latest")[0].name == f"checkpoint-{step}"


def test_a_damaged_checkpoint_of_a_later_step_does_not_push_out_the_one_just_saved(tmp_path):
    for step in (10, 20, 30):
        whole(tmp_path, step)
    (tmp_path / "checkpoint-30" / ".metadata").unlink()  # so the run was resumed from 20
    whole(tmp_path, 25)
    checkpoint.prune(tmp_path, 1, saved=10**9)
    assert checkpoint.find(tmp_path, "latest")[0].name == "checkpoint-25"
    assert checkpoint.steps_in(tmp_path) == [25, 30]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"files": 3}', b"\xff\xfe"])
def test_a_state_file_that_says_nothing_is_damage_and_no_crash(out, content):
    (out / "checkpoint-100" / "state.json").write_bytes(content)
    with pytest.raises(UsageError, match="checkpoint-100 is not a whole checkpoint: state.json is damaged"):
        checkpoint.find(out, str(out / "checkpoint-100"))
    assert checkpoint.find(out, "latest")[0].name == "checkpoint-10"


def test_the_state_of_a_whole_checkpoint_comes_back_as_it_was_sealed(tmp_path):
    (tmp_path / "a.distcp").write_bytes(b"123")
    checkpoint.seal(tmp_path, {"step": 4, "position": {"epoch": 1}})
    state = checkpoint.read_state(tmp_path)
    assert state == {"step": 4, "position": {"epoch": 1}, "files": {"a.distcp": 3}}
    checkpoint.seal(tmp_path, {"step": 4})  # sealing twice does not list the seal itself
    assert checkpoint.read_state(tmp_path)["files"] == {"a.distcp": 3}


def test_each_checkpoint_that_latest_passes_over_is_named(out):
    for step in (10, 100):
        (out / f"checkpoint-{step}" / ".metadata").write_bytes(b"")
    folder, _, warnings = checkpoint.find(out, "latest")
    assert folder.name == "checkpoint-9"
    assert [w.split(" is not")[0].rsplit("/", 1)[1] for w in warnings] == [f"checkpoint-{s}" for s in (400, 100, 10)]


@pytest.mark.parametrize("sign", ["metrics.jsonl", "checkpoint-5"])
def test_an_out_that_holds_a_run_is_refused_by_either_sign_and_left_alone(tmp_path, sign):
    (tmp_path / "metrics.jsonl").touch() if "." in sign else (tmp_path / sign).mkdir()
    with pytest.raises(UsageError, match="already holds a run: add --resume latest"):
        checkpoint.choose_out(str(tmp_path), "ddp", None)
    assert [p.name for p in tmp_path.iterdir()] == [sign]


def test_an_out_with_other_files_or_in_a_new_place_is_taken(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "checkpoint-x").mkdir()
    assert checkpoint.choose_out(str(tmp_path), "ddp", None) == tmp_path
    new = tmp_path / "a" / "b"
    assert checkpoint.choose_out(str(new), "ddp", None) == new and list(new.iterdir()) == []


def test_an_out_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UsageError, match="mine cannot be written.*choose another folder"):
        checkpoint.choose_out(str(tmp_path / "mine"), "ddp", None)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_resume_by_path_writes_on_in_the_folder_of_that_checkpoint(out):
    assert checkpoint.choose_out(None, "ddp", str(out / "checkpoint-9")) == out.resolve()


def test_scripts_number_their_runs_apart_and_numerically(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ddp-009", "ddp-010", "ddp-1000", "fsdp-003", "ddp-mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert checkpoint.choose_out(None, "ddp", "latest").name == "ddp-1000"
    assert checkpoint.choose_out(None, "ddp", None).name == "ddp-1001"
    assert checkpoint.choose_out(None, "fsdp", None).name == "fsdp-004"


def test_a_plan_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.choose_out(None, "ddp", None, create=False).name == "ddp-001"
    checkpoint.choose_out("mine", "ddp", None, create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tail", ["", '{"step": 5, "lo', '{"step": 3, "loss": 1.0}', "3\n", "[]\n"])
def test_a_resumed_run_writes_each_step_once_after_whatever_a_killed_one_left(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {k}, "loss": 1.0}}\n' for k in range(5)) + tail)
    rows = Rows(path, 3)
    rows.write({"step": 4, "loss": float("nan")})
    rows.close()
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3, 4]
    assert read_rows(path)[-1]["loss"] is None


def test_the_one_just_saved_is_kept_beside_later_ones_of_an_abandoned_branch(tmp_path):
    for step in (100, 150, 400):  # resumed from 100 by its path, and just saved 150
        whole(tmp_path, step)
    checkpoint.prune(tmp_path, 1, saved=150)
    assert checkpoint.steps_in(tmp_path) == [150, 400]


def test_a_runs_folder_that_links_nowhere_is_an_error_and_no_endless_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("gone")
    with pytest.raises(UsageError, match="runs/"):
        checkpoint.choose_out(None, "ddp", None)
