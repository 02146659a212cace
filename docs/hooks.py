"""What MkDocs asks of this site besides its plugins: `mkdocs.yml` names this file under `hooks`.

- A link from a page to a file outside of docs/ leads to a copy of that file in the site.
- Every tutorial can be downloaded as a notebook, made of the page itself.
- A page that would load anything from elsewhere stops the build: the site is read from a folder, too.
- Numbers in tables stay in one line.
- Docstrings of this project say "name: what it is." on a line for each argument, and a paper's number; the
  reference shows lists, and links.
"""

import json
import os
import re
import zlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()(?![a-z]+:)([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.S | re.M)
LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml", ".cc": "cpp", ".h": "cpp", ".cu": "cpp"}
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\s(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)"
)
SECTION = re.compile(r"(Returns|Raises|Source): ")
ARGUMENT = re.compile(r"((?:\*{0,2}\w+, )*\*{0,2}\w+): ")
CELL = re.compile(r"<(t[dh])\b.*?</\1>", re.S)
RANGE = re.compile(r"\([+-]?\d[\d.]*(?:-| to )[+-]?\d[\d.]*\)")
PAPER = re.compile(r"\b(\d{4}\.\d{5})\b")


# ---- links that leave docs/


def outside(page: Path, target: str) -> Path | None:
    """The file or folder outside of docs/ that a link from a page leads to, relative to the repository; None
    for a link inside docs/ and for what does not exist."""
    file = Path(os.path.normpath(page.parent / target))
    if not file.exists() or ROOT not in file.parents or ROOT / "docs" in file.parents:
        return None
    return file.relative_to(ROOT)


def address(file: Path) -> str:
    """Where the copy of a file lies in the site: source and folders as a page, anything else as it is."""
    if file.name == "README.md":
        return "index.md"
    if (ROOT / file).is_dir():
        return f"files/{file}/index.md"
    return f"files/{file}" + (".md" if file.suffix in LANGUAGES else "")


def redirected(markdown: str, page: Path, own: str) -> tuple[str, dict[str, Path]]:
    """A page with its links to files outside of docs/ turned to their copies, and these copies.

    page: the file that the text is of.
    own: its address in the site."""
    copies = {}

    def turn(match):
        file = outside(page, match[2])
        if file is None:
            return match[0]
        place = address(file)
        if place != "index.md":
            copies[place] = file
        return match[1] + os.path.relpath(place, Path(own).parent) + match[3]

    return LINK.sub(turn, markdown), copies


def shown(file: Path) -> str:
    """A file as a page, its text as a block of code; or a folder, its files as a list."""
    if (ROOT / file).is_dir():
        names = sorted(path.name for path in (ROOT / file).iterdir() if path.is_file())
        return "\n".join([f"# {file}", "", *(f"- `{name}`" for name in names), ""])
    return f"# {file.name}\n\n`{file}`\n\n````{LANGUAGES[file.suffix]}\n{(ROOT / file).read_text()}\n````\n"


def on_files(files, config):
    from mkdocs.structure.files import File

    wanted = {}
    waiting = [(Path(f.abs_src_path), f.src_uri) for f in files.documentation_pages()]
    while waiting:
        page, own = waiting.pop()
        text = page.read_text()
        for place, file in redirected(text, page, own)[1].items():
            if place not in wanted:
                wanted[place] = file
                if file.suffix == ".md":
                    waiting.append((ROOT / file, place))
    for place, file in wanted.items():
        if file.suffix == ".md":
            content = redirected((ROOT / file).read_text(), ROOT / file, place)[0]
            content = inside_docs(content, ROOT / file, place)
        else:
            content = shown(file) if place.endswith(".md") else (ROOT / file).read_bytes()
        files.append(File.generated(config, place, content=content))
    for file in list(files.documentation_pages()):
        if file.src_uri.startswith("tutorials/"):
            text = Path(file.abs_src_path).read_text()
            place = f"notebooks/{Path(file.src_uri).stem}.ipynb"
            files.append(File.generated(config, place, content=json.dumps(notebook(text), indent=1)))
    return files


def inside_docs(markdown: str, page: Path, own: str) -> str:
    """Links of a copied page into docs/, turned to the pages of the site."""

    def turn(match):
        file = Path(os.path.normpath(page.parent / match[2]))
        if ROOT / "docs" not in file.parents:
            return match[0]
        return match[1] + os.path.relpath(file.relative_to(ROOT / "docs"), Path(own).parent) + match[3]

    return LINK.sub(turn, markdown)


def on_page_markdown(markdown, page, config, files):
    own = page.file.src_uri
    source = page.file.abs_src_path
    if source and (ROOT / "docs") in Path(source).parents:
        markdown = redirected(markdown, Path(source), own)[0]
    if own.startswith("tutorials/"):
        name = Path(own).stem
        link = f"[Download as a notebook](../notebooks/{name}.ipynb){{ .md-button }}"
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n{link}\n{rest}"
    return markdown


# ---- nothing from elsewhere


def elsewhere(html: str) -> list[str]:
    """The addresses outside of the site from which a page loads scripts, styles or pictures; where its links
    lead does not count."""
    return LOADED.findall(html)


def on_post_page(html, page, config):
    if found := elsewhere(html):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {', '.join(found)}. Put it into docs/.")
    return unbroken(html)


# ---- numbers in tables


def unbroken(html: str) -> str:
    """A page in whose cells no line ends within a range such as (1.26-1.33) or a size such as d = 2048, nor
    before the * or behind the J of a number."""

    def keep(cell):
        text = RANGE.sub(r'<span class="unbroken">\g<0></span>', cell[0])
        text = re.sub(r"\b([Tdf]) = (?=\d)", r"\1&nbsp;=&nbsp;", text)
        return re.sub(r"(?<=\dx) (?=\*)|(?<=\bJ) (?=\d)", "&nbsp;", text)

    return CELL.sub(keep, html)


# ---- notebooks


def notebook(page: str) -> dict:
    """A page as a Jupyter notebook: Python as cells, a file with `%%writefile`, commands with `!`."""
    cells, at = [], 0
    for match in FENCE.finditer(page):
        cells += prose(page[at : match.start()])
        language, info, code = match.groups()
        title = re.search(r'title="([^"]*)"', info or "")
        at = match.end()
        if title and title[1].startswith("needs "):
            cells += prose(match[0])
        elif language == "python":
            cells.append(cell("code", f"%%writefile {title[1]}\n{code}" if title else code))
        elif language == "sh":
            cells.append(cell("code", "\n".join(f"!{line}" for line in code.strip().splitlines())))
        else:
            cells += prose(match[0])
    cells += prose(page[at:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def prose(text: str) -> list[dict]:
    return [cell("markdown", text.strip())] if text.strip() else []


def cell(kind: str, text: str) -> dict:
    lines = text.rstrip("\n").splitlines(keepends=True)
    name = f"{kind}-{zlib.crc32(text.encode()):08x}"
    own = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": lines, **own}


# ---- docstrings


def sections(doc: str) -> str:
    """A docstring with its arguments as a list, and with what it returns, raises and follows in bold; papers
    are links."""
    out = []
    for block in doc.split("\n\n"):
        items = []
        for line in block.splitlines():
            section, argument = SECTION.match(line), ARGUMENT.match(line)
            if section:
                items.append(f"**{section[1]}:** {line[section.end() :]}")
            elif argument:
                items.append(f"- **{argument[1]}**: {line[argument.end() :]}")
            elif items:
                items[-1] += " " + line.strip()
            else:
                out.append(line)
        rest = [f"\n{item}\n" if item.startswith("**") else item for item in items]
        out += ["", *rest, ""]
    return PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", "\n".join(out))


try:
    import griffe
except ModuleNotFoundError:  # without the extra docs
    pass
else:

    class Docstrings(griffe.Extension):
        """Docstrings of the project in the form that the reference shows."""

        def on_instance(self, *, node, obj, agent, **kwargs):
            if obj.docstring:
                obj.docstring.value = sections(obj.docstring.value)
