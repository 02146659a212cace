"""What docs/hooks.py makes of the pages for the site, and that the site shows every page."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import pages


def loaded(file: str):
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, pages.ROOT / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = loaded("docs/hooks.py")
CONFIG = (pages.ROOT / "mkdocs.yml").read_text()
TUTORIALS = sorted((pages.ROOT / "docs/tutorials").glob("*.md"))


def test_the_navigation_has_every_page_once():
    named = re.findall(r"[\w/-]+\.md", CONFIG.partition("\nnav:")[2])
    there = [str(page.relative_to(pages.ROOT / "docs")) for page in (pages.ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_holds_the_code_of_its_page(page):
    text = page.read_text()
    notebook = json.loads(json.dumps(hooks.notebook(text)))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    expected = []
    for block in pages.blocks(text):
        if not block.needs and block.language == "python":
            expected.append(f"%%writefile {block.file}\n{block.text}" if block.file else block.text)
        elif not block.needs:
            expected.append("\n".join(f"!{line}" for line in block.text.splitlines()))
    assert cells == [text.rstrip("\n") for text in expected] and len(cells) >= 3
    names = [c["id"] for c in notebook["cells"]]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    assert notebook["nbformat"] == 4 and "".join(notebook["cells"][0]["source"]).startswith("# ")


@pytest.mark.slow
@pytest.mark.optimised
def test_the_notebooks_run_within_three_minutes(tmp_path, monkeypatch):
    """In empty folders, in CPU seconds: a machine of two cores that does nothing else needs less time."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    folders = [pages.ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, map(str, folders))))
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = sum(os.times()[:4])
    for page in TUTORIALS:
        (folder := tmp_path / page.stem).mkdir()
        notebook = nbformat.reads(json.dumps(hooks.notebook(page.read_text())), as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.source.startswith("!"):
                cell.source += "\nassert _exit_code == 0"
        place = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    assert sum(os.times()[:4]) - before < 180


def test_links_out_of_docs_lead_to_copies():
    page = pages.ROOT / "docs/api/methods.md"
    text = "[a](../../experiments/bench.py) [b](../../launch/slurm.sbatch#x) [c](layers.md) [d](https://a.io)"
    turned, copies = hooks.redirected(text + " [e](../../experiments/data)", page, "api/methods.md")
    assert "[a](../files/experiments/bench.py.md)" in turned
    assert "[b](../files/launch/slurm.sbatch.md#x) [c](layers.md) [d](https://a.io) [" in turned
    assert "[e](../files/experiments/data/index.md)" in turned
    assert {str(file) for file in copies.values()} == {
        "experiments/bench.py",
        "launch/slurm.sbatch",
        "experiments/data",
    }
    shown = hooks.shown(copies["files/launch/slurm.sbatch.md"])
    assert "#SBATCH --requeue" in shown and "text.py" in hooks.shown(
        copies["files/experiments/data/index.md"]
    )


def test_nothing_is_loaded_from_elsewhere():
    html = (
        '<script src="https://a.io/b.js"></script><link rel=stylesheet href=//c.io/d.css> <img src="x.png">'
    )
    html += '<a href="https://e.io">there</a><script src="assets/f.js"></script>'
    assert hooks.elsewhere(html) == ["https://a.io/b.js", "//c.io/d.css"]
    for page in pages.PAGES:
        text = page.read_text()
        assert not hooks.elsewhere(text) and "](http" not in "".join(re.findall(r"!\[.*", text)), page
    # Without a script of that name, the plugin offline of Material has every page load one from the network.
    script = re.search(r"^extra:\n  polyfills: \[(.*iframe-worker.*)\]", CONFIG, re.M)[1]
    assert (pages.ROOT / "docs" / script).exists() and "://" not in CONFIG and "  font: false" in CONFIG


def test_numbers_in_tables_stay_in_one_line():
    html = "<p>1.2x (1.1-1.3)</p><td>1.2x (1.1-1.3), J 0.90</td><td align=right>1.01x *</td>"
    html += "<th>step, d = 2048, f = 8192</th><td>+0.001 (-0.002 to +0.007)</td>"
    turned = '<td>1.2x <span class="unbroken">(1.1-1.3)</span>, J&nbsp;0.90</td>'
    turned += "<td align=right>1.01x&nbsp;*</td><th>step, d&nbsp;=&nbsp;2048, f&nbsp;=&nbsp;8192</th>"
    turned += '<td>+0.001 <span class="unbroken">(-0.002 to +0.007)</span></td>'
    assert hooks.unbroken(html) == f"<p>1.2x (1.1-1.3)</p>{turned}"
    assert ".unbroken { white-space: nowrap; }" in (pages.ROOT / "docs/style.css").read_text()


def test_drawings_are_those_of_the_code(monkeypatch, tmp_path):
    """The phases are those that the page prints below them."""
    drawings = loaded("docs/drawings.py")
    monkeypatch.setattr(drawings, "IMAGES", tmp_path)
    for draw in (drawings.two_of_four, drawings.one_operand, drawings.mvue, drawings.vnm, drawings.phases):
        drawn = draw()
        there = pages.ROOT / "docs/images" / drawn.name
        assert drawn.read_text() == there.read_text(), f"run `python docs/drawings.py`: {drawn.name} differs"
    assert f"schedule({drawings.STEPS})" in (pages.ROOT / "docs/concepts.md").read_text()


def test_docstrings_become_lists():
    doc = "A line: with a colon.\n\nx, axis: an array,\n    of floats.\nm: a size.\n\n"
    doc += "Returns: bool.\nSource: 2404.01847, section 4."
    assert [line for line in hooks.sections(doc).split("\n") if line] == [
        "A line: with a colon.",
        "- **x, axis**: an array, of floats.",
        "- **m**: a size.",
        "**Returns:** bool.",
        "**Source:** [arXiv 2404.01847](https://arxiv.org/abs/2404.01847), section 4.",
    ]
