"""Names, completeness and pruning of checkpoints; the tensors themselves are written by the scripts.

    runs/ddp-001/checkpoint-200/     .metadata, *.distcp     tensors, sharded over the ranks that wrote them
                                     state.json              step, place in the data, flags, and the size of every file

A checkpoint is written as `checkpoint-200.partial` and renamed last, so whatever is called checkpoint-N was whole once;
the sizes in state.json tell whether it still is.
"""

import json
import os
import re
import shutil
from pathlib import Path

from common.errors import UsageError

STATE = "state.json"


def path_of(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}"


def partial_of(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}.partial"


def steps_in(out: Path) -> list[int]:
    """Steps that have a checkpoint folder, in numeric order (10 comes after 9)."""
    folders = [p.name for p in out.iterdir() if p.is_dir()] if out.is_dir() else []
    return sorted(int(m[1]) for name in folders if (m := re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", name)))


def seal(folder: Path, state: dict) -> None:
    """Write state.json, with the size of every other file, as the last file of a checkpoint."""
    files = {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.name != STATE}
    with open(folder / STATE, "w", encoding="utf-8") as file:
        json.dump(state | {"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def finish(aside: Path, state: dict, keep: int) -> None:
    """All ranks have written: seal, rename, and only then delete older ones."""
    seal(aside, state)
    folder = path_of(aside.parent, state["step"])
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one of the same step
    aside.rename(folder)
    prune(aside.parent, keep, state["step"])


def read_state(folder: Path) -> dict:
    """state.json of a whole checkpoint; raises UsageError that says what is missing or cut."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = dict(state["files"])
    except OSError as error:
        raise UsageError(f"{folder} is not a whole checkpoint: {STATE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{folder} is not a whole checkpoint: {STATE} is damaged") from None
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise UsageError(f"{folder} is not a whole checkpoint: {name} is missing")
        if found != size:
            raise UsageError(f"{folder} is not a whole checkpoint: {name} has {found} bytes of {size}")
    return state


def is_whole(folder: Path) -> bool:
    try:
        read_state(folder)
    except UsageError:
        return False
    return True


def find(out: Path, resume: str) -> tuple[Path | None, dict | None, list[str]]:
    """What --resume means: (folder, its state, warnings); (None, None, ...) when 'latest' finds nothing whole.

    'latest' passes over damaged checkpoints with a warning; a checkpoint asked for by its path must be whole.
    """
    if resume != "latest":
        folder = Path(resume)
        if not folder.is_dir():
            there = steps_in(folder.parent)
            hint = f"; {folder.parent} has {', '.join(f'checkpoint-{s}' for s in there)}" if there else ""
            raise UsageError(f"--resume {resume}: no such checkpoint folder{hint}")
        return folder, read_state(folder), []
    warnings = []
    for step in reversed(steps_in(out)):
        try:
            return path_of(out, step), read_state(path_of(out, step)), warnings
        except UsageError as error:
            warnings.append(f"passed over: {error}")
    return None, None, [*warnings, f"no whole checkpoint in {out}: starting at step 0"]


def prune(out: Path, keep: int, saved: int) -> None:
    """Delete what is older than the newest `keep` whole checkpoints up to the one just `saved`.

    A damaged one does not count; later ones, left by a run that was resumed from before them, are not touched.
    """
    steps = [step for step in steps_in(out) if step <= saved]
    kept = [step for step in steps if is_whole(path_of(out, step))][-keep:]
    for step in steps:
        if kept and step < kept[0]:
            shutil.rmtree(path_of(out, step))


# ── The folder of a run ──────────────────────────────────────────────────────────────────────────────────────────────
def holds_a_run(out: Path) -> bool:
    return (out / "metrics.jsonl").exists() or bool(steps_in(out))


def choose_out(out: str | None, script: str, resume: str | None, create: bool = True) -> Path:
    """The folder of the run; without --out, the next free runs/SCRIPT-NNN, or the newest one for `--resume latest`.

    Raises UsageError for a folder that holds a run already, or cannot be written.
    """
    if out is None and resume not in (None, "latest"):
        return Path(resume).resolve().parent
    folder = Path(out) if out is not None else _numbered(script, resume, create)
    if resume is None and out is not None and holds_a_run(folder):
        raise UsageError(f"--out {out} already holds a run: add --resume latest, or choose another folder")
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise UsageError(f"--out {folder} cannot be written: {error.strerror}; choose another folder") from None
    return folder


def _numbered(script: str, resume: str | None, create: bool) -> Path:
    runs = Path("runs")
    taken = sorted(
        int(m[1]) for p in (runs.iterdir() if runs.is_dir() else []) if (m := re.fullmatch(rf"{script}-(\d+)", p.name))
    )
    if resume == "latest" and taken:
        return runs / f"{script}-{taken[-1]:03d}"
    number = taken[-1] + 1 if taken else 1
    while create:  # two runs started at once take two numbers
        try:
            (runs / f"{script}-{number:03d}").mkdir(parents=True)
            break
        except FileExistsError:
            if runs.is_symlink() and not runs.exists():
                raise UsageError("runs/ is a link to a folder that does not exist; give --out FOLDER") from None
            number += 1
        except OSError as error:
            raise UsageError(f"runs/ cannot be written: {error.strerror}; give --out FOLDER") from None
    return runs / f"{script}-{number:03d}"
