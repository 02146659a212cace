"""Every link of README and docs leads somewhere, every block of code runs, every command is understood."""

import ast
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jax_sparse24 as s24
from experiments import launch
from tests import pages

# Pages whose code another test runs.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/models.md": "tests/test_models_page.py",
    "docs/training.md": "tests/test_training_page.py",
}
COMMANDS_ELSEWHERE = {"docs/data.md": "tests/test_data_page.py"}
ALONE = {"docs/tutorials/devices.md"}  # pages that say how many devices there are, in a process of their own
ARXIV = "https://arxiv.org/abs/"
TEXTS = {pages.name(page): page.read_text() for page in pages.PAGES}
WITH_CODE = [
    name
    for name, text in TEXTS.items()
    if name not in ELSEWHERE and any(c.language == "python" and not c.needs for c in pages.blocks(text))
]


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    page, dead = pages.ROOT / name, []
    for target in pages.links(TEXTS[name]):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        there = file.exists() and pages.ROOT in file.parents
        named = there and anchor and file.suffix == ".md"
        if not there or (named and anchor not in pages.anchors(file.read_text())):
            dead.append(target)
    assert not dead, f"{name} has links that lead nowhere: {', '.join(dead)}"


def test_links_out_of_the_project_are_known():
    """No test asks the network: a new link is looked up by whoever writes it, and added here."""
    found = {target for text in TEXTS.values() for target in pages.links(text) if "://" in target}
    papers = {link for link in found if link.startswith(ARXIV) and link in TEXTS["docs/papers.md"]}
    assert found - papers == {"https://jobset.sigs.k8s.io/"}


def test_every_paper_is_in_the_list_once_with_its_title():
    number = r"\b2\d(?:0[1-9]|1[0-2])\.\d{5}\b"
    folders = ("jax_sparse24", "experiments", "configs", "ffi")
    files = [file for folder in folders for file in (pages.ROOT / folder).rglob("*")]
    texts = [file.read_text() for file in files if file.suffix in {".py", ".h", ".cc", ".cu", ".cuh"}]
    texts += [text for name, text in TEXTS.items() if name != "docs/papers.md"]
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| (.*?) \|", TEXTS["docs/papers.md"], re.M)
    numbers, links, titles = zip(*rows, strict=True)
    assert list(links) == [ARXIV + number for number in numbers]
    assert len(set(titles)) == len(titles) and all(re.match(r".+ 20\d\d: \S.{10}", t) for t in titles)
    assert sorted(numbers) == sorted(set(re.findall(number, "".join(texts))))


@pytest.mark.parametrize("name", TEXTS)
def test_code_parses_and_commands_are_understood(name):
    for code in pages.blocks(TEXTS[name]):
        if code.language == "python":
            ast.parse(code.text)
    for line in pages.commands(TEXTS[name]) if name not in COMMANDS_ELSEWHERE else ():
        understood(line)


def test_other_tests_of_pages_exist():
    for name, test in (ELSEWHERE | COMMANDS_ELSEWHERE).items():
        assert Path(name).name in (pages.ROOT / test).read_text(), f"{test} reads no {name}"


def understood(line: str) -> None:
    """Raises for a command whose module or options do not exist."""
    words = shlex.split(re.split(r" [;&|>] ?| done$", line)[0], comments=True)
    at = words.index("-m")
    module, arguments = words[at + 1], words[at + 2 :]
    arguments = [word for word in arguments if word != "..."]
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{line!r}: there is no module {module}"
    if module == "experiments.launch" and arguments[:1] and arguments[0].startswith("configs/"):
        if not {"--resume", "--help", "--array", "--coordinator"} & set(arguments):
            launch.parse(arguments)
    elif module != "experiments.launch" and module.startswith(("experiments.", "tests.")):
        folder = Path(spec.origin).parent
        sources = "".join(path.read_text() for path in (Path(spec.origin), *folder.rglob("settings.py")))
        for word in arguments:
            if re.match(r"--\w+\.", word):  # of a config
                assert "launch.parse(" in sources, f"{line!r}: {module} takes no {word}"
            elif word.startswith("--") and word != "--help":
                known = word.partition("=")[0] in sources or word[2:] in sources
                assert known, f"{line!r}: {module} has no option {word}"


def strings(folder: str) -> list[str]:
    """Every text in the code of a folder, with … for what is put into it."""
    found = []
    for file in (pages.ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_are_those_of_the_code():
    texts = strings("jax_sparse24") + strings("experiments")
    quoted = re.findall(r"^### `(.*)`$", TEXTS["docs/troubleshooting.md"], re.M)
    assert len(quoted) > 20
    for message in quoted:
        first, *rest = filter(None, message.split("…"))
        pattern = re.compile(".*".join(map(re.escape, (first, *rest))), re.S)
        assert any(pattern.search(text) for text in texts if first in text), f"no code says: {message}"


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (pages.ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"heading: s24\.([\w.]+)", text))
    modules = {n for n in dir(s24) if inspect.ismodule(vars(s24).get(n))}
    lacking = {n for n in dir(s24) if not n.startswith("_")} - modules - shown
    lacking = {n for n in lacking if not any(name.startswith(f"{n}.") for name in shown)}
    assert not lacking, f"docs/api lacks {', '.join(sorted(lacking))}"
    for entry in s24.methods.list():
        assert f"methods.{entry.name}" in shown
    for path in re.findall(r"^::: (\S+)$", text, re.M):
        module, _, name = path.rpartition(".")
        source = Path(importlib.util.find_spec(module).origin)
        is_module = source.name == "__init__.py" and importlib.util.find_spec(path) is not None
        assert is_module or re.search(rf"^(def|class) {name}\b", source.read_text(), re.M), path


def test_a_mistake_would_be_found():
    for line in ("python -m experiments.nothing", "python -m experiments.ablate --no-such-option"):
        with pytest.raises(AssertionError):
            understood(line)
    text = 'A [link](there.md#at-home).\n\n```sh title="needs a GPU"\npython -m a \\\n  --b\n```\n'
    text += "\n# At `home`\n"
    assert pages.links(text) == ["there.md#at-home"] and pages.anchors(text) == {"at-home"}
    assert pages.commands(text) == ["python -m a    --b"] and pages.blocks(text)[0].needs


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_code_runs_in_an_empty_folder(name, tmp_path, monkeypatch):
    """Blocks in order, as they are typed: files are saved, commands run, Python goes into one session."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = os.pathsep.join(filter(None, (str(pages.ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    if name in ALONE:
        code = "\n".join(c.text for c in pages.blocks(TEXTS[name]) if c.language == "python" and not c.file)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return
    scope = {"__name__": "page"}
    for block in pages.blocks(TEXTS[name]):
        if block.needs:
            continue
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, name, "exec"), scope)
        elif block.language == "sh":
            for line in block.text.strip().splitlines():
                words = [sys.executable if word == "python" else word for word in shlex.split(line)]
                done = subprocess.run(words, capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, f"{line}: {done.stderr[-3000:]}"
