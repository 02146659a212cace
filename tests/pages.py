"""The pages that people read, their code and their links."""

import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "sh")  # languages of blocks
WRITTEN = "do not edit it by hand"  # of pages written by a program, which may show text of models
FENCE = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.S | re.M)


class Code(NamedTuple):
    """A block of code.

    language: one of `RUN`.
    title: `title="..."` behind it: the name of a file to be saved, or what the block needs to run.
    text: its lines."""

    language: str
    title: str
    text: str

    @property
    def needs(self) -> bool:
        """Whether it needs what a test does not have, such as a GPU, so that it is only parsed."""
        return self.title.startswith("needs ")

    @property
    def file(self) -> str:
        """Name of the file that it is; "" for none."""
        return self.title if re.fullmatch(r"[\w/.-]+\.\w+", self.title) else ""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[Code]:
    """The fenced blocks of a page, in order."""
    found = []
    for language, info, code in FENCE.findall(text):
        if language not in RUN:
            continue
        title = re.search(r'title="([^"]*)"', info)
        found.append(Code(language, title[1] if title else "", code))
    return found


def commands(text: str) -> list[str]:
    """Command lines of a page's shell blocks, each in one line."""
    shell = "\n".join(code.text for code in blocks(text) if code.language == "sh")
    lines = re.sub(r"\\\n", " ", shell).splitlines()
    return [line.strip() for line in lines if line.partition("#")[0].strip()]


def unmarked(text: str) -> list[str]:
    """Lines that a page shows as code and that `blocks` does not find: set in by four spaces, or in a fence
    without a language that runs."""
    marked = (*RUN, "text") if WRITTEN in text else RUN
    rest = FENCE.sub(lambda match: "" if match[1] in marked else match[0], text)
    return re.findall(r"^ *(?:```|~~~).*$|(?<=\n\n)    [^ \n*-].*$", rest, re.M)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of links and images, without code."""
    text = re.sub(r"`[^`\n]*`", "", prose(text))
    return re.findall(r"\]\(([^()\s]+)\)", text)


def anchors(text: str) -> set[str]:
    """What a link may name behind #, as MkDocs and GitHub make it of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        kept = re.sub(r"[^\w\s-]", "", heading).strip()
        found |= {re.sub(r"[-\s]+", "-", kept), re.sub(r"\s", "-", kept)}
    return found


def answers(links: Iterable[str], seconds: float = 20) -> dict[str, int | None]:
    """What web servers say to each link, such as 200 or 404; None where none is reached. A server that is
    silent once is not asked again."""
    found, silent = {}, set()
    for link in links:
        server = urllib.parse.urlsplit(link).netloc
        found[link] = None if server in silent else status(link, seconds)
        if found[link] is None:
            silent.add(server)
    return found


def status(url: str, seconds: float) -> int | None:
    asked = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "jax_sparse24 links"})
    try:
        with urllib.request.urlopen(asked, timeout=seconds) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
