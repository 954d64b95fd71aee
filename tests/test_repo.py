"""House rules that a program can check, and that the documents tell the truth about files and commands."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tracefp4 import config
from tracefp4.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "tracefp4").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, UNDOCUMENTED_LINES = 400, 70, 12
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "torch.load", "torch.save", "os.system"}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
BROAD = {"Exception", "BaseException"}
PROCESS_BOUNDARIES = {"grading_worker.py", "host.py"}
"""Where a whole process ends: whatever goes wrong there becomes a reply to the parent."""
# Put together here, or this file would contain them.
FORBIDDEN_TEXT = ["/" + "work/", "/" + "root/", "TO" + "DO", "FIX" + "ME", "X" + "XX", "<<<" + "<<<<"]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".txt", ".cfg", ".sh", ""}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout")


def dotted(node):
    """``a.b.c`` of a name or attribute node."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def length(node):
    return node.end_lineno - node.lineno + 1


def walk_public(tree):
    """Public functions and methods of public classes, as (node, name)."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, node.name
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                    yield part, f"{node.name}.{part.name}"


def faults_of(path):
    """Every violation of a rule in one source file, as text."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{lines} lines, at most {FILE_LINES}"
    if not ast.get_docstring(tree):
        yield "no module docstring"
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Assert):
            yield where + "assert disappears under python -O"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > FUNCTION_LINES:
            yield where + f"{node.name} has {length(node)} lines, at most {FUNCTION_LINES}"
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            yield where + f"calls {dotted(node.func)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            for name in sorted({name.split(".")[0] for name in names} & FORBIDDEN_IMPORTS):
                yield where + f"imports {name}"
        if isinstance(node, ast.ExceptHandler) and path.name not in PROCESS_BOUNDARIES:
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(item is None or dotted(item) in BROAD for item in caught):
                yield where + "broad except"
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield where + "NotImplementedError"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield where + "trust_remote_code"
    for node, name in walk_public(tree):
        if length(node) > UNDOCUMENTED_LINES and not ast.get_docstring(node):
            yield f"line {node.lineno}: {name} has no docstring"


def tracked_files():
    """Files under version control, or nothing outside a checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_source_files_follow_the_house_rules():
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in SOURCES for fault in faults_of(path)]
    assert not faults, "\n".join(faults)


def test_the_checker_sees_violations(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\ndef f(x):\n    assert x\n    try:\n        eval(x)\n        f(trust_remote_code=x)\n"
        "    except (ValueError, Exception):\n        raise NotImplementedError from None\n"
    )
    found = "\n".join(faults_of(path))
    for text in (
        "no module docstring",
        "assert",
        "broad except",
        "calls eval",
        "imports pickle",
        "NotImplemented",
        "trust_remote",
    ):
        assert text in found


def test_tracked_text_names_no_machine_and_leaves_nothing_open():
    faults = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES and path.name != "LICENSE":
            text = path.read_text(encoding="utf-8", errors="replace")
            faults += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN_TEXT if word in text]
    assert not faults, "\n".join(faults)


def test_no_large_or_binary_files_are_tracked():
    large = [str(path.relative_to(ROOT)) for path in tracked_files() if path.stat().st_size > 2 * 2**20]
    assert not large


def test_import_contracts_hold():
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [program, "--no-cache", "--no-logo"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_formats_and_guidance_import_without_transformers():
    code = (
        "import sys, tracefp4.quantizers.guided, tracefp4.guidance.frame;"
        "sys.exit(int(bool({'transformers', 'matplotlib', 'typer'} & set(sys.modules))))"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, check=True, timeout=100)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])  # fmt: skip
def test_links_within_the_repository_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/commands.md"])
def test_commands_in_the_documents_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    assert set(re.findall(r"^    make ([a-z]+)", text, flags=re.MULTILINE)) <= targets
    assert set(re.findall(r"tracefp4 ([a-z]+)\b", text)) <= set(COMMANDS)


def test_every_command_is_documented():
    for page in ("README.md", "docs/commands.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [name for name in COMMANDS if f"tracefp4 {name}" not in text] == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path):
    assert config.load(path).output_dir != config.Config().output_dir


def test_the_demo_runs_a_shipped_config():
    default = re.search(r"^CONFIG \?= (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert default is not None
    assert (ROOT / default[1]).is_file()


def test_extras_named_by_the_doctor_exist():
    from tracefp4.cli.doctor import EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(EXTRAS) <= set(extras)


def test_every_task_option_is_documented_with_its_default():
    from tracefp4.rl.tasks.base import PromptOptions
    from tracefp4.rl.tasks.files import FilesOptions
    from tracefp4.rl.tasks.reasoning_gym import ReasoningGymOptions

    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    places = {ReasoningGymOptions: "## Procedural", FilesOptions: "## Data sets", PromptOptions: "## Prompts"}
    missing = []
    for model, heading in places.items():
        section = page.split(heading)[1].split("\n## ")[0]
        for name, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            text = "required" if field.is_required() else "" if name == "prompt" else f"`{json.dumps(default)}`"
            if f"| `{name}` | {text} |".replace("  ", " ") not in section:
                missing.append(f"{model.__name__}.{name} with default {text}")
    assert not missing
