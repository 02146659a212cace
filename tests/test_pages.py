"""Every link of README and docs leads somewhere, every block of code runs, every command is understood."""

import argparse
import ast
import contextlib
import http.server
import importlib.util
import inspect
import operator
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import jax
import pytest
import tyro

import jax_sparse24 as s24
from experiments import launch
from experiments.errors import UserError
from tests import pages

# Pages whose code another test runs.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/models.md": "tests/test_models_page.py",
    "docs/training.md": "tests/test_training_page.py",
}
ARXIV = "https://arxiv.org/abs/"
TEXTS = {pages.name(page): page.read_text() for page in pages.PAGES}
OUTSIDE = {link for text in TEXTS.values() for link in pages.links(text) if "://" in link}
# Tutorials run as notebooks: tests/test_site.py.
WITH_CODE = [
    name
    for name, text in TEXTS.items()
    if name not in ELSEWHERE
    and not name.startswith("docs/tutorials/")
    and any(not code.needs for code in pages.blocks(text))
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


def test_links_out_of_the_project_are_papers_and_few_others():
    """Papers are in the list of papers. An address that is no link is not missed."""
    written = {
        url for text in TEXTS.values() for url in re.findall(r"https?://[^\s<>)`\"]+", pages.prose(text))
    }
    papers = {link for link in OUTSIDE if re.fullmatch(rf"{ARXIV}\d{{4}}\.\d{{5}}", link)}
    assert OUTSIDE - papers == {"https://jobset.sigs.k8s.io/"} and written <= OUTSIDE
    assert all(link in TEXTS["docs/papers.md"] for link in papers)


@pytest.mark.slow
def test_no_link_out_of_the_project_is_dead():
    """Links that no server confirms, since there is no network or since it wants no robots, are reported."""
    answers = pages.answers(sorted(OUTSIDE))
    dead = [link for link, status in answers.items() if status in (404, 410)]
    assert not dead, f"nothing is at {', '.join(dead)}"
    unsure = [f"{link} ({status or 'no answer'})" for link, status in answers.items() if status != 200]
    if unsure:
        pytest.skip(f"{len(unsure)} of {len(answers)} links were not confirmed: {', '.join(unsure)}")


def test_what_servers_answer_to_links_is_told():
    asked = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(int(self.path[1:]))
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{server.server_port}"
        codes = {f"{there}/{code}": code for code in (200, 404, 410, 429)}
        assert pages.answers(codes) == codes and len(asked) == 4
        server.shutdown()
    assert pages.answers([*codes, f"{there}/500"], seconds=1) == dict.fromkeys([*codes, f"{there}/500"])


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
def test_every_block_runs_or_says_what_it_needs(name):
    """Tests run it, here or those of `ELSEWHERE`, unless it needs what is not here."""
    if "docs/api/" not in name:  # its options of mkdocstrings are set in
        assert not pages.unmarked(TEXTS[name])
    if name in ELSEWHERE:
        assert {code.language for code in pages.blocks(TEXTS[name]) if not code.needs} == {"python"}
        assert Path(name).name in (pages.ROOT / ELSEWHERE[name]).read_text()


@pytest.mark.parametrize("name", TEXTS)
def test_code_parses_and_commands_are_understood(name):
    for code in pages.blocks(TEXTS[name]):
        if code.language == "python":
            ast.parse(code.text)
        else:
            subprocess.run(["bash", "-n", "-c", code.text], check=True)
    for line in pages.commands(TEXTS[name]):
        understood(line)


class Parsed(Exception):
    """A command has understood its arguments."""


@contextlib.contextmanager
def only_parsing():
    """Commands raise `Parsed` once they have parsed their arguments, as on a host of eight devices."""

    def then_stop(parse):
        def stop(*args, **kwargs):
            parse(*args, **kwargs)
            raise Parsed

        return stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tyro, "cli", then_stop(tyro.cli))
        patch.setattr(jax, "device_count", lambda: 8)
        for name in ("parse_args", "parse_intermixed_args"):
            own = getattr(argparse.ArgumentParser, name)
            patch.setattr(argparse.ArgumentParser, name, then_stop(own))
        yield


def understood(line: str) -> None:
    """Raises for a command whose module, options, files, extras or names do not exist; those of other
    projects are not known."""
    words = shlex.split(re.split(r" (?:&&|[;|<>]) ?", line)[0], comments=True)
    files = [word.split(":")[0] for word in words if re.match(r"(configs|launch|tests)/", word)]
    assert all((pages.ROOT / file).exists() for file in files), f"{line!r} names files that do not exist"
    if words[0] == "make":
        makefile = (pages.ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in words[1:] if "=" not in target)
    elif words[0] == "sbatch":
        launched(words[2:])
    elif "pip" in words:
        project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
        extras = [name for group in re.findall(r"\.\[(.*?)\]", line) for name in group.split(",")]
        assert set(extras) <= set(project["optional-dependencies"]), line
    elif "-c" in words:
        for name in re.findall(r"\bs24\.([\w.]+)", ast.unparse(ast.parse(words[words.index("-c") + 1]))):
            operator.attrgetter(name)(s24)
    elif "-m" in words:
        module, *arguments = words[words.index("-m") + 1 :]
        assert importlib.util.find_spec(module) is not None, f"{line!r}: there is no module {module}"
        if module == "experiments.launch":
            launched(arguments)
        elif module.startswith("experiments."):
            with only_parsing(), pytest.raises(Parsed):
                importlib.import_module(module).main(arguments)


def launched(arguments: list[str]) -> None:
    """Raises for what the launcher does not understand; any config stands for a run that is continued."""
    if "--array" in arguments:
        assert launch.array(arguments)
    elif "--help" not in arguments:
        if arguments[0] == "--resume":
            arguments = ["configs/dense.py", *arguments[2:]]
        launch.parse(arguments)


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


def test_what_pages_use_is_in_the_reference():
    """Of modules and of the loop the reference shows what is named, which is public thereby."""
    text = "".join(page.read_text() for page in (pages.ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"heading: s24\.([\w.]+)\n.*\n(?:      members: \[(.*)\])?", text)
    shown = {heading for heading, _ in listed}
    for heading, members in listed:
        for member in filter(None, members.split(", ")):
            assert operator.attrgetter(f"{heading}.{member}")(s24) is not None
            shown.add(f"{heading}.{member}")
    used = "".join(text for name, text in TEXTS.items() if name != "docs/architecture.md")
    used = {*re.findall(r"\bs24\.((?:nn|optim|sharding|patterns)\.\w+)", used)}
    for code in (code.text for text in TEXTS.values() for code in pages.blocks(text)):
        used |= {f"Loop.{name}" for name in re.findall(r"\bloop\.(\w+)\(", code)}
    assert used <= shown, f"docs/api lacks {', '.join(sorted(used - shown))}"


def test_a_mistake_would_be_found():
    for line in (
        "python -m experiments.nothing",
        "python -m experiments.ablate --no-such-option",
        "python -m experiments.bench gemm --shape wide",
        "python -m experiments.memory configs/nothing.py",
        "python -m experiments.launch --resume runs/NAME --mesh.pp 8",
        'python -c "import jax_sparse24 as s24; s24.tun()"',
        "pip install -e '.[cuda11]'",
        "make everything",
        "sbatch launch/nothing.sbatch configs/dense.py",
    ):
        with pytest.raises((AssertionError, AttributeError, UserError, SystemExit)):
            understood(line)
    text = 'A [link](there.md#at-home).\n\n```sh title="needs a GPU"\npython -m a \\\n  --b\n```\n'
    text += "\n# At `home`\n"
    assert pages.links(text) == ["there.md#at-home"] and pages.anchors(text) == {"at-home"}
    assert pages.commands(text) == ["python -m a    --b"] and pages.blocks(text)[0].needs
    assert not pages.unmarked(text)
    for code in ("```bash\nls\n```\n", "```\nls\n```\n", "~~~sh\nls\n~~~\n", "    ls\n"):
        assert pages.unmarked(f"Do this:\n\n{code}")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_code_runs_in_an_empty_folder(name, tmp_path, monkeypatch):
    """Blocks in order, as they are typed: commands run, Python goes into one session."""
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(filter(None, (str(pages.ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    scope = {"__name__": "page"}
    for block in pages.blocks(TEXTS[name]):
        if block.needs:
            continue
        if block.language == "python":
            exec(compile(block.text, name, "exec"), scope)
        else:
            for line in block.text.strip().splitlines():
                words = shlex.split(line, comments=True)
                words = [sys.executable if word == "python" else word for word in words]
                done = subprocess.run(words, capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, f"{line}: {done.stderr[-3000:]}"
