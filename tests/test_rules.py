"""The house rules, by syntax tree, and the README's claims."""

import ast
import dataclasses
import re
import subprocess

import pytest

from common.config import SCRIPTS, Config, flags_of
from tests.launch import ROOT

FILES = sorted(ROOT.glob("*_train.py"))
COMMON = sorted((ROOT / "common").glob("*.py"))
README = (ROOT / "README.md").read_text()
REACHES = {
    "all_reduce", "all_gather", "all_gather_object", "gather_object", "barrier", "broadcast", "send", "recv",
    "init_process_group", "rendezvous", "DistributedDataParallel", "check", "compare_set", "backward",
}  # fmt: skip


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "?")


@pytest.mark.parametrize("path", COMMON, ids=lambda p: p.name)
def test_common_never_reaches_for_the_process_group(path):
    tree = ast.parse(path.read_text())
    assert not [name for name in imports(tree) if name.startswith("torch.distributed")]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and dotted(n).startswith("torch.distributed")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_scripts_stand_alone(path):
    assert not [name for name in imports(ast.parse(path.read_text())) if name.split(".")[0].endswith("_train")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_line_that_reaches_another_rank_says_so(path):
    lines = path.read_text().splitlines()
    silent = []
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rsplit(".", 1)[-1]
        store = ".store." in name and last in ("set", "get", "wait", "check", "compare_set")
        if store or last in REACHES or name in ("dcp.save", "dcp.load"):
            near = lines[max(0, node.lineno - 3) : node.end_lineno]
            if not any("# comm:" in line for line in near):
                silent.append(f"{path.name}:{node.lineno}: {name}")
    assert not silent


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_flag_is_read(path):
    script = path.name.removesuffix("_train.py")
    assert script in SCRIPTS
    read = set()
    for source in (path, *COMMON):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute) and dotted(node.value).split(".")[-1] in ("config", "given", "c"):
                read.add(node.attr)
    assert not {f.name for f in flags_of(script)} - read


def test_the_readme_names_every_file_of_common_and_every_requirement():
    tree = README.split("<!-- tree -->")[1].split("```")[1]
    for path in COMMON:
        assert path.name == "__init__.py" or re.search(rf"^ +{path.name} ", tree, re.M), path.name
    for name in re.findall(r"^ +(\w+\.py) ", tree, re.M):
        assert (ROOT / "common" / name).exists(), name
    for line in (ROOT / "requirements.txt").read_text().split():
        assert f"* {re.split('[=<>]', line)[0]}:" in README, line


def test_the_readme_names_every_top_level_entry():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    entries = {line.split("/")[0] for line in tracked if line} or {p.name for p in ROOT.iterdir()}
    for entry in entries:
        if not entry.startswith(".") and entry not in ("README.md", "runs"):
            assert entry in README, entry


def test_flags_of_the_readme_exist():
    known = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(Config)}
    others = {"--standalone", "--nproc_per_node", "--help", "--shm-size", "--ipc"}
    assert not set(re.findall(r"--[a-z][a-z_-]+", README)) - known - others


HELPERS = ("find_world", "join", "wait_for", "all_ready", "explain", "is_consequence", "fail", "agree", "global_mean")


def test_helpers_are_the_same_text_in_all_scripts():
    texts = []
    for path in FILES:
        source = path.read_text()
        functions = {
            n.name: ast.get_source_segment(source, n) for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)
        }
        texts.append([functions[name] for name in HELPERS])
    assert all(text == texts[0] for text in texts)
