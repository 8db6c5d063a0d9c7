"""The house rules, by syntax tree, and the README's claims. Each rule is a function of source text, so that the tests
can also show it a text that breaks it."""

import ast
import dataclasses
import re
import subprocess

import pytest

from common.config import PRESETS, SCRIPTS, Config, flags_of
from tests.launch import ROOT

FILES = sorted(ROOT.glob("*_train.py"))
COMMON = sorted((ROOT / "common").rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.split("<!-- tree -->")[1].split("```")[1]


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def dotted(node) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "?")


# ── common/ and the process group ────────────────────────────────────────────────────────────────────────────────────
def ways_to_the_process_group(source: str) -> list[str]:
    """Imports, attributes under any alias, a bare `dist`, and the module's name as a string by itself."""
    tree = ast.parse(source)
    found = [name for name in imports(tree) if re.match(r"torch\.distributed\b|torch\.nn\.parallel\b", name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "distributed":
            found.append(dotted(node))
        elif isinstance(node, ast.Name) and node.id == "dist":
            found.append("dist")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch\.distributed[\w.]*", str(node.value)):
            found.append(node.value)
    return found


@pytest.mark.parametrize("path", COMMON, ids=lambda p: p.name)
def test_common_never_reaches_for_the_process_group(path):
    assert not ways_to_the_process_group(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    (
        "import torch.distributed as d", "from torch import distributed", "from torch.distributed import all_reduce",
        "import torch as t\nt.distributed.barrier()", "dist.barrier()", "import_module('torch.distributed')",
        "from torch.nn.parallel import DistributedDataParallel",
    ),
)  # fmt: skip
def test_no_way_to_the_process_group_goes_unseen(source):
    assert ways_to_the_process_group(source)


# ── scripts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def scripts_imported(source: str) -> list[str]:
    return [name for name in imports(ast.parse(source)) if any(p.endswith("_train") for p in name.split("."))]


@pytest.mark.parametrize("path", [*FILES, *COMMON], ids=lambda p: p.name)
def test_scripts_stand_alone(path):
    assert not scripts_imported(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("source", ("import ddp_train", "from ddp_train import fail", "from . import ddp_train"))
def test_an_import_of_a_script_is_seen(source):
    assert scripts_imported(source)


# Of torch.distributed only these stay on this rank; whatever is not named here needs a remark.
LOCAL = {"is_initialized", "is_available", "get_rank", "get_world_size", "PrefixStore", "HashStore"}
STORE = {"set", "get", "add", "wait", "check", "compare_set", "delete_key", "append", "multi_get", "multi_set"}
REACHES = {"DistributedDataParallel", "DDP", "fully_shard", "full_tensor", "backward"}


def silent_calls(source: str) -> list[str]:
    """Calls that reach another rank, and have no `# comm:` remark on the line where call or name begins."""
    tree, lines, silent = ast.parse(source), source.splitlines(), []
    borrowed = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed"
        for alias in node.names
    } - LOCAL
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        # A receiver may itself be a call, `next(dist.rendezvous(…))`: only the last two names count.
        owner, last = ([""] + dotted(node.func).split("."))[-2:]
        group = owner == "dist" and last not in LOCAL
        store = owner.endswith("store") and last in STORE
        if group or store or last in REACHES or last in borrowed or (owner == "dcp" and last in ("save", "load")):
            name_line = node.func.end_lineno  # differs from lineno in a chain over several lines
            if not any("# comm:" in lines[n - 1] for n in {node.lineno, name_line}):
                silent.append(f"line {node.lineno}: {dotted(node.func)}")
    return silent


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_line_that_reaches_another_rank_says_so(path):
    assert not silent_calls(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    (
        "dist.all_reduce(x)", "dist.some_future_collective(x)", "world.store.set('a', 'b')", "store.get('a')",
        "dcp.save(t)", "loss.backward()", "DistributedDataParallel(net)", "dist.new_group([0])",
        "from torch.distributed import barrier as b\nb()", "# comm: above is not on the line\ndist.barrier()",
        "[\n    store.check([k])\n]  # comm: below is not on the line",
    ),
)  # fmt: skip
def test_a_call_without_its_remark_is_seen(source):
    assert silent_calls(source)


def test_a_call_with_its_remark_passes():
    assert not silent_calls("dist.all_reduce(  # comm: all-reduce\n    x,\n)\ndist.get_rank()\nd.get('a')")


# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def flags_read(source: str) -> set[str]:
    """Attributes of a Config that are used; that `check` refuses a wrong value is not yet a use."""
    tree = ast.parse(source)
    checks = {id(n) for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "check" for n in ast.walk(f)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and id(node) not in checks
        and dotted(node.value) in ("config", "given", "self.config", "job.config", "run.job.config", "self.job.config")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_flag_is_read(path):
    script = path.name.removesuffix("_train.py")
    assert script in SCRIPTS
    read = set().union(*(flags_read(source.read_text(encoding="utf-8")) for source in (path, *COMMON)))
    assert not {f.name for f in flags_of(script)} - read


def test_a_flag_that_is_only_checked_does_not_count_as_read():
    assert flags_read("def check(config):\n    config.flip\ndef use(run):\n    run.job.config.seed") == {"seed"}


# ── helpers that the scripts share word for word ─────────────────────────────────────────────────────────────────────
SAME_BELOW = {"save", "load", "carry_out", "train"}  # the strategy enters them only through its own functions


def helpers(source: str) -> dict[str, str]:
    """Functions and classes above the strategy, and some below it: name -> text, with decorators."""
    lines = source.splitlines()
    above = next(n for n, line in enumerate(lines, 1) if line.startswith("# ── the strategy"))
    return {
        node.name: "\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (node.lineno < above or node.name in SAME_BELOW)
    }


def drifted(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def test_helpers_are_the_same_text_in_all_scripts():
    first, *others = (helpers(path.read_text(encoding="utf-8")) for path in FILES)
    assert {"World", "find_world", "join", "all_ready", "fail", "agree", "global_mean"} | SAME_BELOW <= first.keys()
    for other in others:
        assert not drifted(first, other)


def test_a_helper_that_drifted_is_seen():
    source = FILES[0].read_text(encoding="utf-8")
    drift = source.replace("\ndef join(", "\ndef connect(", 1).replace('at: str = "start"', 'at: str = ""', 1)
    assert drifted(helpers(source), helpers(drift)) == {"join", "connect", "World"}


# ── the README ───────────────────────────────────────────────────────────────────────────────────────────────────────
def top_level() -> set[str]:
    """Tracked entries; in a copy without a repository, what is there and is neither ignored nor made by a tool."""
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:  # no git on this machine
        listed = []
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    there = [p.name for p in ROOT.iterdir() if p.name != ".git" and not any(p.match(i) for i in ignored)]
    return {line.split("/")[0] for line in listed or there}


def test_the_tree_of_the_readme_is_the_tree():
    shown = set()
    for line in TREE.splitlines():
        if line and not line.startswith(" "):
            names = line.split() if line.startswith("README.md") else line.split()[:1]
            shown |= {name.split("/")[0] for name in names}
    assert shown == top_level()
    assert sorted(re.findall(r"^ +(\w+\.py) +\S", TREE, re.M)) == sorted(
        p.name for p in COMMON if p.name != "__init__.py"
    )


def test_the_readme_gives_a_reason_for_every_requirement_and_only_for_those():
    text = (ROOT / "requirements.txt").read_text() + (ROOT / "tests" / "requirements.txt").read_text()
    required = {re.split("[=<>]", line)[0] for line in text.split("\n") if line and not line.startswith("-r")}
    reasons = README.split("## Dependencies")[1].split("\n## ")[0]
    assert set(re.findall(r"^\* ([\w-]+): \S", reasons, re.M)) == required


@pytest.mark.parametrize("name", ("train", "test"))
def test_each_command_that_ci_runs_is_one_line_of_files_that_exist(name):
    after = README.split(f"<!-- command: {name} -->\n")
    assert len(after) == 2
    command = re.match(r"```bash\n(.+)\n```\n", after[1])[1]
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    files = re.findall(r"(?<!\.venv/bin/)\b[\w/-]+\.(?:py|txt)\b", command)
    assert files
    for file in files:
        assert (ROOT / file).is_file(), file


def test_files_and_pictures_of_the_readme_exist():
    named = re.findall(r"\]\(([\w/.-]+)\)|\b((?:tools|tests|docs)/[\w-]+\.\w+|\w+_train\.py)\b", README)
    paths = {a or b for a, b in named}
    assert {"docs/samples.png", "docs/loss.png", "ddp_train.py"} <= paths
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_flags_of_the_readme_exist():
    known = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(Config)}
    others = {"--standalone", "--nproc_per_node", "--help", "--shm-size", "--ipc"}
    assert not set(re.findall(r"--[a-z][a-z_-]+", README)) - known - others


def test_the_readme_knows_how_long_the_default_run_is():
    assert re.findall(r"default (\d+) steps", README) == [str(PRESETS["tiny"].steps)]
