"""A report in Markdown as one HTML file, its pictures inside, that opens in any browser."""

import base64
import html
import itertools
from pathlib import Path

from markdown_it import MarkdownIt

from experiments import files

KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; margin: 1.8em 0 0.6em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35em 0.8em; border-bottom: 1px solid #8884; text-align: left; }
th { border-bottom: 2px solid #8888; }
tbody tr:hover { background: #8881; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
pre { white-space: pre-wrap; padding: 0.8em 1em; background: #8881; border-radius: 6px; font-size: 0.86rem; }
code { font-family: ui-monospace, monospace; font-size: 0.92em; }
@media (max-width: 38rem) { p:has(> img) { overflow-x: auto; } img { width: 38rem; max-width: none; } }
"""


def write(source: Path) -> Path:
    """Write the page beside its source, as `report.html` beside `report.md`.

    source: a Markdown file, whose pictures lie where it says."""
    text = source.read_text(encoding="utf-8")
    path = source.with_suffix(".html")
    files.write(path, page(text, source.parent))
    return path


def page(text: str, folder: Path) -> str:
    """A page that needs no other file.

    text: Markdown with tables.
    folder: where its pictures are; a picture that is not there stays a link."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    title = next((t.content for before, t in itertools.pairwise(tokens) if before.tag == "h1"), "")
    inner = itertools.chain.from_iterable(token.children or () for token in tokens)
    for image in (token for token in inner if token.type == "image"):
        file = folder / str(image.attrs["src"])
        if file.is_file() and file.suffix in KINDS:
            data = base64.b64encode(file.read_bytes()).decode()
            image.attrs["src"] = f"data:{KINDS[file.suffix]};base64,{data}"
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n<body>\n{body}</body>\n</html>\n"
    )
