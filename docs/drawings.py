"""The drawings of docs/concepts.md: `python docs/drawings.py` writes them into docs/images.

They stand on a light ground of their own, so that they read the same on a light and on a dark page."""

from pathlib import Path
from xml.sax.saxutils import escape

import jax_sparse24 as s24

STEPS = 6000  # of the run whose phases are drawn, as in the code below the drawing
IMAGES = Path(__file__).parent / "images"
GROUND, INK, PALE, BLUE, ORANGE, GREEN = "#f8f8f6", "#222222", "#dcdcd8", "#0072b2", "#d55e00", "#009e73"
CELL = 26


class Drawing:
    """Shapes and words on a sheet of so many pixels."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{escape(title)}" font-family="Helvetica, sans-serif">',
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        ]

    def box(self, x, y, width, height, fill):
        shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
        self.parts.append(f'{shape} stroke="#ffffff" stroke-width="1.5" rx="2"/>')

    def text(self, x, y, words, size=13, fill=INK, anchor="start", weight="normal"):
        style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(str(words))}</text>')

    def line(self, x1, y1, x2, y2, colour=INK, width=1.5):
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>')

    def arrow(self, x1, x2, y):
        self.line(x1, y, x2, y)
        self.parts.append(f'<path d="M{x2:g} {y:g} l-8 -4 v8 z" fill="{INK}"/>')

    def cells(self, x, y, rows, colour=BLUE, size=CELL):
        """Numbers in a grid; a number in a list of its own, or None, is not kept."""
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                kept = not isinstance(value, list | None)
                fill = colour if kept else PALE
                self.box(x + j * size, y + i * size, size, size, fill)
                shown = value if kept else (value[0] if value else "")
                ink = "#ffffff" if kept else "#888888"
                self.text(x + (j + 0.5) * size, y + (i + 0.66) * size, shown, 12, ink, "middle")

    def write(self, name: str) -> Path:
        path = IMAGES / f"{name}.svg"
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")
        return path


def two_of_four() -> Path:
    """A row with two of every four kept, and the same row packed."""
    sheet = Drawing(680, 150, "2:4: of every four neighbours two are kept, and packed with their places")
    row = [["1"], "7", ["-2"], "-5", "4", ["0"], "-6", ["3"]]
    sheet.text(24, 34, "a row: of every four neighbours the two of largest magnitude are kept", weight="bold")
    sheet.cells(24, 50, [row])
    for group in range(2):
        left = 24 + group * 4 * CELL
        sheet.line(left + 2, 84, left + 4 * CELL - 2, 84, BLUE, 3)
        sheet.text(left + 2 * CELL, 102, "a group of four", 11, BLUE, "middle")
    sheet.arrow(250, 300, 63)
    sheet.cells(320, 50, [["7", "-5", "4", "-6"]])
    sheet.text(320, 102, "values: half as many", 11, BLUE)
    sheet.cells(470, 50, [["1", "3", "0", "2"]], GREEN)
    sheet.text(470, 102, "places in the group: 2 bits each", 11, GREEN)
    sheet.text(
        24,
        134,
        "In 16 bits the packed row takes 9/16 of the bytes: half of the values, and their places.",
        12,
    )
    return sheet.write("concept-two-of-four")


def one_operand() -> Path:
    """A product whose first operand is packed along the contracted axis."""
    sheet = Drawing(680, 250, "One operand of a product is sparse, in groups along the contracted axis")
    sheet.text(24, 30, "Y = A B: every element of Y is a sum over the contracted axis K", weight="bold")
    rows = [["", "", [""], [""], [""], "", "", [""]], [[""], "", "", [""], "", [""], [""], ""]]
    sheet.cells(24, 66, [*rows, rows[1][::-1], rows[0]])
    sheet.text(24 + 4 * CELL, 58, "A, 2:4 along K", 12, BLUE, "middle")
    sheet.text(24 + 4 * CELL, 190, "K →", 12, INK, "middle")
    sheet.text(254, 126, "×", 24)
    picked = {0, 1, 5, 6}
    for k in range(8):
        for j in range(3):
            sheet.box(300 + j * CELL, 66 + k * 17, CELL, 17, ORANGE if k in picked else PALE)
    sheet.text(300 + 1.5 * CELL, 58, "B, dense", 12, ORANGE, "middle")
    sheet.text(392, 128, "=", 24)
    for i in range(4):
        for j in range(3):
            sheet.box(430 + j * CELL, 66 + i * CELL, CELL, CELL, GREEN)
    sheet.text(430 + 1.5 * CELL, 58, "Y", 12, GREEN, "middle")
    sheet.text(530, 96, "The places of A's values", 12)
    sheet.text(530, 113, "say which rows of B", 12)
    sheet.text(530, 130, "are fetched (orange: for", 12)
    sheet.text(530, 147, "A's first row). Were B", 12)
    sheet.text(530, 164, "sparse too, both would", 12)
    sheet.text(530, 181, "have to meet: no such", 12)
    sheet.text(530, 198, "instruction exists.", 12)
    sheet.text(
        24, 232, "Groups must lie along K. The same matrix meets another product along its other axis.", 12
    )
    return sheet.write("concept-one-operand")


def mvue() -> Path:
    """A group, draws of it, and their mean."""
    sheet = Drawing(680, 190, "MVUE: random 2:4 groups whose mean is the gradient")
    sheet.text(24, 30, "a gradient's group", weight="bold")
    sheet.cells(24, 46, [["4", "2", "1", "1"]], ORANGE)
    sheet.text(190, 30, "2:4 at random: small values are kept rarely, and are then larger", weight="bold")
    draws = [
        ["4", "4", [""], [""]],
        ["4", [""], "4", [""]],
        ["4", "4", [""], [""]],
        ["4", [""], [""], "4"],
    ]
    for index, draw in enumerate(draws):
        x, y = 190 + (index % 4) * 116, 46
        sheet.cells(x, y, [draw])
        sheet.text(x + 2 * CELL, 92, f"draw {index + 1}", 11, "#666666", "middle")
    sheet.text(24, 128, "mean of the four", weight="bold")
    sheet.cells(190, 110, [["4", "2", "1", "1"]], ORANGE)
    sheet.text(310, 128, "= the gradient. The two largest would be 4 2 0 0 each time:", 12)
    sheet.text(310, 145, "small values would never reach the weights.", 12)
    sheet.text(
        24,
        176,
        "Of all such estimates it is the one of least variance: minimum-variance unbiased estimate.",
        12,
    )
    return sheet.write("concept-mvue")


def vnm() -> Path:
    """A block of V rows that share four of M columns, 2:4 within."""
    sheet = Drawing(
        680, 220, "V:2:M: rows of a block share four of every M columns, and are 2:4 within these"
    )
    chosen = (1, 2, 5, 7)
    kept = [(1, 5), (2, 7), (1, 2), (5, 7)]
    sheet.text(24, 30, "V = 4 rows (tokens), M = 8 columns (neurons)", weight="bold")
    for i in range(4):
        for j in range(8):
            fill = BLUE if j in kept[i] else "#a9cfe6" if j in chosen else PALE
            sheet.box(24 + j * CELL, 62 + i * CELL, CELL, CELL, fill)
    for j in chosen:
        sheet.text(24 + (j + 0.5) * CELL, 56, "▼", 11, BLUE, "middle")
    sheet.text(24, 188, "▼ four columns that the block shares; in each row two of them are kept", 12, BLUE)
    sheet.arrow(250, 300, 114)
    for i in range(4):
        for j in range(2):
            sheet.box(320 + j * CELL, 62 + i * CELL, CELL, CELL, BLUE)
            sheet.box(400 + j * CELL, 62 + i * CELL, CELL, CELL, GREEN)
    for j in range(4):
        sheet.box(480 + j * CELL, 62, CELL, CELL, ORANGE)
    sheet.text(320, 52, "values", 12, BLUE)
    sheet.text(400, 52, "places", 12, GREEN)
    sheet.text(480, 52, "columns of the block", 12, ORANGE)
    sheet.text(480, 118, "2 of M elements are left,", 12)
    sheet.text(480, 135, "here a quarter; the tensor core", 12)
    sheet.text(480, 152, "still multiplies 2:4.", 12)
    return sheet.write("concept-vnm")


def phases() -> Path:
    """When methods are sparse in a run."""
    sheet = Drawing(680, 190, "Phases: which part of a run is sparse, by method")
    for index, name in enumerate(("FST", "Activation24", "Venom", "SSTE")):
        y, x = 24 + 34 * index, 130.0
        sheet.text(118, y + 18, name, 13, INK, "end", "bold")
        for phase in getattr(s24.methods, name)().schedule(STEPS).phases:
            width = 520 * phase.steps / STEPS
            sheet.box(x, y, width, CELL, BLUE if phase.sparse else PALE)
            words = f"{'sparse' if phase.sparse else 'dense'}, {phase.steps}"
            sheet.text(x + width / 2, y + 18, words, 12, "#ffffff" if phase.sparse else INK, "middle")
            x += width
    sheet.arrow(130, 650, 168)
    sheet.text(130, 184, "first step", 11)
    sheet.text(650, 184, f"step {STEPS}", 11, INK, "end")
    return sheet.write("concept-phases")


if __name__ == "__main__":
    for draw in (two_of_four, one_operand, mvue, vnm, phases):
        print(draw())
